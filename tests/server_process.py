"""`memora serve` or `memora up` as a process of its own, and clients of it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from polling import eventually
from serving import KEY
from worker_process import REPOSITORY, environment_for

from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.store import ConversationStore


class ServerProcess:
    """One server process, and a client of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self._log = log

    @property
    def output(self) -> str:
        """All it wrote."""
        return self._log.read_text(errors="replace")

    @property
    def root(self) -> str:
        """The address without a path."""
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> AsyncOpenAI:
        """The official client, without retries of its own."""
        return AsyncOpenAI(base_url=f"{self.root}/v1", api_key=KEY, timeout=40, max_retries=0)

    async def is_up(self) -> bool:
        """Whether it answers."""
        async with httpx2.AsyncClient(trust_env=False) as http:
            try:
                return (await http.get(f"{self.root}/livez")).status_code == 200
            except httpx2.TransportError:
                assert self.process.poll() is None, self.output
                return False


@asynccontextmanager
async def server_process(
    settings: Settings, offline: OfflineModel, port: int = 0, command: str = "serve", **environment: str
) -> AsyncIterator[ServerProcess]:
    """A server that runs meanwhile, alone or under `up`; it is killed at the end if it is still there."""
    assert settings.data_dir
    log = settings.data_dir / "serve.log"
    port = port or _free_port()
    more = {"MEMORA_PORT": str(port), "MEMORA_API_KEYS": KEY, "PYTHONPATH": str(REPOSITORY), **environment}
    process = _start(command, settings.data_dir, environment_for(settings, offline, **more), log)
    server = ServerProcess(process, port, log)
    try:
        await eventually(server.is_up, seconds=20)
        yield server
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def _start(command: str, home: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        words = [sys.executable, "-m", "memora", command]
        # A session of its own, so that Ctrl-C can be pressed: it goes to the whole group.
        return subprocess.Popen(words, cwd=home, env=environment, stdout=file, stderr=file, start_new_session=True)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def turns_of(redis: ArqRedis, conversation: str) -> list[str]:
    """What is stored."""
    return [message.content async for message in ConversationStore(redis).messages(conversation)]
