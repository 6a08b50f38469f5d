"""The summary made anew or taken back: history and turns are untouched, folds of before never come through."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from command_line import CommandLine
from polling import eventually
from redis_view import all_keys
from serving import KEY, ask, serve
from talk import ID, caught_up, count_of, folds_of, history_of, look, model_waits, say, say_all, worker_beside

from memora.bootstrap import Memora
from memora.core.window import Context
from memora.fold import Discarded, Folded
from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.store import Fold, NoSuchVersion, Rewound

TEXTS = [f"I have {number} cats in Taipei." for number in range(8)]


@pytest.fixture(autouse=True)
def _emptied(redis: ArqRedis) -> None:
    """Every test begins with an empty server."""


async def talked(memora: Memora) -> list[Fold]:
    """Eight turns, each folded as soon as one has left the window."""
    for text in TEXTS:
        await say(memora, text)
        await memora.folds.fold(ID)
    folds = await folds_of(memora)
    assert len(folds) == 5
    return folds


def tiles(folds: list[Fold]) -> bool:
    """Whether versions and messages follow each other without a hole from the beginning."""
    starts = [0, *(fold.end for fold in folds)]
    return [fold.start for fold in folds] == starts[:-1] and [fold.version for fold in folds] == [
        *range(1, len(folds) + 1)
    ]


async def test_a_rebuild_folds_everything_anew(memora: Memora) -> None:
    """The worker does it by itself: another trail over the same messages; history, counters and window as before."""
    before, history, seen = await talked(memora), await history_of(memora), await look(memora)
    assert await memora.store.rewind(ID, 0) == Rewound(0, 5)
    state = await look(memora)
    assert (state.conversation.summary.text, state.conversation.summary.version) == ("", 0)
    assert state.conversation.life == seen.conversation.life
    assert state.conversation.generation != seen.conversation.generation
    async with worker_beside(memora):
        await caught_up(memora, ID)
    after = await folds_of(memora)
    assert tiles(after)
    assert after[-1].end == before[-1].end == 10
    assert await history_of(memora) == history
    spent = (await look(memora)).conversation.usage.fold_input_tokens
    assert spent == sum(fold.input_tokens for fold in before + after)


@pytest.mark.parametrize("version", range(6))
async def test_every_version_can_be_gone_back_to(memora: Memora, version: int) -> None:
    """The summary, its length and its reach are those of then; the versions after it are made again from there."""
    before = await talked(memora)
    assert await memora.store.rewind(ID, version) == Rewound(version, 5)
    summary = (await look(memora)).conversation.summary
    if version:
        fold = before[version - 1]
        assert (summary.text, summary.summarized_message_count) == (fold.summary, fold.end)
        assert summary.tokens > 0
    assert (await folds_of(memora)) == before[:version]
    async with worker_beside(memora):
        await caught_up(memora, ID)
    folds = await folds_of(memora)
    assert tiles(folds)
    assert folds[:version] == before[:version]
    assert folds[-1].end == 10


async def test_a_version_that_never_was_changes_nothing(memora: Memora) -> None:
    """It says which is the newest; another's conversation is none at all."""
    folds = await talked(memora)
    state = await look(memora)
    assert await memora.store.rewind(ID, 6) == NoSuchVersion(6, 5)
    assert await memora.store.rewind(ID, 1, owner="somebody else") is None
    assert await memora.store.rewind("nobody", 0) is None
    assert await look(memora) == state
    assert await folds_of(memora) == folds


async def test_a_fold_under_way_cannot_commit(memora: Memora, offline: OfflineModel) -> None:
    """Its generation is over, whatever the count says: back to the same count, and still discarded."""
    await talked(memora)
    await say(memora, "One more.")
    offline.hold("summary")
    folding = asyncio.create_task(memora.folds.fold(ID))
    await model_waits(offline)
    await memora.store.rewind(ID, 5)
    offline.release()
    assert isinstance(await folding, Discarded)
    assert await count_of(memora) == 10
    assert isinstance(await memora.folds.fold(ID), Folded)


@pytest.mark.parametrize("fault", [None, {"kind": "refusal"}], ids=["folds", "fails"])
async def test_what_a_fold_under_way_has_cost_is_counted(
    memora: Memora, offline: OfflineModel, fault: dict[str, str] | None
) -> None:
    """The conversation lives on, and the model was paid: its tokens are in the figures, its text is nowhere."""
    await talked(memora)
    await say(memora, "One more.")
    before = (await look(memora)).conversation.usage
    if fault:
        offline.add_fault(fault, match="summary")
    offline.hold("summary")
    folding = asyncio.create_task(memora.folds.fold(ID))
    await model_waits(offline)
    await memora.store.rewind(ID, 5)
    state = await look(memora)
    offline.release()
    assert isinstance(await folding, Discarded)
    after = await look(memora)
    assert after.conversation.usage.fold_input_tokens > before.fold_input_tokens
    assert after.conversation.usage.fold_output_tokens > before.fold_output_tokens
    assert after.conversation.summary == state.conversation.summary
    assert (after.fold_failures, after.fold_due_at) == (0, state.fold_due_at)


async def test_a_turn_under_way_is_stored(memora: Memora, offline: OfflineModel) -> None:
    """The history did not change, so an answer that was begun before is as good as ever."""
    await talked(memora)
    offline.hold("answer")
    saying = asyncio.create_task(say(memora, "Am I late?"))
    await model_waits(offline)
    await memora.store.rewind(ID, 0)
    offline.release()
    result = await saying
    assert result.stats.newly_summarized_messages == 0
    assert [message.content for message in await history_of(memora)][-2:] == ["Am I late?", result.text]
    # It was made from a summary that is no more, so nobody claims to know what was sent.
    assert await memora.store.last_context(ID) is None


