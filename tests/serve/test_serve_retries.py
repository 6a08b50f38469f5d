"""The connection dies at some byte of the reply, and the client sends the same again: one turn, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest
from arq.connections import ArqRedis
from cutting_proxy import Cut, CuttingProxy
from openai import AsyncOpenAI
from polling import eventually
from serving import Serving, ask, ask_streaming, serve, stream_events, turn_body
from talk import model_waits

from memora.offline_model import OfflineModel
from memora.settings import Settings

TEXT = "I live in Taipei, and my cat is called Ann."
PLACES = (0.0, 0.02, 0.1, 0.3, 0.6, 0.9, 1.0)
"""Where a reply is cut, as a share of its bytes: the last is right before its end."""

SLACK = 16
"""A reply is a few bytes longer or shorter than another: it says how long memory took, or that it is a replay."""


@pytest.fixture
async def proxy(serving: Serving) -> AsyncIterator[CuttingProxy]:
    """What lies between the client and the server."""
    async with CuttingProxy(serving.port) as running:
        yield running


async def new_conversation(serving: Serving) -> str:
    """Made without the proxy."""
    async with serving.client() as client:
        return (await client.conversations.create()).id


async def reply_size(serving: Serving, proxy: CuttingProxy, *, is_streaming: bool) -> int:
    """Bytes of an undisturbed reply to `TEXT`."""
    conversation = await new_conversation(serving)
    before = proxy.reply_bytes
    async with serving.client(proxy.port) as client:
        await (ask_streaming if is_streaming else ask)(client, TEXT, conversation)
    return proxy.reply_bytes - before


def cut_at(place: float, size: int) -> Cut:
    """The cut at this share of a reply of so many bytes; it always cuts something off."""
    return Cut(min(int(size * place), size - SLACK))


async def test_a_plain_answer_cut_anywhere_is_sent_again_by_the_client_itself(
    serving: Serving, proxy: CuttingProxy
) -> None:
    """No key, no code: the client's own retry finds the turn that was stored; twice in a row if need be."""
    size = await reply_size(serving, proxy, is_streaming=False)
    for place in PLACES:
        conversation = await new_conversation(serving)
        cuts = [cut_at(place, size)] * (2 if place == PLACES[-1] else 1)
        proxy.cut_next(*cuts)
        before = proxy.cuts
        async with serving.client(proxy.port) as client:
            answer = await ask(client, TEXT, conversation)
        assert proxy.cuts == before + len(cuts), f"{cuts} of {size} bytes"
        assert await serving.turns(conversation) == [(TEXT, answer)], f"{cuts} of {size} bytes"


async def test_a_plain_answer_cut_anywhere_with_a_key(serving: Serving, proxy: CuttingProxy) -> None:
    """A client without retries of its own that sends its key again gets the answer that was stored."""
    size = await reply_size(serving, proxy, is_streaming=False)
    for place in PLACES:
        conversation = await new_conversation(serving)
        cut = cut_at(place, size)
        proxy.cut_next(cut)
        key = {"Idempotency-Key": f"plain-{place}"}
        async with serving.client(proxy.port, max_retries=0) as client:
            with pytest.raises(openai.APIConnectionError):
                await ask(client, TEXT, conversation, extra_headers=key)
            answer = await ask(client, TEXT, conversation, extra_headers=key)
        assert await serving.turns(conversation) == [(TEXT, answer)], f"cut at {cut.after} of {size} bytes"


async def test_a_streamed_answer_cut_anywhere_with_a_key(serving: Serving, proxy: CuttingProxy) -> None:
    """The stream that is sent again is whole, has the same text, and is no second turn."""
    size = await reply_size(serving, proxy, is_streaming=True)
    for place in PLACES:
        conversation = await new_conversation(serving)
        cut = cut_at(place, size)
        proxy.cut_next(cut)
        key = {"Idempotency-Key": f"stream-{place}"}
        async with serving.client(proxy.port, max_retries=0) as client:
            answer = await _until_whole(client, conversation, key)
        assert proxy.cuts
        assert await serving.turns(conversation) == [(TEXT, answer)], f"cut at {cut.after} of {size} bytes"


async def _until_whole(client: AsyncOpenAI, conversation: str, key: dict[str, str]) -> str:
    """Send it until the last event came; the second time has to do."""
    for _ in range(2):
        try:
            events = await stream_events(client, TEXT, conversation, extra_headers=key)
        except (openai.APIConnectionError, httpx2.TransportError):
            continue
        if events and events[-1].type == "response.completed":
            return events[-1].response.output_text
    raise AssertionError("the second stream was not whole either")


async def test_a_streamed_answer_cut_before_its_first_byte_is_sent_again_by_the_client_itself(
    serving: Serving, proxy: CuttingProxy
) -> None:
    """Up to the end of the headers the client's own retry works for streams, too."""
    for after in (0, 5, 40):
        conversation = await new_conversation(serving)
        proxy.cut_next(Cut(after))
        async with serving.client(proxy.port) as client:
            answer = await ask_streaming(client, TEXT, conversation)
        assert await serving.turns(conversation) == [(TEXT, answer)], f"cut after {after} bytes"


async def test_a_request_that_never_arrived_whole_makes_nothing(serving: Serving, proxy: CuttingProxy) -> None:
    """Cut in its headers or in its body, it is as if it had not been sent."""
    conversation = await new_conversation(serving)
    async with serving.client(proxy.port, max_retries=0) as client:
        for after in (0, 30, 600):
            proxy.cut_next(Cut(after, "request"))
            with pytest.raises(openai.APIConnectionError):
                await ask(client, TEXT + " x" * 400, conversation)
        answer = await ask(client, TEXT, conversation)
    assert await serving.turns(conversation) == [(TEXT, answer)]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["plain", "streaming"])
