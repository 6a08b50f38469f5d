"""What becomes of running answers when the server is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass

import httpx2
import openai
import pytest
from arq.connections import ArqRedis
from polling import eventually
from server_process import ServerProcess, server_process, turns_of
from serving import ask, ask_streaming, failure_of_stream
from talk import model_waits

from memora.offline_model import OfflineModel
from memora.settings import Settings

TEXT = "I live in Taipei, and my cat is called Ann."


async def refuses(server: ServerProcess) -> bool:
    """Whether nobody listens any more."""
    try:
        async with httpx2.AsyncClient(trust_env=False) as http:
            await http.get(f"{server.root}/livez")
    except httpx2.ConnectError:
        return True
    except httpx2.TransportError:
        pass  # it was taken just before the end
    return False


async def ended(server: ServerProcess) -> int:
    """Wait for the end; the exit code."""
    return await asyncio.to_thread(server.process.wait, 20)


@dataclass(frozen=True)
class Stop:
    """How a command is told to stop, and the exit code of that."""

    command: str
    number: signal.Signals
    code: int
    is_typed: bool = False

    def tell(self, process: subprocess.Popen[bytes]) -> None:
        """Send the signal; what is typed at a terminal goes to every process of the group."""
        if self.is_typed:
            os.killpg(process.pid, self.number)
        else:
            process.send_signal(self.number)


STOPS = {
    "serve": Stop("serve", signal.SIGTERM, 0),
    "serve by Ctrl-C": Stop("serve", signal.SIGINT, 130, is_typed=True),
    "up": Stop("up", signal.SIGTERM, 0),
    "up by Ctrl-C": Stop("up", signal.SIGINT, 130, is_typed=True),
}
every_stop = pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
each_command = pytest.mark.parametrize("stop", [STOPS["serve"], STOPS["up"]], ids=["serve", "up"])


@every_stop
@pytest.mark.usefixtures("redis")
async def test_running_answers_finish_before_the_server_does(
    settings: Settings, redis: ArqRedis, offline: OfflineModel, stop: Stop
) -> None:
    """In the middle of a plain and a streaming answer: no new connection is taken, both come whole."""
    async with server_process(settings, offline, command=stop.command) as server, server.client() as client:
        one, other = [(await client.conversations.create()).id for _ in range(2)]
        offline.hold("answer")
        asking = [
            asyncio.create_task(ask(client, TEXT, one)),
            asyncio.create_task(ask_streaming(client, TEXT, other)),
        ]
        await model_waits(offline, requests=2)
        stop.tell(server.process)
        await eventually(lambda: refuses(server))
        offline.release()
        answers = await asyncio.gather(*asking)
        assert await ended(server) == stop.code
        assert "Traceback" not in server.output
    assert await turns_of(redis, one) == [TEXT, answers[0]]
    assert await turns_of(redis, other) == [TEXT, answers[1]]


@each_command
@pytest.mark.usefixtures("redis")
async def test_an_answer_that_outlives_the_grace_is_cut_off_and_says_so(
    settings: Settings, redis: ArqRedis, offline: OfflineModel, stop: Stop
) -> None:
    """`server_stopping`, in the middle of a stream too; nothing of the turn is stored, and the conversation is free."""
    async with (
        server_process(settings, offline, command=stop.command, MEMORA_SHUTDOWN_GRACE_SECONDS="1") as server,
        server.client() as client,
    ):
        one, other = [(await client.conversations.create()).id for _ in range(2)]
        offline.add_fault({"kind": "drip"}, match="answer")
        asking = asyncio.create_task(ask(client, TEXT, one))
        streaming = asyncio.create_task(failure_of_stream(client, TEXT, other))
        await eventually(lambda: _locked(redis, one, other))
        stop.tell(server.process)
        with pytest.raises(openai.InternalServerError) as failure:
            await asking
        assert (failure.value.status_code, failure.value.code) == (503, "server_stopping")
        assert await streaming == "server_stopping"
        assert await ended(server) == stop.code
        assert "Traceback" not in server.output
    for conversation in (one, other):
        assert await turns_of(redis, conversation) == []
        assert not await redis.exists(f"memora:{{0}}:{conversation}:lock")


@each_command
@pytest.mark.usefixtures("redis")
async def test_a_second_signal_ends_at_once(
    settings: Settings, redis: ArqRedis, offline: OfflineModel, stop: Stop
) -> None:
    """With an answer that hangs and a grace of a minute, it is over in moments, and nothing is half stored."""
    async with (
        server_process(settings, offline, command=stop.command, MEMORA_SHUTDOWN_GRACE_SECONDS="60") as server,
        server.client() as client,
    ):
        conversation = (await client.conversations.create()).id
        offline.hold("answer")
        asking = asyncio.create_task(ask(client, TEXT, conversation))
        await model_waits(offline)
        stop.tell(server.process)
        await eventually(lambda: refuses(server))
        stop.tell(server.process)
        assert await ended(server) == 128 + stop.number
        with pytest.raises(openai.APIError):
            await asking
        offline.release()
    assert await turns_of(redis, conversation) == []


async def _locked(redis: ArqRedis, *conversations: str) -> bool:
    return bool(
        await redis.exists(*(f"memora:{{0}}:{conversation}:lock" for conversation in conversations))
        == len(conversations)
    )
