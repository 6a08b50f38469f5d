"""Running a command's coroutine: the event loop, the signals, and what becomes of every exception.

Owns the promise that nothing in the tree of `MemoraError` ends in a traceback, and that SIGTERM, SIGHUP and Ctrl-C end
a command through its own clean-up.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from memora.cli.exit import Exit, close_broken_pipe, report
from memora.errors import MemoraError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OF_A_SIGNAL: Final = 128


class Signals:
    """What is said to the process from outside.

    `handler` may take a signal for itself by returning True; any other ends the command.
    """

    def __init__(self) -> None:
        self.handler: Callable[[signal.Signals], bool] | None = None
        self.received: signal.Signals | None = None

    async def watch(self, command: anyio.CancelScope) -> None:
        """Cancel the command on the first signal nobody takes. What the shell had us ignore stays ignored."""
        wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        with anyio.open_signal_receiver(*wanted) as arriving:
            async for number in arriving:
                if self.handler is None or not self.handler(number):
                    self.received = self.received or number
                    command.cancel()

    @property
    def exit_code(self) -> int | None:
        """The exit code after a signal that ended the command."""
        return None if self.received is None else _OF_A_SIGNAL + self.received


Command = Callable[[Signals], Awaitable[int]]


def run_command(
    command: Command, *, as_json: bool = False, errors_to_stdout: bool = False, loop: dict[str, Any] | None = None
) -> int:
    """Run a command to its end. Returns its exit code.

    With `errors_to_stdout` an error is part of the output, for programs that read one object a line. `loop` is what
    anyio is told of its event loop.
    """
    try:
        return anyio.run(_watched, command, backend="asyncio", backend_options=loop)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BaseException as error:  # noqa: BLE001  # sorted below; what is not ours is raised again
        return _explained(_innermost(error), as_json=as_json, errors_to_stdout=errors_to_stdout)


def event_loop() -> dict[str, Any]:
    """What anyio is told of the event loop: the faster one, where it is installed."""
    return {"use_uvloop": importlib.util.find_spec("uvloop") is not None}


async def _watched(command: Command) -> int:
    signals = Signals()
    code = int(Exit.DONE)
    async with anyio.create_task_group() as watching:
        with anyio.CancelScope() as running:
            watching.start_soon(signals.watch, running)
            code = await command(signals)
        watching.cancel_scope.cancel()
    return code if signals.exit_code is None else signals.exit_code


def _explained(error: BaseException, *, as_json: bool, errors_to_stdout: bool) -> int:
    if isinstance(error, BrokenPipeError):
        return close_broken_pipe()
    if isinstance(error, MemoraError):
        return report(error, as_json=as_json, stream=sys.stdout if errors_to_stdout else sys.stderr)
    raise error


def _innermost(error: BaseException) -> BaseException:
    """The first error of a group of groups, ours before all others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = [_innermost(member) for member in error.exceptions]
    return next((member for member in inner if isinstance(member, (MemoraError, BrokenPipeError))), inner[0])