async def test_the_same_key_while_the_first_is_being_answered(
    serving: Serving, offline: OfflineModel, *, is_streaming: bool
) -> None:
    """Three at once and a fourth later: one call of the model, one turn, four times the same answer."""
    conversation = await new_conversation(serving)
    offline.hold("answer")
    turn = ask_streaming if is_streaming else ask
    key = {"Idempotency-Key": "same"}
    async with serving.client(max_retries=0) as client:
        together = [asyncio.create_task(turn(client, TEXT, conversation, extra_headers=key)) for _ in range(3)]
        await model_waits(offline)
        offline.release()
        answers = await asyncio.gather(*together)
        answers.append(await turn(client, TEXT, conversation, extra_headers=key))
    assert len(set(answers)) == 1
    assert await serving.turns(conversation) == [(TEXT, answers[0])]
    assert len([record for record in offline.requests() if record["kind"] == "answer"]) == 1


async def test_a_key_comes_again_while_the_first_stream_is_half_through(settings: Settings, redis: ArqRedis) -> None:
    """The second is not told half an answer, and the first is not disturbed."""
    assert await redis.dbsize() == 0
    async with OfflineModel(scriptable=True, piece_delay_seconds=0.03) as slow:
        slow_settings = settings.model_copy(update={"openai_base_url": slow.url})
        async with serve(slow_settings) as serving, serving.client(max_retries=0) as client:
            conversation = await new_conversation(serving)
            key = {"Idempotency-Key": "same"}
            async with await client.responses.create(
                model="memora", input=TEXT, conversation=conversation, stream=True, extra_headers=key
            ) as stream:
                seen = []
                second = None
                async for event in stream:
                    seen.append(event)
                    if event.type == "response.output_text.delta" and second is None:
                        again = ask_streaming(client, TEXT, conversation, extra_headers=key)
                        second = asyncio.create_task(again)
            assert second is not None
            assert seen[-1].type == "response.completed"
            assert await second == seen[-1].response.output_text
            assert len(await serving.turns(conversation)) == 1


async def test_a_key_with_another_body_is_refused(serving: Serving) -> None:
    """Another text, another conversation's text, other instructions: 422, and nothing is replayed or stored."""
    conversation = await new_conversation(serving)
    key = {"Idempotency-Key": "used"}
    async with serving.client(max_retries=0) as client:
        answer = await ask(client, TEXT, conversation, extra_headers=key)
        for text, instructions in (("I live in Tainan.", None), (TEXT, "Be short.")):
            with pytest.raises(openai.UnprocessableEntityError) as refused:
                await ask(client, text, conversation, instructions=instructions, extra_headers=key)
            assert refused.value.code == "idempotency_key_reused"
            assert "Ann" not in str(refused.value)
        assert await ask(client, TEXT, conversation, extra_headers=key) == answer
    assert await serving.turns(conversation) == [(TEXT, answer)]


@pytest.mark.parametrize("key", ["", "x" * 5_000, "two words", "a\tb", "ключ".encode().decode("latin-1")])
async def test_an_odd_key_is_taken_or_refused_but_breaks_nothing(serving: Serving, key: str) -> None:
    """Keys are text of a bounded length; what is none gets a 4xx."""
    conversation = await new_conversation(serving)
    async with serving.http() as http:
        headers = {b"Idempotency-Key": key.encode("latin-1")}
        reply = await http.post("/responses", json=turn_body(TEXT, conversation), headers=headers)
        assert reply.status_code == 200 or 400 <= reply.status_code < 500
    assert len(await serving.turns(conversation)) == (reply.status_code == 200)


async def test_a_fresh_request_with_the_same_words_is_a_turn_of_its_own(serving: Serving) -> None:
    """Somebody who says "ok" twice has said it twice."""
    conversation = await new_conversation(serving)
    async with serving.client() as client:
        await ask(client, "ok", conversation)
        await ask(client, "ok", conversation)
    assert len(await serving.turns(conversation)) == 2


async def test_keys_of_two_conversations_have_nothing_to_do_with_each_other(serving: Serving) -> None:
    """The same key and the same words elsewhere are another turn, not a replay of a stranger's answer."""
    first, second = await new_conversation(serving), await new_conversation(serving)
    key = {"Idempotency-Key": "same"}
    async with serving.client(max_retries=0) as client:
        await ask(client, TEXT, first, extra_headers=key)
        await ask(client, TEXT, second, extra_headers=key)
    assert len(await serving.turns(first)) == len(await serving.turns(second)) == 1


async def test_what_is_kept_of_keys_is_bounded(serving: Serving, redis: ArqRedis) -> None:
    """A hundred keys leave at most 64 traces in one conversation, and no key of Redis's beside it."""
    conversation = await new_conversation(serving)
    async with serving.client() as client:
        for number in range(70):
            await ask(client, "ok", conversation, extra_headers={"Idempotency-Key": f"k{number}"})

    async def released() -> bool:
        return await serving.is_free(conversation)

    await eventually(released)
    assert await redis.zcard(f"memora:{{0}}:{conversation}:turns") <= 64
    others = [key for key in await redis.keys("*") if b"k1" in key or b"idempot" in key]
    assert others == []
