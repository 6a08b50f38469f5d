"""Talking to Memora in a test: a turn, a look, a worker beside it, and what the model was sent meanwhile."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
from polling import eventually

from memora.bootstrap import Memora
from memora.chat import TurnOptions, TurnResult
from memora.core.conversation import Message
from memora.core.prompts import EXISTING_SUMMARY_KEY, NEW_MESSAGES_KEY
from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.store import Fold, Inspection
from memora.worker import FoldWorker

ID = "talk"


async def say(memora: Memora, text: str, conversation_id: str = ID, **options: Any) -> TurnResult:
    """One turn, with what was streamed checked against what came back."""
    pieces: list[str] = []

    async def emit(piece: str) -> None:
        pieces.append(piece)

    result = await memora.chat.reply(conversation_id, text, emit, TurnOptions(**options))
    assert "".join(pieces) == result.text
    return result


async def say_all(memora: Memora, texts: Iterable[str], conversation_id: str = ID) -> list[TurnResult]:
    """Several turns, one after the other."""
    return [await say(memora, text, conversation_id) for text in texts]


async def look(memora: Memora, conversation_id: str = ID) -> Inspection:
    """One picture of a conversation, with its whole tail."""
    return await memora.store.inspect(conversation_id, 100_000)


async def state_of(memora: Memora, conversation_id: str = ID) -> Inspection:
    """The same without the time at which the sweep looks at it next, which moves by itself."""
    return replace(await look(memora, conversation_id), fold_due_at=None)


async def count_of(memora: Memora, conversation_id: str = ID) -> int:
    """How many messages the summary covers."""
    return (await look(memora, conversation_id)).conversation.summary.summarized_message_count


async def history_of(memora: Memora, conversation_id: str = ID) -> list[Message]:
    """Every message, oldest first."""
    return [message async for message in memora.store.messages(conversation_id)]


async def folds_of(memora: Memora, conversation_id: str = ID) -> list[Fold]:
    """The audit trail."""
    return [fold async for fold in memora.store.folds(conversation_id)]


async def exists(memora: Memora, conversation_id: str = ID) -> bool:
    """Whether anything was ever stored under this id."""
    return conversation_id in await memora.store.conversation_ids()


@asynccontextmanager
async def worker_beside(memora: Memora) -> AsyncIterator[FoldWorker]:
    """A real worker that runs meanwhile and is told to stop at the end."""
    async with anyio.create_task_group() as tasks:
        worker = memora.worker()
        tasks.start_soon(worker.run)
        try:
            yield worker
        finally:
            worker.stop()


async def caught_up(memora: Memora, *conversation_ids: str, seconds: float = 10.0) -> None:
    """Wait until nothing is due any more: the outbox and the queue are empty."""

    async def nothing_waits() -> bool:
        redis = memora.storage.redis
        return not await redis.exists("memora:{0}:pending") and not await redis.exists("memora:{0}:queue")

    await eventually(nothing_waits, seconds=seconds)
    for conversation_id in conversation_ids:
        assert (await look(memora, conversation_id)).fold_due_at is None


def sent_messages(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The messages of a recorded request."""
    return [(item["role"], item["content"]) for item in record["body"]["input"]]


def answers(offline: OfflineModel) -> list[dict[str, Any]]:
    """The requests for an answer, oldest first."""
    return [record for record in offline.requests() if record["kind"] == "answer"]


def fold_documents(offline: OfflineModel, kind: str = "summary") -> list[dict[str, Any]]:
    """The JSON of every request to summarise, oldest first."""
    return [document_of(record) for record in offline.requests() if record["kind"] == kind]


def document_of(record: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a recorded request to summarise."""
    document: dict[str, Any] = json.loads(record["body"]["input"][-1]["content"])
    return document


def shown(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The messages a request to summarise shows."""
    return [(item["role"], item["content"]) for item in document[NEW_MESSAGES_KEY]]


def existing(document: dict[str, Any]) -> str:
    """The summary a request to summarise starts from."""
    return str(document[EXISTING_SUMMARY_KEY])


async def model_waits(offline: OfflineModel, requests: int = 1) -> None:
    """Wait until so many requests stand at a gate that was closed with `hold`."""

    async def held() -> bool:
        return offline.state()["waiting"] >= requests

    await eventually(held)


def changed(settings: Settings, **updates: Any) -> Settings:
    """The same settings but for these, checked as a whole."""
    return Settings.model_validate({**settings.model_dump(), **updates})
