"""A newer version beside this one: what it has written is kept as it is, and nobody stumbles over it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from arq.connections import ArqRedis
from redis_view import command
from talk import ID, caught_up, folds_of, history_of, look, say, worker_beside

from memora.bootstrap import Memora
from memora.offline_model import OfflineModel
from memora.offline_model.judge import Report
from memora.offline_model.markers import Marker

PREFIX = f"memora:{{0}}:{ID}:"


@pytest.fixture
async def offline() -> AsyncIterator[OfflineModel]:
    """The offline model, scriptable and judging."""
    async with OfflineModel(scriptable=True, judging=True) as model:
        yield model


async def talk(memora: Memora, offline: OfflineModel, turns: range) -> None:
    for number in turns:
        result = await say(memora, f"A message {Marker('k1', number)}.")
        offline.judge.report(Report(Marker("k1", number), "ok", result.stats.gap_messages))


async def add_field(redis: ArqRedis, part: str, place: int) -> str:
    """Give a record of a list a field of a later version; what it is then."""
    record = json.loads(await command(redis, "LINDEX", PREFIX + part, place))
    written = json.dumps({**record, "later": {"deep": [1, None]}})
    await command(redis, "LSET", PREFIX + part, place, written)
    return written


async def test_fields_of_a_later_version_are_kept_and_tolerated(
    memora: Memora, offline: OfflineModel, redis: ArqRedis
) -> None:
    """In the summary, the history and the audit trail: turns and folds go on over them, byte for byte as they were."""
    async with worker_beside(memora):
        await talk(memora, offline, range(6))
        await caught_up(memora, ID)
        await command(redis, "HSET", PREFIX + "summary", "later", "something")
        written = [
            await add_field(redis, part, place)
            for part, place in (("history", 0), ("history", -1), ("history", -2), ("folds", 0))
        ]
        before = len(await history_of(memora))
        await talk(memora, offline, range(6, 14))
        await caught_up(memora, ID)
    assert await command(redis, "HGET", PREFIX + "summary", "later") == b"something"
    places = (("history", 0), ("history", before - 1), ("history", before - 2), ("folds", 0))
    kept = [await command(redis, "LINDEX", PREFIX + part, place) for part, place in places]
    assert [record.decode() for record in kept] == written
    assert len(await history_of(memora)) == 28
    assert (await look(memora)).conversation.summary.summarized_message_count == (await folds_of(memora))[-1].end > 12
    assert offline.judge.verdict()["ok"], offline.judge.verdict()
