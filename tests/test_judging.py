"""The judge at work: real conversations, a real worker, a model that misbehaves; and its calls over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from arq.connections import ArqRedis
from judging import judging_model
from redis_view import command
from talk import ID, caught_up, changed, count_of, say, worker_beside

from memora.bootstrap import Memora, open_memora
from memora.errors import MemoraError
from memora.offline_model import OfflineModel
from memora.offline_model.judge import Report
from memora.offline_model.markers import Marker
from memora.settings import Settings

TAG = "k3"


@pytest.fixture
async def offline() -> AsyncIterator[OfflineModel]:
    """The offline model, scriptable and judging."""
    async with OfflineModel(scriptable=True, judging=True) as model:
        yield model


@pytest.fixture(autouse=True)
def _emptied(redis: ArqRedis) -> None:
    """Every test begins with an empty server."""


async def talk(memora: Memora, offline: OfflineModel, turns: range, filler: str = "") -> None:
    """Turns with markers, each reported to the judge as it ended."""
    for number in turns:
        marker = Marker(TAG, number)
        try:
            result = await say(memora, f"My message {marker}. {filler}")
        except MemoraError:
            offline.judge.report(Report(marker, "failed"))
        else:
            assert str(marker) in result.text
            offline.judge.report(Report(marker, "ok", result.stats.gap_messages))


async def test_a_conversation_with_failures_is_judged_clean(memora: Memora, offline: OfflineModel) -> None:
    """Refused answers, failed and overlong summaries: every request still carries every answered turn once."""
    async with worker_beside(memora):
        for fault in ({"kind": "status", "status": 401}, {"kind": "garbage"}, {"kind": "cut"}):
            offline.add_fault(fault, match="answer", skip=7, times=1)
        for fault in ({"kind": "refusal"}, {"kind": "too_long"}, {"kind": "empty"}, {"kind": "reasoning"}):
            offline.add_fault(fault, match="summary", skip=1, times=2)
        for start in range(0, 40, 4):
            await talk(memora, offline, range(start, start + 4))
            await caught_up(memora, ID)
    verdict = offline.judge.verdict()
    assert verdict["ok"], verdict
    assert verdict["markers"] == 40
    assert verdict["reported"]["failed"] >= 1
    assert verdict["reported"]["ok"] >= 30
    assert verdict["folds"] > 8


async def test_gaps_are_reported_as_they_are(settings: Settings, offline: OfflineModel) -> None:
    """Without a worker the budget fills up; each gap the judge sees is the one the user was told."""
    async with open_memora(changed(settings, max_input_tokens=600, max_summary_tokens=100)) as memora:
        await talk(memora, offline, range(30), "It is about a cat on a mat. " * 5)
    verdict = offline.judge.verdict()
    assert verdict["ok"], verdict
    assert verdict["gap_messages"] > 50


async def test_a_turn_taken_out_of_the_history_is_found(memora: Memora, offline: OfflineModel, redis: ArqRedis) -> None:
    """What Redis has lost, the judge misses: a turn of the tail vanishes, and the next request convicts."""
    key = f"memora:{{0}}:{ID}:history"
    async with worker_beside(memora):
        await talk(memora, offline, range(10))
        await caught_up(memora, ID)
    assert await count_of(memora) > 0
    assert offline.judge.verdict()["ok"]
    question, answer = await command(redis, "LRANGE", key, -4, -3)
    for record in (question, answer):
        await command(redis, "LREM", key, 1, record)
    await command(redis, "HINCRBY", f"memora:{{0}}:{ID}:summary", "message_count", -2)
    await talk(memora, offline, range(10, 11))
    assert [violation["kind"] for violation in offline.judge.verdict()["violations"]] == ["lost"]


async def test_reports_and_the_verdict_go_over_http() -> None:
    """A process of its own judges; wrong reports are refused whole, and other control calls are not there."""
    async with judging_model() as model:
        await _judged_over_http(model.http)


async def _judged_over_http(http: httpx2.AsyncClient) -> None:
    question: dict[str, Any] = {"model": "m", "input": "My message [#k3:0]"}
    answer = (await http.post("/v1/responses", json=question)).json()
    assert answer["output"][0]["content"][0]["text"].startswith("[#k3:0] ")
    report = {"marker": "[#k3:0]", "outcome": "ok", "gap_messages": 0}
    wrong_bodies: list[dict[str, Any]] = [
        {"reports": {}},
        {"reports": [report, "x"]},
        {"reports": [report, {**report, "marker": "k3"}]},
        {"reports": [report, {**report, "outcome": "fine"}]},
        {"reports": [report, {**report, "gap_messages": -1}]},
        {"reports": [report, {**report, "gap_messages": True}]},
    ]
    for wrong in wrong_bodies:
        assert (await http.post("/_control/judge", json=wrong)).status_code == 400
    assert (await http.get("/_control/judge")).json()["reported"]["ok"] == 0
    assert (await http.post("/_control/judge", json={"reports": [report]})).status_code == 200
    assert (await http.put("/_control/judge", json={})).status_code == 405
    assert (await http.get("/_control/requests")).status_code == 404
    verdict = (await http.get("/_control/judge")).json()
    assert (verdict["ok"], verdict["requests"], verdict["reported"]["ok"]) == (True, 1, 1)
    await http.post("/_control/judge", json={"reports": [{"marker": "[#k3:1]", "outcome": "ok"}]})
    verdict = (await http.get("/_control/judge")).json()
    assert (verdict["ok"], verdict["violation_count"]) == (False, 1)
    assert verdict["violations"] == [
        {"kind": "never_asked", "conversation": "k3", "turn": 1, "detail": "it was answered without the model"}
    ]