async def sent(memora: Memora) -> Context:
    """What was sent for the last answer."""
    context = await memora.store.last_context(ID)
    assert context
    return context


async def test_what_was_sent_is_still_known_to_the_byte(memora: Memora, redis: ArqRedis) -> None:
    """Also after the summary that was sent has gone from the trail, and has been made again with another text."""
    await talked(memora)
    await say(memora, '用中文，"quotes" and \\ too: what do you know of my cats?')
    before = await sent(memora)
    assert before.summary
    await memora.store.rewind(ID, 0)
    assert await sent(memora) == before
    async with worker_beside(memora):
        await caught_up(memora, ID)
    await memora.store.rewind(ID, 1)
    assert await sent(memora) == before
    assert (await redis.hget(f"memora:{{0}}:{ID}:summary", "generation")).endswith(b".2")  # type: ignore[misc]  # annotated as sync and async at once


async def test_until_it_is_folded_again_a_gap_is_told(memora: Memora) -> None:
    """A long history does not fit: the newest turns are sent, and the number left out is in the figures."""
    await say_all(memora, [f"Sentence {number} about journeys. " * 12 for number in range(12)])
    while isinstance(await memora.folds.fold(ID), Folded):
        pass
    assert (await say(memora, "Hello?")).stats.gap_messages == 0
    await memora.store.rewind(ID, 0)
    stats = (await say(memora, "And now?")).stats
    assert stats.gap_messages > 0
    assert stats.counted_input_tokens <= memora.settings.max_input_tokens


async def test_deleting_after_it_leaves_nothing(memora: Memora, redis: ArqRedis) -> None:
    """Neither key nor job of any generation."""
    await talked(memora)
    await memora.store.rewind(ID, 2)
    await memora.store.rewind(ID, 0)
    assert await memora.store.delete(ID)
    assert [key for key in await all_keys(redis) if ID.encode() in key] == []


async def test_it_is_told_to_those_who_watch(memora: Memora) -> None:
    """One event with both versions, and what waits now."""
    await talked(memora)
    before = await memora.store.events(ID, "")
    assert before
    await memora.store.rewind(ID, 2)
    after = await memora.store.events(ID, before.newest)
    assert after
    assert after.life == before.life
    (event,) = [json.loads(event.data) for event in after.events]
    told = {name: event[name] for name in ("type", "version", "from_version", "pending_messages")}
    assert told == {"type": "rewound", "version": 2, "from_version": 5, "pending_messages": 6}


async def test_over_http(settings: Settings, memora: Memora) -> None:
    """Rebuild and rollback answer with the memory as it is now; a wrong version is named, another's is not found."""
    keyed = Settings(_env_file=None, **{**settings.model_dump(exclude_unset=True), "api_keys": f"{KEY}, other-key-1"})
    async with serve(keyed) as serving, serving.client() as client, serving.http() as http:
        conversation = (await client.conversations.create()).id
        place = f"/conversations/{conversation}/memory"
        async with worker_beside(serving.memora):
            for text in TEXTS:
                await ask(client, text, conversation)
            await caught_up(memora, conversation)
        newest = (await http.get(place)).json()["version"]
        rolled = (await http.post(f"{place}/rollback", json={"version": 1})).json()
        assert (rolled["version"], rolled["summarized_message_count"] + rolled["pending_messages"]) == (1, 10)
        refused = await http.post(f"{place}/rollback", json={"version": newest + 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "version")
        rebuilt = (await http.post(f"{place}/rebuild", json={})).json()
        assert (rebuilt["version"], rebuilt["summary"], rebuilt["pending_messages"]) == (0, "", 10)
        async with serving.http(headers={"authorization": "Bearer other-key-1"}) as other:
            for action in ("rebuild", "rollback"):
                reply = await other.post(f"{place}/{action}", json={"version": 0})
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "conversation_not_found")
        async with worker_beside(serving.memora):
            await caught_up(memora, conversation)

        async def is_whole() -> bool:
            return bool((await http.get(place)).json()["summarized_message_count"] == 10)

        await eventually(is_whole)
        ends = [fold.end async for fold in serving.memora.store.folds(conversation)]
        assert all(before < after for before, after in pairwise([0, *ends]))


async def test_the_commands(settings: Settings, memora: Memora, tmp_path: Path) -> None:
    """`memora rebuild` folds by itself if no worker lives; `rollback` says what waits; a wrong version is one line."""
    await talked(memora)
    assert settings.redis_url
    line = CommandLine(tmp_path).using(
        MEMORA_REDIS_URL=settings.redis_url.get_secret_value(),
        OPENAI_BASE_URL=str(settings.openai_base_url),
        OPENAI_API_KEY="test-key-0123",
    )
    rebuilt = await asyncio.to_thread(line.run, "rebuild", ID)
    assert (rebuilt.code, rebuilt.err) == (0, "")
    assert "made anew" in rebuilt.out
    assert "10 messages" in rebuilt.out
    wrong, back, unknown, shown = await asyncio.to_thread(
        line.run_all,
        ("rollback", ID, "--to", "9"),
        ("rollback", ID, "--to", "0"),
        ("rebuild", "nobody"),
        ("rollback", ID),
    )
    assert (wrong.code, len(wrong.err.splitlines())) == (2, 1)
    assert "version 9" in wrong.err
    assert (back.code, "10 messages wait" in back.out) == (0, True)
    assert (unknown.code, len(unknown.err.splitlines())) == (1, 1)
    assert (shown.code, "--to" in shown.err) == (2, True)
