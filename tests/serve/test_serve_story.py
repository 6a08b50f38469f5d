"""The official client, unchanged, talks to Memora: long conversations through every door."""

from __future__ import annotations

import time
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import pytest
from arq.connections import ArqRedis
from judging import judging_model
from openai import AsyncOpenAI, BadRequestError
from serving import Serving, ask, ask_streaming, serve, stream_events, text_of
from talk import caught_up, changed, folds_of, worker_beside

from memora.offline_model import OfflineModel
from memora.offline_model.markers import Marker
from memora.settings import Settings

FACTS = (
    "我下個月要考 TOEIC。",
    "My sister is called Mei.",
    "I live in Taipei.",
    "我不吃花生。",
)
SMALL_TALK = (
    "What is the difference between journey and travel?",
    "請給我三個 B1 單字。",
    "How do I use the present perfect?",
    "「借」和「貸」的英文怎麼分？",
)
QUESTIONS = (("我下個月要考什麼？", "TOEIC"), ("What is my sister called?", "Mei"), ("Where do I live?", "Taipei"))
TEXTS = (
    *FACTS,
    *(f"{SMALL_TALK[number % len(SMALL_TALK)]} ({number})" for number in range(23)),
    *(question for question, _ in QUESTIONS),
)


async def remembers(serving: Serving, conversation: str, answers: list[str]) -> None:
    """All is in the history, most of it folded without hole or overlap, and the first facts are still known."""
    assert len(TEXTS) == 30
    assert await serving.turns(conversation) == list(zip(TEXTS, answers, strict=True))
    for (_, expected), answer in zip(QUESTIONS, answers[-len(QUESTIONS) :], strict=True):
        assert expected in answer
    await caught_up(serving.memora, conversation)
    folds = await folds_of(serving.memora, conversation)
    assert [fold.start for fold in folds] == [0, *(fold.end for fold in folds)][:-1]
    assert folds[-1].end == 2 * len(TEXTS) - 6


@pytest.mark.parametrize("is_streaming", [False, True], ids=["plain", "streaming"])
async def test_thirty_turns_of_an_asynchronous_client(serving: Serving, *, is_streaming: bool) -> None:
    """In Chinese and English, with a worker beside it: what was said first is still known at the end."""
    turn = ask_streaming if is_streaming else ask
    async with serving.client() as client, worker_beside(serving.memora):
        conversation = (await client.conversations.create()).id
        answers = []
        for text in TEXTS:
            answers.append(await turn(client, text, conversation))
            await caught_up(serving.memora)
        await remembers(serving, conversation, answers)


@pytest.mark.parametrize("is_streaming", [False, True], ids=["plain", "streaming"])
async def test_thirty_turns_of_a_synchronous_client(serving: Serving, *, is_streaming: bool) -> None:
    """The same in a thread, through `create`, `create(stream=True)` and the helper `responses.stream`."""

    def talk() -> tuple[str, list[str]]:
        answers: list[str] = []
        with serving.sync_client() as client:
            conversation = client.conversations.create(metadata={"user": "u1"}).id
            for number, text in enumerate(TEXTS):
                if not is_streaming:
                    response = client.responses.create(model="memora", input=text, conversation=conversation)
                    answers.append(response.output_text)
                elif number % 2:
                    with client.responses.stream(model="memora", input=text, conversation=conversation) as stream:
                        answers.append(stream.get_final_response().output_text)
                else:
                    with client.responses.create(
                        model="memora", input=text, conversation=conversation, stream=True
                    ) as events:
                        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
                    answers.append("".join(pieces))
                _wait_until_folded(client.base_url.host, serving.port, conversation)
        return conversation, answers

    async with worker_beside(serving.memora):
        conversation, answers = await anyio.to_thread.run_sync(talk)
        await remembers(serving, conversation, answers)


