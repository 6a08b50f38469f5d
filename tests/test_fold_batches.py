"""Folding in batches: turns gather in the window and leave it together, and nothing is lost or left out for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from arq.connections import ArqRedis
from talk import ID, caught_up, changed, count_of, fold_documents, folds_of, look, model_waits, say, say_all, shown
from talk import worker_beside as folding

from memora.bootstrap import Memora, open_memora
from memora.core.conversation import Conversation
from memora.fold import Folded
from memora.fold_queue import QUEUE
from memora.offline_model import OfflineModel
from memora.picture import take_picture
from memora.settings import Settings

BATCH_TURNS = 3
WINDOW_TURNS = 3
CATS = [f"I have {n} cats in Taipei." for n in range(20)]


@pytest.fixture
async def memora(settings: Settings, redis: ArqRedis) -> AsyncIterator[Memora]:  # noqa: ARG001  # empties the server
    """Memora that folds three turns at a time, with room for them."""
    async with open_memora(changed(settings, fold_batch_turns=BATCH_TURNS, max_input_tokens=4_000)) as opened:
        opened.client.warm_up()
        yield opened


async def is_due(memora: Memora) -> bool:
    """Whether the outbox lists the conversation; if so, there is a job as well."""
    listed = await memora.storage.redis.zscore("memora:{0}:pending", ID) is not None
    assert bool(await memora.storage.redis.zcard(QUEUE)) == listed
    return listed


async def test_nothing_is_due_until_a_batch_has_gathered(memora: Memora) -> None:
    """Up to five turns stay word for word; the sixth makes three of them pending at once."""
    for number, text in enumerate(CATS[: WINDOW_TURNS + BATCH_TURNS - 1], 1):
        result = await say(memora, text)
        assert (result.stats.pending_messages, result.stats.gap_messages) == (0, 0)
        assert result.stats.context_messages == 2 * number - 1
        assert not await is_due(memora)
    last = await say(memora, CATS[5])
    assert (last.stats.pending_messages, last.stats.gap_messages) == (2 * BATCH_TURNS, 0)
    assert await is_due(memora)


async def test_a_worker_folds_a_batch_in_one_call(memora: Memora, offline: OfflineModel) -> None:
    """Twelve turns are three calls of three turns; the last three stay, and nothing is left in the outbox."""
    async with folding(memora):
        for text in CATS[:12]:
            await say(memora, text)
            await caught_up(memora)
    assert [(fold.start, fold.end) async for fold in memora.store.folds(ID)] == [(0, 6), (6, 12), (12, 18)]
    assert [len(shown(document)) for document in fold_documents(offline)] == [6, 6, 6]
    assert not await is_due(memora)


async def test_turns_that_arrive_during_a_fold_gather_for_the_next(memora: Memora, offline: OfflineModel) -> None:
    """They make no fold of one turn behind it, neither by their own append nor by the commit."""
    offline.hold("summary")
    async with folding(memora):
        await say_all(memora, CATS[:6])
        await model_waits(offline)
        await say_all(memora, CATS[6:8])
        offline.release()
        await caught_up(memora)
        assert [(fold.start, fold.end) for fold in await folds_of(memora)] == [(0, 6)]
        picture = await take_picture(memora.store, memora.settings, ID)
        assert (picture.pending_messages, picture.window_messages) == (0, 10)
        await say(memora, CATS[8])
        await caught_up(memora)
    assert [(fold.start, fold.end) for fold in await folds_of(memora)] == [(0, 6), (6, 12)]


async def test_every_reader_agrees_on_what_waits(memora: Memora) -> None:
    """Stats of the turn, `inspect`, the backlog and the outbox say the same after every turn."""
    for text in CATS[:14]:
        said = (await say(memora, text)).stats.pending_messages
        assert (await take_picture(memora.store, memora.settings, ID)).pending_messages == said
        assert (await memora.store.backlog(most=10)).messages == said
        assert await is_due(memora) == (said > 0)
        if said == 2 * BATCH_TURNS:
            await memora.folds.fold(ID)
            assert not await is_due(memora)


@pytest.mark.parametrize("max_input_tokens", [400, 600, 1_000])
async def test_the_budget_ends_a_batch_early(settings: Settings, redis: ArqRedis, max_input_tokens: int) -> None:  # noqa: ARG001  # empties the server
    """With large turns nothing is left out of a context as long as folds keep up, whatever batch is asked for."""
    limits = {"max_input_tokens": max_input_tokens, "max_summary_tokens": 100}
    large = "I would like to tell you about my week in Taipei, where I saw many cats. " * 3
    async with open_memora(changed(settings, fold_batch_turns=8, **limits)) as memora:
        for number in range(12):
            result = await say(memora, f"{number}: {large}"[: max_input_tokens // 3])
            assert result.stats.gap_messages == 0
            # A fold may need another behind it: its summary can be longer, and the window beside it smaller.
            while isinstance(await memora.folds.fold(ID), Folded):
                pass
        assert await count_of(memora) > 0


async def test_a_gap_makes_everything_outside_the_window_due(memora: Memora) -> None:
    """A message so large that turns had to be left out for it does not wait for a batch."""
    await say_all(memora, CATS[:5])
    assert not await is_due(memora)
    large = await say(memora, "Please correct this. " + "cats and dogs " * 1_290)
    assert large.stats.gap_messages > 0
    assert await is_due(memora)
    await memora.folds.fold(ID)
    assert (await look(memora)).conversation.summary.summarized_message_count > 0
    after: Conversation = (await look(memora)).conversation
    assert after.unsummarized_messages <= 2 * WINDOW_TURNS


async def test_what_gathers_is_carried_for_ever_if_nobody_comes_back(memora: Memora) -> None:
    """An idle conversation with less than a batch beyond its window is not due, and no sweep makes it so."""
    await say_all(memora, CATS[:5])
    async with folding(memora):
        await anyio.lowlevel.checkpoint()
        swept = await memora.store.sweep(most=100, again_seconds=0, lease_seconds=1)
    assert (swept.due, swept.enqueued) == (0, 0)
    assert (await say(memora, "How many cats?")).stats.gap_messages == 0
