"""The second story: no message is ever lost on the way to the model, as the judge of the offline model sees it.

The model runs as a process of its own and knows nothing but the requests that arrive. Each turn carries a marker, and
after each one the client tells the judge how it ended; the verdict comes over the same wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from arq.connections import ArqRedis
from judging import JudgingModel, judging_model
from redis_view import command
from talk import caught_up, changed, count_of, say, worker_beside

from memora.bootstrap import Memora, open_memora
from memora.errors import MemoraError
from memora.offline_model.markers import Marker
from memora.settings import Settings

EXAMPLE = (
    "我下個月要考 TOEIC。",
    "什麼是 present perfect？",
    "請給我三個 B1 單字。",
    "journey 和 travel 有什麼不同？",
    "我下個月要考什麼？",
)


@pytest.fixture
async def model() -> AsyncIterator[JudgingModel]:
    """The judging model, which takes faults and shows what it was sent."""
    async with judging_model("--scriptable") as model:
        yield model


@pytest.fixture
def settings(settings: Settings, model: JudgingModel, redis: ArqRedis) -> Settings:  # noqa: ARG001  # empties the server
    """Settings that point to the judging model instead."""
    return changed(settings, openai_base_url=model.url)


async def tell(memora: Memora, model: JudgingModel, marker: Marker, text: str) -> None:
    """One turn of the conversation that the marker names, reported as it ended."""
    try:
        result = await say(memora, f"{text} {marker}", marker.tag)
    except MemoraError:
        await model.report(marker, "failed")
    else:
        assert str(marker) in result.text
        await model.report(marker, "ok", result.stats.gap_messages)


async def test_the_worked_example_reaches_the_model_whole(memora: Memora, model: JudgingModel) -> None:
    """Each of five requests carries all that was said before: the fifth as a summary of turn 1, and turns 2-4."""
    async with worker_beside(memora):
        for number, text in enumerate(EXAMPLE):
            await tell(memora, model, Marker("learner", number), text)
            await caught_up(memora)
    verdict = await model.verdict()
    assert verdict["ok"], verdict
    assert (verdict["requests"], verdict["markers"], verdict["reported"]["ok"]) == (5, 5, 5)
    assert (verdict["unmarked_requests"], verdict["gap_messages"]) == (0, 0)
    *_, fifth = [record["body"]["input"] for record in await model.requests() if record["kind"] == "answer"]
    said = [item["content"] for item in fifth if item["role"] == "user"]
    assert said == [f"{text} {Marker('learner', number)}" for number, text in enumerate(EXAMPLE)][1:]
    assert "[#learner:0 proof" in fifth[0]["content"]


async def test_whatever_happens_every_request_carries_its_whole_conversation(
    settings: Settings, model: JudgingModel
) -> None:
    """Two conversations, a worker that comes and goes, a full budget, refusals and a restart: the judge finds nothing.

    Every answered turn was in every later request once, in order, in the summary or word for word, or in a gap that
    the user was told of.
    """
    settings = changed(settings, max_input_tokens=600, max_summary_tokens=100)
    filler = "It is about a cat on a mat. " * 4
    for start in range(0, 60, 20):
        async with open_memora(settings) as memora:
            await model.add_fault({"kind": "status", "status": 401}, match="answer", skip=5, times=1)
            await model.add_fault({"kind": "empty"}, match="summary", skip=2, times=2)
            for number in range(start, start + 12):
                for tag in ("ann", "ben"):
                    await tell(memora, model, Marker(tag, number), filler)
            async with worker_beside(memora):
                for number in range(start + 12, start + 20):
                    for tag in ("ann", "ben"):
                        await tell(memora, model, Marker(tag, number), filler)
                await caught_up(memora, "ann", "ben")
            assert min(await count_of(memora, "ann"), await count_of(memora, "ben")) > start
    verdict = await model.verdict()
    assert verdict["ok"], verdict
    assert (verdict["conversations"], verdict["markers"]) == (2, 120)
    assert verdict["reported"] == {"ok": 117, "failed": 3, "unknown": 0}
    assert verdict["gap_messages"] > 50
    assert verdict["folds"] > 10


async def test_the_judge_sees_what_was_exchanged_behind_memoras_back(
    memora: Memora, model: JudgingModel, redis: ArqRedis
) -> None:
    """So that its silence means something: one conversation is given the summary of another, and it is found."""
    async with worker_beside(memora):
        for tag in ("ann", "ben"):
            for number in range(6):
                await tell(memora, model, Marker(tag, number), "Hello.")
        await caught_up(memora, "ann", "ben")
    assert (await model.verdict())["ok"]
    theirs = await command(redis, "HGET", "memora:{0}:ben:summary", "summary")
    await command(redis, "HSET", "memora:{0}:ann:summary", "summary", theirs)
    await tell(memora, model, Marker("ann", 6), "Hello.")
    verdict = await model.verdict()
    assert not verdict["ok"]
    assert {violation["kind"] for violation in verdict["violations"]} == {"foreign", "unreported_gap"}
