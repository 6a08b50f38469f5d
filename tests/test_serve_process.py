"""`memora serve` as a process of its own: what it writes, and what is left when it is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import openai
import pytest
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from polling import eventually
from serving import KEY, ask, ask_streaming, failure_of_stream
from talk import model_waits
from worker_process import REPOSITORY, environment_for

from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.store import ConversationStore

SECRET = "zq7secretwordzq7"
TEXT = "I live in Taipei, and my cat is called Ann."


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


async def test_nothing_of_a_talk_is_in_what_the_process_writes(
    settings: Settings, redis: ArqRedis, offline: OfflineModel
) -> None:
    """Neither message nor answer nor key, at the most talkative level, whatever goes wrong; but ids of requests are."""
    assert await redis.dbsize() == 0
    async with (
        server_process(settings, offline, MEMORA_LOG_LEVEL="DEBUG") as server,
        server.client() as client,
    ):
        conversation = (await client.conversations.create(metadata={"title": SECRET})).id
        response = await client.responses.create(model="memora", input=f"I like {SECRET}.", conversation=conversation)
        await ask_streaming(client, f"I like {SECRET} still.", conversation, instructions=f"Say {SECRET}.")
        for kind in ("failed", "cut", "garbage", "reset"):
            offline.clear_faults()
            offline.add_fault({"kind": kind}, match="answer")
            with pytest.raises(openai.APIStatusError):
                await ask(client, f"I like {SECRET} again.", conversation)
            assert await failure_of_stream(client, f"I like {SECRET} again.", conversation)
        with pytest.raises(openai.NotFoundError):
            await ask(client, SECRET, "conv_nowhere")
        async with httpx2.AsyncClient(base_url=server.root, trust_env=False) as http:
            headers = {"authorization": f"Bearer {KEY}", "x-memora-conversation": SECRET, "x-request-id": SECRET}
            for path in (f"/v1/conversations?{SECRET}", f"/{SECRET}", f"/v1/models/{SECRET}", f"/livez?{SECRET}"):
                await http.get(path, headers=headers)
            await http.post("/v1/responses", content=f'{{"input":"{SECRET}", }}', headers=headers)
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 15) == 0
        written = server.output
    assert SECRET not in written
    assert KEY not in written
    assert "test-key-0123" not in written
    assert "Traceback" not in written
    assert str(response._request_id) in written


async def test_a_server_that_is_killed_in_mid_answer_leaves_no_half_turn(
    settings: Settings, redis: ArqRedis, offline: OfflineModel
) -> None:
    """`kill -9`, and a new server on the same port: sent again, the turn waits for the dead lock and is stored once."""
    assert await redis.dbsize() == 0
    async with server_process(settings, offline) as server, server.client() as client:
        conversation = (await client.conversations.create()).id
        answer = await ask(client, "My sister is called Mei.", conversation)
        offline.hold("answer")
        plain = asyncio.create_task(ask(client, TEXT, conversation, extra_headers={"Idempotency-Key": "k"}))
        await model_waits(offline)
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            await plain
    offline.release()
    assert await turns_of(redis, conversation) == ["My sister is called Mei.", answer]
    async with server_process(settings, offline, server.port) as second, second.client() as client:
        again = await ask(client, TEXT, conversation, extra_headers={"Idempotency-Key": "k"})
        assert "Taipei" in again
    assert await turns_of(redis, conversation) == ["My sister is called Mei.", answer, TEXT, again]