async def test_what_clients_say_reaches_the_model_whole(settings: Settings, redis: ArqRedis) -> None:
    """Three doors at once, forty marked turns each: the judge finds every earlier turn once in every request."""
    assert await redis.dbsize() == 0
    async with judging_model() as model, serve(changed(settings, openai_base_url=model.url)) as serving:

        async def report(marker: Marker, answer: str, gap_messages: str) -> None:
            assert str(marker) in answer
            await model.report(marker, "ok", int(gap_messages))

        async def plain(client: AsyncOpenAI, tag: str) -> None:
            conversation = (await client.conversations.create()).id
            for number in range(40):
                text = f"{FACTS[number % len(FACTS)]} {Marker(tag, number)}"
                reply = await client.responses.create(model="memora", input=text, conversation=conversation)
                await report(Marker(tag, number), reply.output_text, (reply.metadata or {})["memora_gap_messages"])

        async def streaming(client: AsyncOpenAI, tag: str) -> None:
            conversation = (await client.conversations.create()).id
            for number in range(40):
                events = await stream_events(client, f"Hello. {Marker(tag, number)}", conversation)
                assert events[-1].type == "response.completed"
                metadata = events[-1].response.metadata or {}
                await report(Marker(tag, number), text_of(events), metadata["memora_gap_messages"])

        async def completions(client: AsyncOpenAI, tag: str) -> None:
            for number in range(40):
                reply = await client.chat.completions.with_raw_response.create(
                    model="memora",
                    messages=[{"role": "user", "content": f"Hello. {Marker(tag, number)}"}],
                    extra_headers={"X-Memora-Conversation": f"chat-{tag}"},
                )
                answer = reply.parse().choices[0].message.content or ""
                await report(Marker(tag, number), answer, reply.headers["x-memora-gap-messages"])

        async with (
            serving.client() as client,
            worker_beside(serving.memora),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(plain, client, "plain")
            tasks.start_soon(streaming, client, "streaming")
            tasks.start_soon(completions, client, "completions")
        verdict = await model.verdict()
    assert verdict["ok"], verdict
    assert (verdict["markers"], verdict["reported"]["ok"]) == (120, 120)
    assert verdict["folds"] > 3


def _wait_until_folded(host: str, port: int, conversation: str) -> None:
    """Look at `/memory` as a program beside the chat would, until nothing is pending."""
    deadline = time.monotonic() + 10
    with httpx2.Client(base_url=f"http://{host}:{port}/v1", timeout=10, trust_env=False) as http:
        while http.get(f"/conversations/{conversation}/memory").json()["pending_messages"]:
            assert time.monotonic() < deadline, "still pending after 10 s"


async def test_a_chain_of_previous_response_ids_is_one_conversation(serving: Serving) -> None:
    """Without a conversation of its own in the request; an older response than the newest cannot be continued."""
    async with serving.client() as client:
        conversation = (await client.conversations.create()).id
        first = await client.responses.create(model="memora", input="I live in Taipei.", conversation=conversation)
        second = await client.responses.create(
            model="memora", input="My cat is called Ann.", previous_response_id=first.id
        )
        third = await client.responses.create(model="memora", input="Where do I live?", previous_response_id=second.id)
        assert "Taipei" in third.output_text
        assert third.conversation is not None
        assert third.conversation.id == conversation
        assert third.previous_response_id == second.id
        with pytest.raises(BadRequestError):
            await client.responses.create(model="memora", input="And now?", previous_response_id=first.id)
    asked = [question for question, _ in await serving.turns(conversation)]
    assert asked == ["I live in Taipei.", "My cat is called Ann.", "Where do I live?"]


@pytest.mark.parametrize("header", ["X-Memora-Conversation", "X-OpenWebUI-Chat-Id"])
async def test_front_ends_that_send_the_whole_chat_each_time_grow_no_copies(
    serving: Serving, offline: OfflineModel, header: str
) -> None:
    """`chat.completions` with the id in a header: only the last message is new, and its answer."""
    chat: list[Any] = []
    async with serving.client(default_headers={header: "chat-0001"}) as client, worker_beside(serving.memora):
        for number, text in enumerate(TEXTS[:12]):
            chat.append({"role": "user", "content": text})
            if number % 2:
                stream = await client.chat.completions.create(model="memora", messages=chat, stream=True)
                async with stream:
                    chunks = [chunk async for chunk in stream]
                answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                assert chunks[0].object == "chat.completion.chunk"
            else:
                completion = await client.chat.completions.create(model="memora", messages=chat)
                assert completion.object == "chat.completion"
                answer = completion.choices[0].message.content or ""
            chat.append({"role": "assistant", "content": answer})
        task = await client.chat.completions.create(
            model="memora",
            messages=[{"role": "user", "content": "Make a title for this chat."}],
            extra_headers={"X-OpenWebUI-Task": "title_generation"},
        )
        assert task.choices[0].message.content
    ids = await serving.memora.store.conversation_ids()
    assert len(ids) == 1
    assert await serving.history(ids[0]) == [message["content"] for message in chat]
    assert "title" not in str(await serving.history(ids[0]))
    assert all(request["body"].get("store") is False for request in offline.requests() if request["kind"] == "answer")


async def test_chat_completions_without_an_id_are_stateless(serving: Serving) -> None:
    """The given messages are the whole context, and nothing is stored."""
    async with serving.client() as client:
        completion = await client.chat.completions.create(
            model="memora",
            messages=[
                {"role": "user", "content": "I live in Taipei."},
                {"role": "assistant", "content": "Noted: you live in Taipei."},
                {"role": "user", "content": "Where do I live?"},
            ],
        )
    assert "Taipei" in (completion.choices[0].message.content or "")
    assert await serving.memora.store.conversation_ids() == []


async def test_a_conversation_survives_the_server(settings: Settings, redis: ArqRedis) -> None:
    """A second server goes on where the first one stopped, and still knows the response to go on from."""
    assert await redis.dbsize() == 0
    async with serve(settings) as first, first.client() as client:
        conversation = (await client.conversations.create(metadata={"title": "mine"})).id
        response = await client.responses.create(model="memora", input=FACTS[0], conversation=conversation)
    async with serve(settings) as second, second.client() as client:
        assert (await client.conversations.retrieve(conversation)).metadata == {"title": "mine"}
        assert "TOEIC" in await ask(client, QUESTIONS[0][0], conversation, previous_response_id=None)
        assert len(await second.turns(conversation)) == 2
        with pytest.raises(BadRequestError):
            await client.responses.create(model="memora", input="Go on.", previous_response_id=response.id)
        items = [item async for item in client.conversations.items.list(conversation, order="asc", limit=3)]
        assert [item.type for item in items] == ["message"] * 4
