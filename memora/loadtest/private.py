"""Everything a load test needs of its own: Redis, the judging offline model, servers and workers, as processes.

Owns their lives, and the accidents that happen to them. Must not know what is measured.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp
import anyio

import memora
from memora.embedded_redis import EmbeddedRedis
from memora.errors import MemoraError
from memora.loadtest.keeper import REDIS
from memora.offline_model.behaviour import Behaviour

_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 15.0


class NotStarted(MemoraError):
    """A process of the load test did not come up."""

    code = "not_started"


class Process:
    """One command of ours that can be killed and started again."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._arguments, self._environment, self._log = arguments, environment, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *self._arguments),
                env=dict(self._environment),
                cwd=self._log.parent,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process  # noqa: S101  # it was started
        return self._process.pid

    async def first_line(self) -> str:
        """What it writes first.

        Raises:
            NotStarted: it ends instead, or takes too long.
        """
        line = b""
        with anyio.move_on_after(_START_SECONDS):
            assert self._process  # noqa: S101  # it was started
            assert self._process.stdout  # noqa: S101  # it was asked for
            line = await self._process.stdout.readline()
        if not line:
            raise NotStarted(f"the {self.name} did not start: {self._last_words()}")
        return line.decode().strip()

    async def kill(self) -> None:
        """End it as a power cut would."""
        await self._end(signal.SIGKILL, _STOP_SECONDS)

    async def stop(self) -> None:
        """Let it end by itself, for a bounded time."""
        await self._end(signal.SIGTERM, _STOP_SECONDS)

    async def _end(self, number: signal.Signals, seconds: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
            with anyio.move_on_after(seconds):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return lines[-1] if lines else "it says nothing"


@dataclass
class Ground:
    """What a private load test runs on."""

    urls: list[str]
    redis: EmbeddedRedis
    model_url: str
    workers: list[Process]

    async def kill_a_worker(self, dice: random.Random) -> None:
        """Kill one of the workers and start it again."""
        worker = dice.choice(self.workers)
        await worker.kill()
        await worker.start()

    async def restart_redis(self) -> None:
        """Stop Redis and start it over what it has on disk."""
        await asyncio.to_thread(self.redis.stop)
        await asyncio.to_thread(self.redis.start)

    async def say(self, method: str, path: str, body: object = None) -> Any:
        """Talk to the model's judge, or hear how many of its replies failed by chance."""
        url = f"{self.model_url.removesuffix('/v1')}/_control/{path}"
        async with aiohttp.request(method, url, json=body, raise_for_status=True) as reply:
            return await reply.json()


@asynccontextmanager
async def private_ground(
    behaviour: Behaviour, *, servers: int, workers: int, settings: Mapping[str, str]
) -> AsyncIterator[Ground]:
    """Start everything, and end it. The servers share one Redis and know nothing of each other.

    Raises:
        NotStarted, StoreError, SettingsError.
    """
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="memora-loadtest-")))
        plain = {name: value for name, value in os.environ.items() if not _is_ours(name)}
        plain |= {"MEMORA_DATA_DIR": str(home), "PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()}

        async def started(process: Process) -> Process:
            stack.push_async_callback(process.stop)
            await process.start()
            return process

        redis = EmbeddedRedis(home / REDIS)
        await asyncio.to_thread(redis.start)
        stack.callback(redis.stop)
        model_arguments = ("-m", "memora.offline_model", "--judging", *_arguments(behaviour))
        model = Process("model", model_arguments, plain, home / "model.log")
        model_url = await (await started(model)).first_line()
        # The servers and workers end with this process by themselves; these two are ended if it is killed.
        keeper = ("-m", "memora.loadtest.keeper", str(home), str(model.pid))
        await started(Process("keeper", keeper, plain, home / "keeper.log"))
        environment = plain | {
            "MEMORA_REDIS_URL": redis.url,
            "OPENAI_BASE_URL": model_url,
            "OPENAI_API_KEY": "loadtest",
            "MEMORA_PORT": "0",
            "MEMORA_HOST": "127.0.0.1",
            **settings,
        }

        def ours(command: str, number: int) -> Process:
            leash = ("-m", "memora.cli.leash", command)
            return Process(f"{command} process", leash, environment, home / f"{command}{number}.log")

        all_servers = [await started(ours("serve", number)) for number in range(servers)]
        all_workers = [await started(ours("worker", number)) for number in range(workers)]
        urls = [(await server.first_line()).split()[-1] for server in all_servers]
        yield Ground(urls, redis, model_url, all_workers)


def _arguments(behaviour: Behaviour) -> list[str]:
    """How the model's command is told to behave so."""
    return [f"--{field.name.replace('_', '-')}={getattr(behaviour, field.name)}" for field in fields(behaviour)]


def _python_path() -> str:
    """Where modules are found from any directory: processes work in one of their own, where no `.env` is."""
    return os.pathsep.join(filter(None, (str(Path(memora.__file__).parents[1]), os.environ.get("PYTHONPATH"))))


def _is_ours(name: str) -> bool:
    return name.startswith(("MEMORA_", "OPENAI_")) or name == "REDIS_URL"
