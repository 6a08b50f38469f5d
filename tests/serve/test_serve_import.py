"""A long history comes over HTTP at once: all of it is kept, and all of it is folded, oldest first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from arq.connections import ArqRedis
from polling import eventually
from serving import Serving, serve
from talk import changed
from worker_process import worker_process

from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.store import PAGE, ConversationStore

MESSAGES = 10_000


def history() -> list[dict[str, Any]]:
    """Turns of a talk, each with a number of its own."""

    def message(number: int) -> dict[str, Any]:
        role = "assistant" if number % 2 else "user"
        return {"type": "message", "role": role, "content": f"Sentence {number} about journeys."}

    return [message(number) for number in range(MESSAGES)]


def pages(items: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """So many at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


@pytest.mark.parametrize("page", [MESSAGES, 1_000])
async def test_ten_thousand_messages_are_kept_and_folded(
    settings: Settings, redis: ArqRedis, offline: OfflineModel, page: int
) -> None:
    """In one request or in pages: every message is in its place, and the folds tile all but the window."""
    assert await redis.dbsize() == 0
    sent = history()
    async with serve(changed(settings, max_body_bytes=16 * 1024 * 1024)) as serving, serving.http() as http:
        conversation = (await http.post("/conversations", json={})).json()["id"]
        for items in pages(sent, page):
            reply = await http.post(f"/conversations/{conversation}/items", json={"items": items})
            assert reply.status_code == 200, reply.text[:300]
        assert await read_back(http, conversation) == [item["content"] for item in sent]
        with worker_process(settings, offline, MEMORA_MAX_FOLD_INPUT_TOKENS="16000"):
            await eventually(lambda: is_folded(serving, conversation), seconds=60)
    folds = [fold async for fold in ConversationStore(redis).folds(conversation)]
    assert [fold.version for fold in folds] == list(range(1, len(folds) + 1))
    assert folds[0].start == 0
    assert all(before.end == after.start for before, after in pairwise(folds))


async def read_back(http: httpx2.AsyncClient, conversation: str) -> list[str]:
    """Every item, oldest first, page by page."""
    found: list[str] = []
    after = ""
    while True:
        reply = await http.get(f"/conversations/{conversation}/items?order=asc&limit=100{after}")
        record = reply.json()
        found += [item["content"][0]["text"] for item in record["data"]]
        if not record["has_more"]:
            return found
        assert len(found) < MESSAGES + PAGE
        after = f"&after={record['last_id']}"


async def is_folded(serving: Serving, conversation: str) -> bool:
    """Whether nothing waits any more."""
    inspection = await serving.memora.store.inspect(conversation, 0)
    pending = inspection.conversation.message_count - inspection.window_messages
    return inspection.conversation.summary.summarized_message_count >= pending > 0
