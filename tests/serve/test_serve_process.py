"""`memora serve` as a process of its own: what it writes, and what is left when it is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx2
import openai
import pytest
from arq.connections import ArqRedis
from server_process import server_process, turns_of
from serving import KEY, ask, ask_streaming, failure_of_stream
from talk import model_waits

from memora.offline_model import OfflineModel
from memora.settings import Settings

SECRET = "zq7secretwordzq7"
TEXT = "I live in Taipei, and my cat is called Ann."


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
