"""Shared conversations: one turn at a time, retries that make no second turn, and whose they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from arq.connections import ArqRedis
from polling import eventually
from talk import model_waits

from memora.bootstrap import Memora, open_memora
from memora.conversations import Answered, ConversationService, Replayed, TurnRequest
from memora.errors import ConversationLocked, ConversationNotFound, IdempotencyKeyReused, ModelError
from memora.offline_model import OfflineModel
from memora.settings import Settings


@pytest.fixture
async def memora(settings: Settings, redis: ArqRedis) -> AsyncIterator[Memora]:  # noqa: ARG001  # empties the server
    """Memora over the emptied server."""
    async with open_memora(settings) as opened:
        yield opened


@pytest.fixture
def service(memora: Memora) -> ConversationService:
    """The service under test."""
    return ConversationService(memora.settings, memora.store, memora.chat)


async def ignore(piece: str) -> None:
    """For those who only want the whole answer."""


async def respond(service: ConversationService, conversation_id: str, text: str, **more: Any) -> Answered | Replayed:
    return await service.respond(TurnRequest(conversation_id, text, **more), ignore, wait_seconds=5)


async def history(memora: Memora, conversation_id: str) -> list[str]:
    return [message.content async for message in memora.store.messages(conversation_id) if not message.absent]


async def test_turns_of_one_conversation_never_interleave(service: ConversationService, memora: Memora) -> None:
    """Two clients, ten turns each, through two services as two processes have them: whole pairs, nothing lost."""
    other = ConversationService(memora.settings, memora.store, memora.chat)
    chat = await service.create("", {})

    async def talk(through: ConversationService, who: str) -> None:
        for number in range(10):
            await respond(through, chat, f"I am {who} and this is fact {number}.")

    await asyncio.gather(talk(service, "Ann"), talk(other, "Bea"), talk(service, "Cat"))
    said = await history(memora, chat)
    assert len(said) == 60
    for question, answer in zip(said[::2], said[1::2], strict=True):
        assert question.split(" and ")[0] in answer
    for who in ("Ann", "Bea", "Cat"):
        assert [text for text in said[::2] if who in text] == [f"I am {who} and this is fact {n}." for n in range(10)]


async def test_a_turn_waits_for_a_bounded_time(service: ConversationService, offline: OfflineModel) -> None:
    """Then it is told that the conversation is locked, and nothing of it is stored."""
    chat = await service.create("", {})
    offline.hold("answer")
    first = asyncio.create_task(respond(service, chat, "I live in Taipei."))
    await model_waits(offline)
    with pytest.raises(ConversationLocked):
        await service.respond(TurnRequest(chat, "hello"), ignore, wait_seconds=0.1)
    offline.release()
    assert isinstance(await first, Answered)
    assert isinstance(await respond(service, chat, "Where do I live?"), Answered)


async def test_a_failed_turn_gives_its_lock_back(service: ConversationService, offline: OfflineModel) -> None:
    """The next turn need not wait for a lease to run out."""
    chat = await service.create("", {})
    offline.add_fault({"kind": "status", "status": 400, "code": "bad"}, match="answer", times=1)
    with pytest.raises(ModelError):
        await respond(service, chat, "hello")
    assert isinstance(await service.respond(TurnRequest(chat, "hello"), ignore, wait_seconds=0.01), Answered)


async def test_the_same_key_makes_one_turn(service: ConversationService, memora: Memora, offline: OfflineModel) -> None:
    """Also while the first is still being answered; another body under the same key is refused."""
    chat = await service.create("", {})
    offline.hold("answer")
    same = {"key": "k1", "fingerprint": "f1"}
    first = asyncio.create_task(respond(service, chat, "I live in Taipei.", **same))
    await model_waits(offline)
    second = asyncio.create_task(respond(service, chat, "I live in Taipei.", **same))
    offline.release()
    answered, replayed = await first, await second
    assert isinstance(answered, Answered)
    assert isinstance(replayed, Replayed)
    assert replayed.turn.assistant.content == answered.result.text
    assert len(await history(memora, chat)) == 2
    with pytest.raises(IdempotencyKeyReused):
        await respond(service, chat, "I live in Tainan.", key="k1", fingerprint="f2")


async def test_a_blind_retry_finds_the_newest_turn(service: ConversationService, memora: Memora) -> None:
    """The client's own retry sends the same body without a key; a fresh request with that body is a turn of its own."""
    chat = await service.create("", {})
    await respond(service, chat, "ok", fingerprint="f1")
    retried = await respond(service, chat, "ok", fingerprint="f1", is_retry=True)
    assert isinstance(retried, Replayed)
    assert isinstance(await respond(service, chat, "ok", fingerprint="f1"), Answered)
    assert len(await history(memora, chat)) == 4


