"""`memora up`: Redis if none is configured, a worker and the server, as one thing that starts and stops together.

Owns the processes: their output, their restarts, and the order in which they end. What they do is their own matter.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TextIO

import anyio

from memora.cli.exit import Exit
from memora.cli.runner import Signals, run_command
from memora.cli.serve import wishes
from memora.cli.streams import Style, is_terminal
from memora.cli.texts import Texts, texts_for
from memora.cli.worker import redis_place
from memora.errors import MemoraError
from memora.settings import Settings, load_settings
from memora.storage import open_storage
from memora.web.access import Access
from memora.worker import STOP_GRACE_SECONDS

_MOST_TRIES: Final = 5
"""Ends of one child in a row, before everything stops."""

_FIRST_PAUSE_SECONDS: Final = 0.5
_SETTLED_SECONDS: Final = 30.0
"""A child that lived so long is well; its next end is the first again."""

_LAST_SECONDS: Final = 8.0
"""Beyond the child's own grace: it closes what it has open."""

_NAME_WIDTH: Final = 6
_MOST_LINE_BYTES: Final = 1_048_576
_COLORS: Final = {"redis": "35", "worker": "36", "server": "32"}
_URL: Final = re.compile(r"https?://\S+")


class Output:
    """The lines of all children, each with the name of its child in front."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._style = Style.of(stream)

    def tell(self, name: str, line: str) -> None:
        """Write one line."""
        prefix = f"{name:<{_NAME_WIDTH}} | "
        if self._style.colored:
            prefix = f"\x1b[{_COLORS.get(name, '1')}m{prefix}\x1b[0m"
        self._stream.write(f"{prefix}{self._style.data(line)}\n")
        self._stream.flush()


@dataclass
class Child:
    """One command of ours, kept alive until it is told to end."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    grace_seconds: float
    output: Output
    texts: Texts
    url: str = ""
    ready: anyio.Event = field(default_factory=anyio.Event)
    _process: asyncio.subprocess.Process | None = None
    _stopping: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        """Run it, and again with a growing pause when it ends by itself.

        Raises:
            ChildEnded: it will not live.
        """
        tries = 0
        while True:
            started = anyio.current_time()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            self.output.tell(self.name, self.texts.up_ended.format(code=code))
            tries = 1 if anyio.current_time() - started > _SETTLED_SECONDS else tries + 1
            if tries >= _MOST_TRIES or code == Exit.WRONG_USE or not self.ready.is_set():
                raise ChildEnded(f"the {self.name} does not stay alive: its last lines say why")
            pause = _FIRST_PAUSE_SECONDS * 2 ** (tries - 1)
            self.output.tell(self.name, self.texts.up_again.format(seconds=f"{pause:g}"))
            await anyio.sleep(pause)

    async def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        _signal(process, signal.SIGTERM)
        with anyio.move_on_after(self.grace_seconds + _LAST_SECONDS):
            await process.wait()
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            _signal(self._process, signal.SIGKILL)

    async def _run_once(self) -> int:
        """Run it to its end; its exit code."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "memora.cli.leash", *self.arguments),
            stdin=asyncio.subprocess.PIPE,  # its end tells the child that we are gone
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self.environment,
            limit=_MOST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches us alone, so that the order is ours
        )
        self._process = process
        try:
            await self._pass_on(process)
            return await process.wait()
        finally:
            if process.returncode is None:
                _signal(process, signal.SIGKILL)

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101  # it was asked for
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:
                continue  # a line beyond all measure
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip("\r\n")
            self.output.tell(self.name, line)
            self._look_at(line)

    def _look_at(self, line: str) -> None:
        """The first line of a child says that it runs; that of the server also says where."""
        found = _URL.search(line)
        if self.name == "server" and found is None:
            return
        if not self.ready.is_set():
            self.url = found[0] if found else ""
            self.ready.set()


class ChildEnded(MemoraError):
    """A child ended by itself, and again whenever it was started."""

    code = "child_ended"


class _Up:
    """One run of the command."""

    def __init__(self, worker: Child, server: Child, output: Output, texts: Texts) -> None:
        self._worker = worker
        self._server = server
        self._output = output
        self._texts = texts
        self._stopping = anyio.Event()
        self._failure: ChildEnded | None = None
        self.stopped_by: list[signal.Signals] = []

    def take_signal(self, number: signal.Signals) -> bool:
        """The first signal drains in order; the second ends everything at once, and is what the exit code tells."""
        if self.stopped_by:
            self._server.kill()
            self._worker.kill()
            return False
        self.stopped_by.append(number)
        self._output.tell("memora", self._texts.up_stopping)
        self._stopping.set()
        return True

    async def run(self) -> None:
        """From the first start to the last end.

        Raises:
            ChildEnded: one of them will not live; the other was stopped.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep, self._worker)
            tasks.start_soon(self._keep, self._server)
            tasks.start_soon(self._announce)
            try:
                await self._stopping.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._server.stop()
                    await self._worker.stop()
            tasks.cancel_scope.cancel()
        if self._failure:
            raise self._failure

    async def _keep(self, child: Child) -> None:
        try:
            await child.run()
        except ChildEnded as failure:
            self._failure = failure
            self._stopping.set()

    async def _announce(self) -> None:
        await self._worker.ready.wait()
        await self._server.ready.wait()
        self._output.tell("memora", self._texts.up_ready.format(url=self._server.url))


def run(*, host: str | None, port: int | None, offline: bool) -> int:
    """Run everything. Returns the exit code."""
    return run_command(partial(_run, host, port, offline))


async def _run(host: str | None, port: int | None, offline: bool, signals: Signals) -> int:
    settings = load_settings(**wishes(host=host, port=port, offline=offline))
    Access.of(settings)
    texts, output = texts_for(settings.lang), Output(sys.stdout)
    async with open_storage(settings) as storage:
        place = redis_place(settings)
        output.tell("redis", texts.private_redis.format(place=place) if storage.embedded else place)
        environment = _environment(settings, storage.embedded.url if storage.embedded else None)
        worker = Child("worker", ("worker",), environment, STOP_GRACE_SECONDS, output, texts)
        server = Child("server", ("serve",), environment, settings.shutdown_grace_seconds, output, texts)
        everything = _Up(worker, server, output, texts)
        signals.handler = everything.take_signal
        await everything.run()
    return Exit.INTERRUPTED if everything.stopped_by[:1] == [signal.SIGINT] else Exit.DONE


def _environment(settings: Settings, redis_url: str | None) -> dict[str, str]:
    """What the children are told: all that we were told, and what came of it. Secrets travel only here."""
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "MEMORA_HOST": settings.host,
        "MEMORA_PORT": str(settings.port),
    }
    if redis_url:
        environment["MEMORA_REDIS_URL"] = redis_url
    if settings.offline:
        environment["MEMORA_OFFLINE"] = "1"
    if settings.log_format == "auto" and is_terminal(sys.stdout):
        environment["MEMORA_LOG_FORMAT"] = "text"
    return environment


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)
