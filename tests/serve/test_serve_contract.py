"""The calls of the official client, one by one, plain and with its strict check of every reply."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.conversations import Message
from serving import Serving, stream_events, text_of

from memora.offline_model import OfflineModel

STREAM = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
)
METADATA = {
    "memora_gap_messages",
    "memora_pending_messages",
    "memora_summarized_message_count",
    "memora_summary_version",
    "memora_context_tokens",
}


@pytest.fixture(params=[False, True], ids=["plain", "strict"])
async def client(serving: Serving, request: pytest.FixtureRequest) -> AsyncIterator[AsyncOpenAI]:
    """The official client, once as it comes and once so that it refuses a reply of the wrong shape."""
    async with serving.client(max_retries=0, _strict_response_validation=request.param) as made:
        yield made


@pytest.fixture
async def conversation(client: AsyncOpenAI) -> str:
    """A conversation with one message in it."""
    created = await client.conversations.create(
        metadata={"user": "u1"}, items=[{"type": "message", "role": "user", "content": "My name is Mei."}]
    )
    assert created.id.startswith("conv_")
    assert created.object == "conversation"
    assert created.metadata == {"user": "u1"}
    return created.id


async def test_models(client: AsyncOpenAI) -> None:
    """There is one by the name of Memora, listed and alone."""
    listed = [model.id async for model in client.models.list()]
    assert "memora" in listed
    model = await client.models.retrieve("memora")
    assert (model.id, model.object, model.owned_by) == ("memora", "model", "memora")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no-such-model")


async def test_a_response_in_a_conversation(client: AsyncOpenAI, conversation: str) -> None:
    """By id or by object, with usage, ids, and Memora's own news as metadata of strings."""
    for place in (conversation, {"id": conversation}):
        response = await client.responses.create(
            model="memora",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]}],
            conversation=place,  # type: ignore[arg-type]  # one of the two forms the API takes
            metadata={"mine": "kept"},
            store=True,
        )
        assert response.object == "response"
        assert response.status == "completed"
        assert response.id.startswith("resp_")
        assert response.output[0].id.startswith("msg_")  # type: ignore[union-attr]  # it is a message
        assert response.conversation is not None
        assert response.conversation.id == conversation
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0
        assert response._request_id
        assert response.metadata is not None
        assert set(response.metadata) == {*METADATA, "mine"}
        assert "Mei" in response.output_text
        found = await client.responses.retrieve(response.id)
        assert (found.id, found.output_text) == (response.id, response.output_text)


async def test_a_streamed_response(client: AsyncOpenAI, conversation: str) -> None:
    """Every event in OpenAI's order, numbered without a gap, the places always the same, the usage in the last."""
    events = await stream_events(client, "What is my name?", conversation)
    kinds = [event.type for event in events]
    assert tuple(dict.fromkeys(kinds)) == STREAM
    assert kinds == sorted(kinds, key=STREAM.index)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    item = events[2].item.id  # type: ignore[union-attr]  # see the order above
    assert {getattr(event, "item_id", item) for event in events} == {item}
    text = text_of(events)
    done = next(event.text for event in events if event.type == "response.output_text.done")
    last = events[-1]
    assert last.type == "response.completed"
    assert text == done == last.response.output_text
    assert "Mei" in text
    assert last.response.usage is not None
    assert last.response.metadata is not None
    assert set(last.response.metadata) == METADATA
    assert last.response.output[0].id == item


async def test_the_streaming_helper(client: AsyncOpenAI, conversation: str) -> None:
    """`responses.stream` keeps an account of its own and agrees with the last event."""
    async with client.responses.stream(model="memora", input="What is my name?", conversation=conversation) as stream:
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(pieces) == final.output_text


