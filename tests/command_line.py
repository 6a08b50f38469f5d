"""Drives the real command line in tests: children with pipes, and children in a real terminal.

The terminal is a pty with `pyte` as its screen. Everything is polled with a deadline; nothing sleeps.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyte

ROOT = Path(__file__).parents[1]
DEADLINE_SECONDS = 30.0
ROWS, COLUMNS = 60, 100

_COMPILED = Path(tempfile.gettempdir()) / f"memora-tests-pyc-{os.getuid()}"
"""Compiled modules for all children: a start takes twice as long where Python may not write them beside the source."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What it wrote to standard output."""
        return self.out.splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects it wrote, one a line."""
        return [json.loads(line) for line in self.lines]

    @property
    def json(self) -> Any:
        """The one JSON value it wrote."""
        return json.loads(self.out)


@dataclass(frozen=True)
class CommandLine:
    """`memora` with an environment of its own."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    def using(self, **environment: str) -> CommandLine:
        """The same with more environment variables."""
        return CommandLine(self.home, {**self.environment, **environment})

    def start(self, *arguments: str | bytes, **pipes: Any) -> subprocess.Popen[bytes]:
        """Start a command with pipes for all three streams, or others."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
        return subprocess.Popen(
            [sys.executable, "-m", "memora", *arguments],
            env=self.full_environment,
            cwd=self.home,
            **pipes,
        )

    def run(self, *arguments: str | bytes, typed: str | bytes = b"") -> Ran:
        """Run a command to its end."""
        return finish(self.start(*arguments), typed)

    def run_all(self, *commands: tuple[str, ...]) -> list[Ran]:
        """Run commands at the same time."""
        return [finish(child) for child in [self.start(*command) for command in commands]]

    @property
    def full_environment(self) -> dict[str, str]:
        """Nothing of the one who runs the tests leaks in."""
        return {
            "PATH": os.defpath,
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": str(_COMPILED),
            "PYTHONWARNINGS": "error",
            "MEMORA_DATA_DIR": str(self.home / "data"),
            **self.environment,
        }

    @contextmanager
    def in_terminal(self, *arguments: str) -> Iterator[Terminal]:
        """Run a command in a terminal of its own."""
        terminal = Terminal([sys.executable, "-m", "memora", *arguments], self.full_environment, self.home)
        try:
            yield terminal
        finally:
            terminal.end()


def finish(child: subprocess.Popen[bytes], typed: str | bytes = b"") -> Ran:
    """Feed a command and wait for its end."""
    data = typed.encode() if isinstance(typed, str) else typed
    try:
        out, err = child.communicate(data, timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        raise AssertionError(f"the command did not end; it wrote {out!r} and {err!r}") from None
    return Ran(child.returncode, (out or b"").decode(), (err or b"").decode())


def wait_until(holds: Callable[[], Any], what: Callable[[], object]) -> Any:
    """Poll until something holds; `what` is said of it otherwise."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not (found := holds()):
        assert time.monotonic() < end, what()
        select.select([], [], [], 0.01)
    return found


class _Screen(pyte.Screen):
    """A screen that also says where its cursor is when it is asked."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(COLUMNS, ROWS)
        self._say = say

    def write_process_input(self, data: str) -> None:
        self._say(data)


class Terminal:
    """A command in a pty, and what its screen shows."""

    def __init__(self, command: list[str], environment: dict[str, str], home: Path) -> None:
        self._screen = _Screen(self.type)
        self._stream = pyte.ByteStream(self._screen)
        self._main, self._side = pty.openpty()
        termios.tcsetwinsize(self._main, (ROWS, COLUMNS))
        self.modes_before = termios.tcgetattr(self._side)
        self.raw = b""
        self.child = subprocess.Popen(
            # The child makes the pty its controlling terminal, so that Ctrl-C becomes a signal.
            [sys.executable, "-c", "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])", *command],
            env=environment,
            cwd=home,
            stdin=self._side,
            stdout=self._side,
            stderr=self._side,
        )

    @property
    def modes(self) -> list[Any]:
        """The terminal's modes as they are now; the side of the child is kept open for that."""
        return termios.tcgetattr(self._side)

    @property
    def lines(self) -> list[str]:
        """The lines on the screen, without the empty ones at the end."""
        shown = [line.rstrip() for line in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def text(self) -> str:
        """The screen as one text."""
        return "\n".join(self.lines)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._main, text.encode())

    def paste(self, text: str) -> None:
        """Paste as terminals do for programs that ask for it."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def see(self, *texts: str) -> str:
        """Wait until the screen shows all of these; returns it."""
        return self.wait(lambda: all(text in self.text for text in texts))

    def see_last_line(self, text: str) -> str:
        """Wait until the last line is this."""
        return self.wait(lambda: bool(self.lines) and self.lines[-1] == text)

    def wait(self, holds: Callable[[], bool]) -> str:
        """Wait until the screen is as it should be; returns it."""
        wait_until(lambda: self._is_read() and holds(), lambda: f"the screen shows:\n{self.text}")
        return self.text

    def wait_for_end(self) -> int:
        """Wait until the command has ended; returns its exit code."""
        self.wait(lambda: self.child.poll() is not None)
        self._is_read()
        return self.child.returncode

    def end(self) -> None:
        """End whatever still runs."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.wait_for_end()
            except AssertionError:
                self.child.kill()
        self.child.wait()
        os.close(self._main)
        os.close(self._side)

    def _is_read(self) -> bool:
        """Take what the command wrote; always true, when there is no more for the moment."""
        while select.select([self._main], [], [], 0.01)[0]:
            data = os.read(self._main, 65_536)
            self.raw += data
            self._stream.feed(data)
        return True


class Model:
    """A scriptable offline model in a process of its own."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "memora.offline_model", "--scriptable"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(_COMPILED)},
            stdout=subprocess.PIPE,
        )
        assert self._child.stdout is not None
        self.url = self._child.stdout.readline().decode().strip()

    @property
    def environment(self) -> dict[str, str]:
        """What makes a command use it."""
        return {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": "test-key-0123"}

    def say(self, method: str, path: str, **body: Any) -> Any:
        """Script it."""
        request = urllib.request.Request(
            f"{self.url.removesuffix('/v1')}/_control/{path}",
            method=method,
            data=json.dumps(body).encode() if body else None,
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as reply:
            return json.load(reply)

    def fail(self, times: int | None = 1, match: str = "answer", **fault: Any) -> None:
        """Let the next requests of a kind go wrong."""
        self.say("POST", "faults", match=match, times=times, fault=fault)

    def wait_until_asked(self) -> None:
        """Wait until a request is being held."""
        wait_until(lambda: self.say("GET", "state")["waiting"], lambda: "nothing was asked")

    def reset(self) -> None:
        """Forget all scripts."""
        self.say("POST", "release")
        self.say("DELETE", "faults")
        self.say("DELETE", "requests")

    def end(self) -> None:
        """Stop it."""
        self._child.terminate()
        self._child.communicate(timeout=DEADLINE_SECONDS)