async def test_a_conversation_belongs_to_whom_it_was_made_by(service: ConversationService) -> None:
    """Anybody else is told that there is none."""
    chat = await service.create("ann", {"title": "mine"})
    with pytest.raises(ConversationNotFound):
        await respond(service, chat, "hello", owner="bea")
    for call in (service.inspect(chat, "bea"), service.delete(chat, "bea"), service.set_metadata(chat, "bea", {})):
        with pytest.raises(ConversationNotFound):
            await call
    await service.delete(chat, "ann")
    with pytest.raises(ConversationNotFound):
        await service.inspect(chat, "ann")


async def test_a_holder_that_outlived_its_lock_stores_nothing(
    service: ConversationService, memora: Memora, offline: OfflineModel, redis: ArqRedis
) -> None:
    """The next turn was let in meanwhile; the late one is refused instead of being stored out of order."""
    chat = await service.create("", {})
    offline.hold("answer", contains="slow")
    late = asyncio.create_task(respond(service, chat, "I am slow."))
    await model_waits(offline)
    await redis.delete(f"memora:{{0}}:{chat}:lock")
    other = ConversationService(memora.settings, memora.store, memora.chat)
    await respond(other, chat, "I am quick.")
    offline.release()
    with pytest.raises(ConversationLocked):
        await late
    assert (await history(memora, chat))[::2] == ["I am quick."]


async def test_an_imported_history_is_folded_whole_and_in_order(service: ConversationService, memora: Memora) -> None:
    """2,500 messages in one go, with halves of turns missing: all listed, all shown to the summarizer once."""
    messages = [service.message("user" if n % 3 else "assistant", f"Fact {n}: I own {n} books.") for n in range(2_500)]
    chat = await service.create("", {}, messages)
    assert await history(memora, chat) == [message.content for message in messages]
    worker = memora.worker()
    running = asyncio.create_task(worker.run())

    async def caught_up() -> bool:
        inspection = await memora.store.inspect(chat, 100)
        conversation = inspection.conversation
        return conversation.summary.summarized_message_count >= conversation.message_count - 6

    await eventually(caught_up, seconds=60)
    worker.stop()
    await running
    folds = [(fold.start, fold.end) async for fold in memora.store.folds(chat)]
    assert [start for start, _ in folds] == [0, *(end for _, end in folds)][:-1]


async def test_what_happens_is_told_in_order_and_can_be_read_again(
    service: ConversationService, memora: Memora
) -> None:
    """Turns and folds appear as events without content, readable from any point."""
    chat = await service.create("", {})
    beginning = await memora.store.events(chat, "")
    assert beginning is not None
    assert beginning.newest == ""
    for number in range(4):
        await respond(service, chat, f"I own {number} cats.")
    await memora.folds.fold(chat)
    found = await memora.store.events(chat, "0-0")
    assert found is not None
    assert [event.data.split('"')[3] for event in found.events] == ["turn"] * 4 + ["fold"]
    assert "cats" not in str(found)
    rest = await memora.store.events(chat, found.events[3].id)
    assert rest is not None
    assert [event.id for event in rest.events] == [found.newest]