async def test_items(client: AsyncOpenAI, conversation: str) -> None:
    """Listed both ways in pages, added, and read one by one; all of them, and never a summary."""
    added = await client.conversations.items.create(
        conversation,
        items=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "note"}]}],
    )
    assert [texts_of(item) for item in added.data] == ["note"]  # type: ignore[arg-type]  # messages all of them
    for number in range(3):
        await client.responses.create(model="memora", input=f"Number {number}.", conversation=conversation)
    oldest_first = [item async for item in client.conversations.items.list(conversation, order="asc", limit=3)]
    newest_first = [item async for item in client.conversations.items.list(conversation, limit=3)]
    assert [item.id for item in oldest_first] == [item.id for item in reversed(newest_first)]
    texts = [texts_of(item) for item in oldest_first]  # type: ignore[arg-type]  # likewise
    assert texts[:2] == ["My name is Mei.", "note"]
    assert texts[2::2] == [f"Number {number}." for number in range(3)]
    one = await client.conversations.items.retrieve(oldest_first[1].id, conversation_id=conversation)  # type: ignore[arg-type]  # messages have one
    assert one == oldest_first[1]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve("msg_nope", conversation_id=conversation)


def texts_of(item: Message) -> str:
    """The text of a message item."""
    assert item.type == "message"
    return "".join(part.text for part in item.content if part.type in ("input_text", "output_text"))


async def test_an_item_is_taken_out(client: AsyncOpenAI, conversation: str) -> None:
    """It is gone from the list and from what the model is sent, and the others keep their ids."""
    await client.responses.create(model="memora", input="I live in Taipei.", conversation=conversation)
    first, *rest = [item async for item in client.conversations.items.list(conversation, order="asc")]
    assert first.id
    returned = await client.conversations.items.delete(first.id, conversation_id=conversation)
    assert (returned.id, returned.object) == (conversation, "conversation")
    assert [item.id async for item in client.conversations.items.list(conversation, order="asc")] == [
        item.id for item in rest
    ]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(first.id, conversation_id=conversation)
    answer = await client.responses.create(model="memora", input="What is my name?", conversation=conversation)
    assert "Mei" not in answer.output_text


async def test_a_conversation_is_changed_read_counted_and_deleted(client: AsyncOpenAI, conversation: str) -> None:
    """Metadata is replaced; the count is that of the whole context; deleted is gone."""
    updated = await client.conversations.update(conversation, metadata={"title": "x"})
    assert updated.metadata == {"title": "x"}
    assert (await client.conversations.retrieve(conversation)).metadata == {"title": "x"}
    counted = await client.responses.input_tokens.count(model="memora", input="hello", conversation=conversation)
    alone = await client.responses.input_tokens.count(model="memora", input="hello")
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens > alone.input_tokens > 0
    deleted = await client.conversations.delete(conversation)
    assert (deleted.id, deleted.deleted, deleted.object) == (conversation, True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(conversation)


async def test_what_is_wrong_is_said_as_openai_says_it(client: AsyncOpenAI, conversation: str) -> None:
    """The class, the code, the parameter and the id of the request."""
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="memora", input="x", conversation="conv_nope")
    assert unknown.value.code == "conversation_not_found"
    assert unknown.value.param == "conversation"
    with pytest.raises(openai.BadRequestError) as both:
        await client.responses.create(model="memora", input="x", conversation=conversation, previous_response_id="r")
    assert both.value.code == "mutually_exclusive_parameters"
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(model="memora", input="too long " * 2_000, conversation=conversation)
    assert long.value.code == "context_length_exceeded"
    for raised in (unknown, both, long):
        assert raised.value.request_id
        assert raised.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "name": "f", "parameters": {}, "strict": False}]),
        ("background", True),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]}]),
    ],
    ids=["tools", "background", "image", "file"],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    client: AsyncOpenAI, conversation: str, name: str, value: object
) -> None:
    """Never silence: the error says which parameter."""
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(
            model="memora",
            input="x",
            conversation=conversation,
            extra_body={name: value},
        )
    assert (refused.value.param or "").startswith(name)
    assert name in refused.value.message


async def test_a_model_that_fails_in_mid_stream_is_an_event(
    client: AsyncOpenAI, conversation: str, offline: OfflineModel
) -> None:
    """`error` with the code, then `response.failed`; a stream that only stops would be taken for a whole answer."""
    for kind in ("failed", "error_event", "cut"):
        offline.clear_faults()
        offline.add_fault({"kind": kind}, match="answer")
        events = await stream_events(client, "Tell me something about my name.", conversation)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        error, failed = events[-2:]
        assert error.type == "error"
        assert error.code == "upstream_error"
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert failed.response.error is not None
        assert failed.response.error.message == error.message
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(failed.response.id)
