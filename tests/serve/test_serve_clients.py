"""Clients as they really are: they leave, come in twos, read slowly, and have a model that fails them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from redis_view import command, traffic
from serving import (
    Line,
    Serving,
    ask,
    ask_streaming,
    failure_of_stream,
    request_bytes,
    serve,
    turn_body,
)
from talk import changed, model_waits
from tcp_proxy import TcpProxy

from memora.embedded_redis import EmbeddedRedis
from memora.offline_model import OfflineModel
from memora.settings import Settings

TEXT = "I live in Taipei, and my cat is called Ann."
LONG_ANSWER = " ".join(f"word{number}" for number in range(60))


@pytest.mark.parametrize("is_streaming", [False, True], ids=["plain", "streaming"])
async def test_a_client_that_leaves_before_the_first_byte_loses_nothing(
    serving: Serving, offline: OfflineModel, conversation: str, *, is_streaming: bool
) -> None:
    """The model has not said a word yet; the turn is answered and stored all the same, and the lock is gone."""
    offline.hold("answer")
    body = turn_body(TEXT, conversation, stream=is_streaming)
    line = await Line.open(serving.port, request_bytes(serving.port, "POST", "/v1/responses", body))
    await model_waits(offline)
    line.leave()
    offline.release()
    ((question, answer),) = await serving.turns_become(conversation, 1)
    assert question == TEXT
    assert "Taipei" in answer
    assert await serving.is_free(conversation)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0], ids=["10 %", "50 %", "just before the end"])
async def test_a_client_that_leaves_in_the_middle_loses_nothing(
    settings: Settings, redis: ArqRedis, share: float
) -> None:
    """Question and whole answer are in the history, and the next turn goes on from them."""
    assert await redis.dbsize() == 0
    async with OfflineModel(scriptable=True, piece_delay_seconds=0.01) as model:
        model.add_fault({"kind": "text", "text": LONG_ANSWER}, match="answer", times=1)
        slow_settings = settings.model_copy(update={"openai_base_url": model.url})
        async with serve(slow_settings) as serving, serving.client() as client:
            conversation = (await client.conversations.create()).id
            async with await client.responses.create(
                model="memora", input=TEXT, conversation=conversation, stream=True
            ) as stream:
                heard = 0
                async for event in stream:
                    heard += event.type == "response.output_text.delta"
                    if heard and heard >= int(share * 59):
                        break
            assert await serving.turns_become(conversation, 1) == [(TEXT, LONG_ANSWER)]
            assert "Taipei" in await ask(client, "Where do I live?", conversation)


async def test_two_tabs_never_interleave(serving: Serving, conversation: str) -> None:
    """2 clients × 10 turns at once: whole pairs, nothing lost, each in its own order, and each got its own answer."""

    async def tab(who: str, *, is_streaming: bool) -> dict[str, str]:
        heard = {}
        async with serving.client(max_retries=5) as client:
            for number in range(10):
                text = f"I am {who} and this is fact {number}."
                heard[text] = await (ask_streaming if is_streaming else ask)(client, text, conversation)
        return heard

    heard = await asyncio.gather(tab("Ann", is_streaming=False), tab("Bea", is_streaming=True))
    stored = await serving.turns(conversation)
    assert len(stored) == 20
    assert dict(stored) == {**heard[0], **heard[1]}
    for who in heard:
        assert [question for question, _ in stored if question in who] == list(who)


async def test_a_locked_conversation_is_a_conflict_and_the_client_comes_again(
    settings: Settings, redis: ArqRedis, offline: OfflineModel
) -> None:
    """After a bounded wait: 409 `conversation_locked` with `Retry-After`, and the official client retries by itself."""
    assert await redis.dbsize() == 0
    async with (
        serve(changed(settings, turn_wait_seconds=0.2)) as serving,
        serving.client(max_retries=0) as client,
        serving.client(max_retries=8) as patient,
    ):
        conversation = (await client.conversations.create()).id
        offline.hold("answer", contains="first")
        first = asyncio.create_task(ask(client, "the first one", conversation))
        await model_waits(offline)
        for turn in (ask, ask_streaming):
            with pytest.raises(openai.ConflictError) as locked:
                await turn(client, "the second one", conversation)
            assert locked.value.code == "conversation_locked"
            assert 0 < float(locked.value.response.headers["retry-after"]) <= 120
        again = asyncio.create_task(ask(patient, "the second one", conversation))
        offline.release()
        answers = [await first, await again]
        assert await serving.turns(conversation) == list(zip(["the first one", "the second one"], answers, strict=True))


async def test_who_waits_does_not_ask_redis_all_the_time(
    serving: Serving, offline: OfflineModel, conversation: str, redis: ArqRedis
) -> None:
    """Twenty requests behind one slow turn cost a few commands a second, not a storm; then all are answered."""
    offline.hold("answer", contains="first")
    async with serving.client(max_retries=0) as client:
        first = asyncio.create_task(ask(client, "the first one", conversation))
        await model_waits(offline)
        waiting = [asyncio.create_task(ask(client, f"number {number}", conversation)) for number in range(20)]
        async with traffic(redis) as seen:
            await asyncio.wait(waiting, timeout=1.0)
        assert len(seen.sent) < 20
        assert not any(task.done() for task in waiting)
        offline.release()
        await asyncio.gather(first, *waiting)
    assert len(await serving.turns(conversation)) == 21


async def test_a_slow_reader_costs_only_itself(serving: Serving, offline: OfflineModel, client: AsyncOpenAI) -> None:
    """It reads nothing of a long answer: others are served meanwhile, and its turn is stored without its help."""
    answer = " ".join(f"{number:0>300}" for number in range(250))
    offline.add_fault({"kind": "text", "text": answer}, match="answer", contains="novel", times=1)
    slow = (await client.conversations.create()).id
    body = turn_body("Tell me a novel.", slow, stream=True)
    line = await Line.open(
        serving.port, request_bytes(serving.port, "POST", "/v1/responses", body), receive_buffer=4_096
    )
    for number in range(5):
        other = (await client.conversations.create()).id
        started = time.monotonic()
        assert await ask(client, f"I own {number} books.", other)
        assert time.monotonic() - started < 5
    stored = await serving.turns_become(slow, 1)
    assert stored[0][1] == answer
    line.leave()


FAILURES: dict[str, tuple[dict[str, Any], tuple[type[openai.APIStatusError], ...], set[str]]] = {
    "500": ({"kind": "status", "status": 500}, (openai.InternalServerError,), {"upstream_error"}),
    "429": (
        {"kind": "status", "status": 429},
        (openai.RateLimitError, openai.InternalServerError),
        {"upstream_error", "rate_limit_exceeded", "upstream_rate_limited"},
    ),
    "401": ({"kind": "status", "status": 401}, (openai.InternalServerError,), {"upstream_error", "upstream_denied"}),
    "400": ({"kind": "status", "status": 400}, (openai.InternalServerError,), {"upstream_error", "upstream_refused"}),
    "reset": ({"kind": "reset"}, (openai.InternalServerError,), {"upstream_error"}),
    "html": ({"kind": "html"}, (openai.InternalServerError,), {"upstream_error", "upstream_output_unusable"}),
    "garbage": ({"kind": "garbage"}, (openai.InternalServerError,), {"upstream_error", "upstream_output_unusable"}),
    "empty": ({"kind": "empty"}, (openai.InternalServerError,), {"upstream_error", "upstream_output_unusable"}),
    "failed": ({"kind": "failed"}, (openai.InternalServerError,), {"upstream_error"}),
    "cut": ({"kind": "cut", "after_characters": 9}, (openai.InternalServerError,), {"upstream_error"}),
    "too long": (
        {"kind": "status", "status": 400, "code": "context_length_exceeded"},
        (openai.BadRequestError,),
        {"context_length_exceeded"},
    ),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_model_that_fails_is_told_as_what_it_is(
    serving: Serving, offline: OfflineModel, client: AsyncOpenAI, conversation: str, name: str
) -> None:
    """Plain: the right class and code. Streaming: the same, or an event if it has begun. Nothing stored; on it goes."""
    fault, classes, codes = FAILURES[name]
    offline.add_fault(fault, match="answer")
    with pytest.raises(classes) as failed:
        await ask(client, TEXT, conversation)
    assert failed.value.code in codes
    assert failed.value.request_id
    assert "Taipei" not in str(failed.value)
    assert await failure_of_stream(client, TEXT, conversation) in codes
    assert await serving.turns(conversation) == []
    assert await serving.is_free(conversation)
    offline.clear_faults()
    assert "Taipei" in await ask(client, TEXT, conversation)
    assert len(await serving.turns(conversation)) == 1


@pytest.mark.parametrize("kind", ["hang", "drip"])
async def test_a_model_that_takes_too_long_is_a_timeout(
    settings: Settings, redis: ArqRedis, offline: OfflineModel, kind: str
) -> None:
    """504 `upstream_timeout` at the deadline of the whole answer, or an event after the first byte; nothing stored."""
    assert await redis.dbsize() == 0
    async with (
        serve(changed(settings, answer_timeout_seconds=0.4)) as serving,
        serving.client(max_retries=0) as client,
    ):
        conversation = (await client.conversations.create()).id
        offline.add_fault({"kind": kind}, match="answer")
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(client, TEXT, conversation)
        assert (failed.value.status_code, failed.value.code) == (504, "upstream_timeout")
        assert await failure_of_stream(client, TEXT, conversation) == "upstream_timeout"
        offline.clear_faults()
        assert await ask(client, TEXT, conversation)
        assert len(await serving.turns(conversation)) == 1


async def test_redis_that_is_full_is_a_503(
    serving: Serving, conversation: str, client: AsyncOpenAI, redis: ArqRedis
) -> None:
    """`storage_unavailable` at once, without an address in it; when there is room again, it goes on."""
    await command(redis, "CONFIG", "SET", "maxmemory", "1")
    try:
        for turn in (ask, ask_streaming):
            with pytest.raises(openai.InternalServerError) as failed:
                await turn(client, TEXT, conversation)
            assert (failed.value.status_code, failed.value.code) == (503, "storage_unavailable")
            assert "/" not in failed.value.message.partition(" - ")[2]
    finally:
        await command(redis, "CONFIG", "SET", "maxmemory", "0")
    assert await serving.turns(conversation) == []
    assert "Taipei" in await ask(client, TEXT, conversation)


async def test_redis_that_is_silent_is_a_503(settings: Settings, redis_server: EmbeddedRedis, redis: ArqRedis) -> None:
    """A network that carries nothing any more is noticed within a bounded time, and forgotten when it is back."""
    assert await redis.dbsize() == 0
    async with (
        TcpProxy(redis_server.url) as network,
        serve(changed(settings, redis_url=network.url)) as serving,
        serving.client(max_retries=0) as client,
    ):
        conversation = (await client.conversations.create()).id
        network.partition()
        started = time.monotonic()
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(client, TEXT, conversation)
        assert (failed.value.status_code, failed.value.code) == (503, "storage_unavailable")
        assert time.monotonic() - started < 15
        network.cut()
        assert "Taipei" in await ask(client, TEXT, conversation)
