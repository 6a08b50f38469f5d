"""The API's own promises: ids that stay, pages, imports, items taken back, replays, and the second door."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from polling import eventually
from serving import Serving, serve
from talk import caught_up, changed, model_waits, worker_beside

from memora.core.conversation import Message
from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.web.body import MOST_LEVELS

MODEL = "memora"


async def say(client: AsyncOpenAI, text: str, conversation: str, **more: Any) -> Any:
    return await client.responses.create(model=MODEL, input=text, conversation=conversation, **more)


async def ids(client: AsyncOpenAI, conversation: str) -> list[str]:
    return [str(item.id) async for item in client.conversations.items.list(conversation, order="asc")]


async def texts(client: AsyncOpenAI, conversation: str, **how: Any) -> list[str]:
    return [text_of(item) async for item in client.conversations.items.list(conversation, **how)]


def text_of(item: Any) -> str:
    return str(item.content[0].text)


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_a_history_is_paged_both_ways(client: AsyncOpenAI, limit: int) -> None:
    """Every message once, in order, however large a page is; places without a message are passed over."""
    said = [{"role": "user" if n % 3 else "assistant", "content": f"Fact {n}."} for n in range(8)]
    chat = await client.conversations.create(items=said)  # type: ignore[arg-type]  # the loose form of an item
    whole = [item["content"] for item in said]
    assert await texts(client, chat.id, limit=limit, order="asc") == whole
    assert await texts(client, chat.id, limit=limit) == whole[::-1]


async def test_an_empty_conversation_has_an_empty_page(client: AsyncOpenAI) -> None:
    """Also after its end; what is no item is refused."""
    chat = await client.conversations.create()
    page = await client.conversations.items.list(chat.id)
    assert (page.data, page.has_more) == ([], False)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.conversations.items.list(chat.id, after="msg_0")
    assert refused.value.param == "after"


async def test_a_large_import_names_every_message(client: AsyncOpenAI) -> None:
    """2,500 messages into a conversation that is there: what comes back is what can be retrieved."""
    chat = await client.conversations.create()
    await say(client, "I live in Taipei.", chat.id)
    said = [{"role": ("user", "assistant")[n % 2], "content": f"Fact {n}."} for n in range(2_500)]
    created = await client.conversations.items.create(chat.id, items=said)  # type: ignore[arg-type]  # loose items
    assert len(created.data) == len({item.id for item in created.data}) == 2_500
    for place in (0, 999, 1_000, 2_499):
        found = await client.conversations.items.retrieve(str(created.data[place].id), conversation_id=chat.id)
        assert text_of(found) == f"Fact {place}."
    assert created.last_id == (await client.conversations.items.list(chat.id, limit=1)).data[0].id


async def test_an_item_taken_back_is_gone_and_the_others_keep_their_ids(client: AsyncOpenAI, serving: Serving) -> None:
    """Its place stays empty, the next answer is not made from it, and turns stay whole."""
    chat = await client.conversations.create()
    await say(client, "My secret is 4711.", chat.id)
    await say(client, "I live in Taipei.", chat.id)
    before = await ids(client, chat.id)
    await client.conversations.items.delete(before[0], conversation_id=chat.id)
    await client.conversations.items.delete(before[1], conversation_id=chat.id)
    assert await ids(client, chat.id) == before[2:]
    for again in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError):
            await again(before[0], conversation_id=chat.id)
    await say(client, "What do you know?", chat.id)
    async with serving.http() as http:
        sent = (await http.get(f"/conversations/{chat.id}/context")).text
    assert "Taipei" in sent
    assert "4711" not in sent


async def test_a_fold_in_flight_cannot_keep_what_was_taken_back(
    client: AsyncOpenAI, serving: Serving, offline: OfflineModel
) -> None:
    """The summariser was shown the message already; its summary loses, and the next fold is made without it."""
    chat = await client.conversations.create()
    await say(client, "My dog is called Bruno4711.", chat.id)
    offline.hold("summary")
    async with worker_beside(serving.memora):
        for number in range(4):
            await say(client, f"I own {number} cats.", chat.id)
        await model_waits(offline)
        items = await ids(client, chat.id)
        for item in items[:2]:
            await client.conversations.items.delete(item, conversation_id=chat.id)
        offline.release()
        await caught_up(serving.memora, chat.id)
    inspection = await serving.memora.store.inspect(chat.id, 100)
    assert inspection.conversation.summary.summarized_message_count == 4
    assert "cats" in inspection.conversation.summary.text
    assert "Bruno" not in inspection.conversation.summary.text
    with pytest.raises(openai.ConflictError) as refused:
        await client.conversations.items.delete(items[2], conversation_id=chat.id)
    assert refused.value.code == "item_summarized"


async def test_a_response_continues_only_what_it_is_the_newest_of(client: AsyncOpenAI) -> None:
    """Then it needs no conversation; an older one, an unknown one and a stateless one are refused."""
    chat = await client.conversations.create()
    first = await say(client, "I live in Taipei.", chat.id)
    second = await client.responses.create(model=MODEL, input="Where do I live?", previous_response_id=first.id)
    assert second.conversation is not None
    assert second.conversation.id == chat.id
    assert "Taipei" in second.output_text
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_newest"
    alone = await client.responses.create(model=MODEL, input="Hello.")
    for unknown in (alone.id, "resp_nope", second.id.replace("resp_", "resp_0")):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="And?", previous_response_id=unknown)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert len(await texts(client, chat.id)) == 4
    assert (await say(client, "So where do I live?", chat.id)).status == "completed"


async def test_a_response_can_be_read_again(client: AsyncOpenAI) -> None:
    """As it was given, with the client's metadata and Memora's; not when its message is taken back."""
    chat = await client.conversations.create()
    given = await say(client, "I live in Taipei.", chat.id, metadata={"mine": "yes"})
    read = await client.responses.retrieve(given.id)
    assert (read.output, read.usage, read.metadata, read.created_at) == (
        *(given.output, given.usage, given.metadata, given.created_at),
    )
    assert read.metadata is not None
    assert read.metadata["mine"] == "yes"
    assert read.metadata["memora_pending_messages"] == "0"
    await client.conversations.items.delete(given.output[0].id, conversation_id=chat.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(given.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replay_is_the_response_it_repeats(serving: Serving, client: AsyncOpenAI, stream: bool) -> None:
    """The same id, item, text, usage and metadata, plain or as a stream, and a header that says so."""
    chat = await client.conversations.create()
    body = {"model": MODEL, "input": "I live in Taipei.", "conversation": chat.id, "stream": stream}
    async with serving.http(headers={"idempotency-key": "k1"}) as http:
        first, second = [await http.post("/responses", json=body) for _ in range(2)]
    assert "x-memora-replayed" not in first.headers
    assert second.headers["x-memora-replayed"] == "true"
    last = [reply.text.strip().splitlines()[-1] for reply in (first, second)]
    assert last[0].split('"response":')[-1] == last[1].split('"response":')[-1]
    assert len(await texts(client, chat.id)) == 2


async def test_instructions_of_a_request_are_not_kept(
    serving: Serving, client: AsyncOpenAI, offline: OfflineModel
) -> None:
    """What developers and systems say goes to the model with this request, and never into the history."""
    chat = await client.conversations.create()
    told = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "I live in Taipei."}]
    await client.responses.create(model=MODEL, input=told, instructions="Be kind.", conversation=chat.id)  # type: ignore[arg-type]
    assert offline.requests()[-1]["body"]["instructions"] == "Be kind.\n\nBe short."
    await say(client, "Where do I live?", chat.id)
    assert offline.requests()[-1]["body"]["instructions"] == serving.memora.settings.instructions_text
    assert len(await texts(client, chat.id)) == 4


async def test_messages_before_the_question_are_new_history(client: AsyncOpenAI) -> None:
    """They are stored in front of it, and the answer is made from them."""
    chat = await client.conversations.create()
    said = [
        {"role": "user", "content": "I live in Taipei."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Nice."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Where do I live?"}]},
    ]
    answer = await client.responses.create(model=MODEL, input=said, conversation=chat.id)  # type: ignore[arg-type]
    assert "Taipei" in answer.output_text
    assert (await texts(client, chat.id, order="asc"))[:3] == ["I live in Taipei.", "Nice.", "Where do I live?"]


async def test_what_waits_is_told(serving: Serving, client: AsyncOpenAI) -> None:
    """Metadata, headers and `/memory` agree on what is pending; then on what is folded."""
    chat = await client.conversations.create()
    for number in range(3):
        await say(client, f"I own {number} cats.", chat.id)
    raw = await client.responses.with_raw_response.create(model=MODEL, input="I own no dogs.", conversation=chat.id)
    metadata = raw.parse().metadata
    assert metadata is not None
    assert metadata["memora_pending_messages"] == raw.headers["x-memora-pending-messages"] == "2"
    async with serving.http() as http:
        pending = (await http.get(f"/conversations/{chat.id}/memory")).json()
        async with worker_beside(serving.memora):
            await caught_up(serving.memora, chat.id)
        folded = (await http.get(f"/conversations/{chat.id}/memory", params={"limit": 7})).json()
    assert [message["state"] for message in pending["messages"]] == ["pending"] * 2 + ["window"] * 6
    assert [message["position"] for message in folded["messages"]] == list(range(1, 8))
    assert folded["messages_from"] == 1
    assert [message["state"] for message in folded["messages"]] == ["folded"] + ["window"] * 6
    assert folded["version"] == 1
    assert folded["context"]["tokens"]["summary"] > 0


async def test_a_chat_completion_keeps_its_conversation(serving: Serving, client: AsyncOpenAI) -> None:
    """The header names it, the first turn begins it, only the last message is new; tasks are not remembered."""
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "An old message."},
        {"role": "assistant", "content": ""},
    ]

    async def complete(text: str, **headers: str) -> str:
        messages = [*history, {"role": "user", "content": text}]
        done = await client.chat.completions.create(model=MODEL, messages=messages, extra_headers=headers)  # type: ignore[arg-type]
        return str(done.choices[0].message.content)

    await complete("I live in Taipei.", **{"X-OpenWebUI-Chat-Id": "chat-1"})
    assert "Taipei" in await complete("Where do I live?", **{"X-Memora-Conversation": "chat-1"})
    await complete("Make a title.", **{"X-OpenWebUI-Chat-Id": "chat-1", "X-OpenWebUI-Task": "title_generation"})
    await complete("Nobody remembers this.")
    assert (await serving.history("chat-1"))[::2] == ["I live in Taipei.", "Where do I live?"]
    assert await serving.memora.store.conversation_ids() == ["chat-1"]


async def test_a_streamed_completion_is_the_same_in_pieces(client: AsyncOpenAI) -> None:
    """Chunks of one id that join to the answer, a reason at the end, and usage for those who ask."""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "I live in Taipei."}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Taipei" in text
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "x", "temperature": NaN}',
        b'{"input": "x", "temperature": 1e999}',
        b'{"input": "\\ud800"}',
        b'{"input": "\xff"}',
        b'["x"]',
        b"null",
        b"",
        b'{"input": ' + b"[" * (MOST_LEVELS + 1) + b"]" * (MOST_LEVELS + 1) + b"}",
        b"[" * 100_000,
        b'{"input": "x", "max_output_tokens": ' + b"9" * 5_000 + b"}",
        b'{"input": "x", "max_output_tokens": "5"}',
        b'{"input": "x", "metadata": {"a": 1}}',
        b'{"input": []}',
        b'{"input": "   "}',
        b'{"input": [{"role": "assistant", "content": "x"}]}',
        b'{"input": [{"type": "reasoning", "id": "x"}]}',
        b'{"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}',
        b'{"input": "x", "tools": [{"type": "web_search"}]}',
        b'{"input": "x", "background": true}',
    ],
)
async def test_what_cannot_be_taken_is_refused_in_one_form(serving: Serving, body: bytes) -> None:
    """Status 400 with OpenAI's error body and a request id, whatever is wrong."""
    async with serving.http() as http:
        reply = await http.post("/responses", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]


async def test_an_answer_outlives_its_client_and_a_stop(
    settings: Settings, redis: ArqRedis, offline: OfflineModel
) -> None:
    """The client goes, the server is told to stop, and the turn is stored nevertheless."""
    assert await redis.dbsize() == 0
    async with serve(settings) as serving, serving.client(max_retries=0) as client:
        chat = await client.conversations.create()
        offline.hold("answer")
        asking = asyncio.create_task(say(client, "I live in Taipei.", chat.id))
        await model_waits(offline)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        offline.release()
        store = serving.memora.store

    async def stored() -> list[Message]:
        return [message async for message in store.messages(chat.id)]

    async with serve(changed(settings)) as again:
        store = again.memora.store
        assert [message.role for message in await eventually(stored)] == ["user", "assistant"]
