"""A later version beside this one: what it has written is kept as it is, and nobody stumbles over it."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from redis_view import command
from server_process import server_process
from talk import ID, caught_up, folds_of, history_of, look, say, worker_beside
from worker_process import REPOSITORY

from memora.audit import audit
from memora.bootstrap import Memora
from memora.offline_model import OfflineModel
from memora.offline_model.judge import Report
from memora.offline_model.markers import Marker
from memora.settings import Settings

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


LATER = (
    ("__init__.py", '__version__ = "', '__version__ = "9.'),
    # Every record it writes has one field more, and so have the summary's hash and the events.
    ("store.py", "_json(message_record(message))", '_json({**message_record(message), "later": {"deep": [1, None]}})'),
    ("store.py", '        if result.notes:\n', '        entry["later"] = [1, None]\n        if result.notes:\n'),
    ("lua/append_turn.lua", "local count = redis.call('RPUSH', history, unpack(messages))\n",
     "local count = redis.call('RPUSH', history, unpack(messages))\n"
     "redis.call('HINCRBY', summary, 'later_turns', 1)\n"),
    ("lua/commit_fold.lua", "remember_fold(summary, fold_id, 1)\n",
     "remember_fold(summary, fold_id, 1)\nredis.call('HINCRBY', summary, 'later_folds', 1)\n"),
    ("lua/_prelude.lua", "'*', 'event', event)", "'*', 'event', string.sub(event, 1, -2) .. ',\"later\":true}')"),
)  # fmt: skip
"""What the next version changes: file, text, and what stands there instead."""


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """A copy of the package that is one version further; it is found there first."""
    for package in ("memora", "workers"):
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, instead in LATER:
        file = tmp_path / "memora" / name
        source = file.read_text("utf-8")
        assert source.count(text) == 1
        file.write_text(source.replace(text, instead), "utf-8")
    return tmp_path


async def take_turns(
    memora: Memora, client: AsyncOpenAI, offline: OfflineModel, conversation: str, turns: range
) -> None:
    """The even ones are answered by the later version, the others by this one."""
    for number in turns:
        marker = Marker("k1", number)
        if number % 2:
            gap_messages = (await say(memora, f"A message {marker}.", conversation)).stats.gap_messages
        else:
            reply = await client.responses.create(
                model="memora", input=f"A message {marker}.", conversation=conversation
            )
            gap_messages = int((reply.metadata or {})["memora_gap_messages"])
        offline.judge.report(Report(marker, "ok", gap_messages))


async def test_two_versions_serve_and_fold_one_conversation_together(
    settings: Settings, memora: Memora, offline: OfflineModel, redis: ArqRedis, later: Path
) -> None:
    """A server and a worker of each: turns go to and fro, either folds what the other has stored, and all is whole."""
    async with (
        server_process(settings, offline, command="serve", PYTHONPATH=str(later)) as server,
        server.client() as client,
        worker_beside(memora),
    ):
        async with httpx2.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{server.root}/version")).json()["version"].startswith("9.")
        talk = (await client.conversations.create()).id
        await take_turns(memora, client, offline, talk, range(12))
        await caught_up(memora, talk)
    folds_of_this = len(await folds_of(memora, talk))
    async with (
        server_process(settings, offline, command="up", PYTHONPATH=str(later)) as server,
        server.client() as client,
        AsyncExitStack() as beside,
    ):
        await take_turns(memora, client, offline, talk, range(12, 24))
        await caught_up(memora, talk)
        folds_of_the_later = len(await folds_of(memora, talk)) - folds_of_this
        await beside.enter_async_context(worker_beside(memora))
        await take_turns(memora, client, offline, talk, range(24, 36))
        await caught_up(memora, talk)
    assert min(folds_of_this, folds_of_the_later) > 0
    assert offline.judge.verdict()["ok"], offline.judge.verdict()
    assert (await audit(memora.storage)).findings == ()

    prefix = f"memora:{{0}}:{talk}:"
    # Each version's records are as it wrote them, whoever wrote behind them.
    messages = [json.loads(record) for record in await command(redis, "LRANGE", prefix + "history", 0, -1)]
    assert [message.get("later") for message in messages] == [*[{"deep": [1, None]}] * 2, None, None] * 18
    folds = [json.loads(record) for record in await command(redis, "LRANGE", prefix + "folds", 0, -1)]
    assert ["later" in fold for fold in folds][:folds_of_this] == [False] * folds_of_this
    assert ["later" in fold for fold in folds][folds_of_this:][:folds_of_the_later] == [True] * folds_of_the_later
    fields = {
        name: int(await command(redis, "HGET", prefix + "summary", name)) for name in ("later_turns", "later_folds")
    }
    assert fields == {"later_turns": 18, "later_folds": sum("later" in fold for fold in folds)}
    assert (folds[-1]["to"], len(messages)) == (66, 72)
