"""The processes of a chaos run: a durable Redis, and children that can be killed, frozen, ended and started again."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from command_line import _COMPILED as COMPILED
from command_line import ROOT

from memora.embedded_redis import find_engine

END_SECONDS = 60.0


class RedisProcess:
    """A real server on a socket, with every write on disk before it is acknowledged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return "unix://" + quote(str(self._socket))

    def start(self) -> None:
        """Start it, over what the last one has left on disk."""
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([find_engine(None).path, *words], stdout=log, stderr=log)

    async def kill(self) -> None:
        """As power would: no goodbye."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


class Child:
    """One `memora` command that is started again and again. `busy` while something is being done to it."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], directory: Path) -> None:
        self.name = name
        self.busy = False
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self._clock = directory / f"{name}.clock"
        self._log = directory / f"{name}.log"
        self._directory = directory
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
            "PYTHONPYCACHEPREFIX": str(COMPILED),
            "LANG": "C.UTF-8",
            "CHAOS_CLOCK": str(self._clock),
            **environment,
        }
        self.move_clock(0.0)

    def start(self, *, with_pipes: bool = False) -> None:
        """Start it; its output goes to a log, or, with pipes, to whoever reads it."""
        command = [sys.executable, str(ROOT / "tests" / "chaos_child.py"), *self.arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.PIPE if with_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if with_pipes else log,
                stderr=log,
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is there to get it."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end.

        Raises:
            AssertionError: it does not end.
        """
        if self.process is None:
            return
        self.send(number)
        try:
            await asyncio.to_thread(self.process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            raise AssertionError(f"{self.name} did not end on {number.name} within {END_SECONDS:.0f} s") from None

    def ask(self, line: str, seconds: float) -> bytes:
        """Write a line to a child with pipes and wait for the line it answers with; b"" if it has ended."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return b""
        if not select.select([process.stdout], [], [], seconds)[0]:
            raise AssertionError(f"{self.name} has not answered for {seconds:.0f} s")
        return process.stdout.readline()

    def output(self) -> bytes:
        """All that a child with pipes writes until it ends by itself."""
        assert self.process is not None
        return self.process.communicate(timeout=END_SECONDS)[0] or b""

    def kill(self) -> None:
        """End it at once, if it is still there, and close its pipes."""
        process = self.process
        if process is None:
            return
        self.send(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def move_clock(self, seconds: float) -> None:
        """Make its clock wrong by so much, now."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))

    @property
    def log(self) -> str:
        """All it wrote to standard error."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""
