"""The load test: its figures and its plan, and a run of a few seconds against everything real."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from hypothesis import given
from hypothesis import strategies as st

from memora.loadtest.histogram import Histogram
from memora.loadtest.page import page_of
from memora.loadtest.plan import Load, plan_turns
from memora.loadtest.report import lines_of, record_of
from memora.loadtest.run import Seen
from memora.offline_model.markers import read_markers

LOADS = st.builds(
    Load,
    rate=st.floats(0.5, 50),
    conversations=st.integers(1, 20),
    duration_seconds=st.floats(1, 10),
    message_words=st.integers(1, 40),
    seed=st.integers(0, 1_000),
)


@given(st.lists(st.floats(0, 10_000), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_within_a_thousandth(values: list[float], share: float) -> None:
    """Of the value that stands at this share of all of them, and never above the largest."""
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    found = histogram.percentile(share)
    assert found <= max(values)
    assert exact - 2e-6 <= found <= exact * 1.001 + 2e-6
    shares = [reached for _, reached in histogram.steps()]
    assert shares == sorted(shares)
    assert shares[-1] == 1


@given(LOADS)
def test_a_plan_is_open_fair_and_the_same_again(load: Load) -> None:
    """Due times ascend, every conversation has its turn before one has two more, numbers are without holes."""
    turns = list(plan_turns(load))
    assert turns == list(plan_turns(load))
    assert len(turns) == load.turns
    assert all(before.due <= after.due for before, after in pairwise(turns))
    said: dict[int, int] = {}
    for turn in turns:
        assert turn.marker.turn == said.get(turn.conversation, 0)
        assert read_markers(turn.text) == [turn.marker]
        said[turn.conversation] = turn.marker.turn + 1
    counts = [said.get(number, 0) for number in range(load.conversations)]
    assert max(counts) - min(counts) <= 1


@pytest.fixture
def memora(tmp_path: Path) -> CommandLine:
    """The command line in an empty home."""
    return CommandLine(tmp_path).using(PYTHONWARNINGS="default")


def test_a_run_is_measured_audited_and_judged(memora: CommandLine) -> None:
    """Workers die and the provider stumbles meanwhile: every turn is answered, audit and judge find nothing."""
    report = memora.home / "report.html"
    arguments = ("--rate", "6", "--conversations", "6", "--duration", "6", "--model-reply-seconds", "0.4")
    faults = ("--kill-worker-every", "2", "--provider-errors", "0.2", "--summary-seconds", "0.1")
    ran = memora.run("loadtest", *arguments, *faults, "--json", "--html", str(report))
    assert ran.code == 0, ran.err
    record = ran.json
    assert (record["turns"], record["errors"]) == (36, 0)
    assert record["audit"]["ok"]
    assert record["judge"]["ok"]
    assert record["ledger"]["ok"]
    assert record["judge"]["markers"] == 36
    assert record["audit"]["messages"] == 72
    assert record["accidents"]["workers killed"] >= 1
    for name in ("time_to_first_token_seconds", "turn_seconds", "memory_overhead_seconds"):
        figures = record[name]
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"] < 30
    assert record["tokens"]["answer_input"] > record["tokens"]["answer_output"] > 0
    page = report.read_text("utf-8")
    assert "audit clean" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--url", "ftp://127.0.0.1"), 2, "http://"),
        (("--url", "http://example.org"), 2, "--remote"),
        (("--url", "http://127.0.0.1:9", "--kill-worker-every", "1"), 2, "private"),
        (("--url", "http://127.0.0.1:9"), 3, "begins no conversation"),
        (("--html", "/nowhere/report.html"), 2, "/nowhere/report.html"),
        (("--rate", "0"), 2, "--rate"),
    ],
)
def test_what_cannot_be_done_is_one_line(memora: CommandLine, arguments: tuple[str, ...], code: int, says: str) -> None:
    """With the exit code of its kind, before anything is started."""
    ran = memora.run("loadtest", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("found", "is_clean"),
    [
        ({}, True),
        ({"audit": {"ok": False, "conversations": 1, "messages": 2, "folds": 0, "findings": [{}]}}, False),
        ({"ledger": {"ok": False, "differences": [{}]}}, False),
        ({"judge": {"ok": False, "requests": 3, "gap_messages": 0, "violation_count": 1}}, False),
    ],
)
def test_a_finding_or_a_violation_is_no_success(found: dict[str, Any], is_clean: bool) -> None:
    """It is said in the table and on the page, and decides the exit code."""
    seen = Seen(**found)
    seen.outcomes["ok"] = 1
    assert seen.is_clean is is_clean
    told = "\n".join(lines_of(seen)) + page_of(seen, {"command": "<b>"})
    assert ("✗" in told) is not is_clean
    assert "<b>" not in told.replace("<b>1</b>", "").replace("<b>0", "")
    json.dumps(record_of(seen, {}))


def test_a_turn_without_an_answer_is_no_success() -> None:
    """Even if nothing else is wrong."""
    seen = Seen()
    seen.outcomes["unknown"] = 1
    assert not seen.is_clean
