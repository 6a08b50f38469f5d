"""The benchmarks run and say what they promise to say; how fast a busy machine is is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SECONDS = 120.0


def figures(script: str, *arguments: str) -> Any:
    """What a benchmark prints with `--json`."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cost() -> Any:
    """The report of one quick run."""
    return figures("cost.py", "--quick")


def test_the_cost_of_a_turn_is_told_for_every_way(cost: Any) -> None:
    """One command: what memory adds, the whole turn, processor time, first words, Redis and tokens, with verdicts."""
    rows = {row["name"]: row for row in cost["rows"]}
    assert set(rows["before the model, 10 messages"]["values"]) == {"thin", "bare", "memora", "inline", "http"}
    for begins in (
        "before the model",
        "whole turn",
        "turns a second",
        "processor time",
        "first word",
        "Redis",
        "tokens",
    ):
        assert any(name.startswith(begins) for name in rows), begins
    judged = [row["target"] for row in rows.values() if row["target"]]
    assert len(judged) >= 8
    for target in judged:
        met = target["found"] >= target["limit"] if target["at_least"] else target["found"] <= target["limit"]
        assert target["is_met"] is met
    assert all(value > 0 for row in rows.values() for way, value in row["values"].items() if way != "http")
    assert "openai" in cost["machine"]
    assert "Python" in cost["machine"]


def test_a_turn_takes_two_scripts_and_few_bytes_at_every_size(cost: Any) -> None:
    """These figures do not depend on the machine, so they are judged: two scripts, under 4 kB each way."""
    at_redis = [row["target"] for row in cost["rows"] if row["name"].startswith("Redis a turn")]
    assert len(at_redis) == 3
    assert all(target["is_met"] for target in at_redis)


@pytest.mark.parametrize("given", [False, True], ids=["a made-up talk", "a file"])
def test_tokens_are_counted_by_batch_and_budget(tmp_path: Path, given: bool) -> None:
    """Each row adds up; batches make fewer folds and longer shared prefixes; no marker and no message is missing."""
    turns = [{"user": f"I went to place {number} today.", "assistant": "How nice. " * 10} for number in range(16)]
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"turns": turns}) + "\n")
    files = [str(file)] if given else []
    first, second = figures("economics.py", *files, "--turns", "16", "--batches", "1,4", "--budgets", "2000")
    for row in (first, second):
        assert row["turns"] == 16
        assert row["tokens_in"] == row["answer_tokens"] + row["fold_tokens"]
        assert (row["markers_missing"], row["gap_messages"]) == (0, 0)
        assert row["cached"] <= row["same_prefix"] < row["answer_tokens"]
    assert first["folds"] > second["folds"] > 0
    assert first["same_prefix"] < second["same_prefix"]


def test_growth_is_told_by_the_number_of_conversations() -> None:
    """Bytes, commands and processor time at each size, and what a worker does with a backlog."""
    rows = {row["name"]: row["values"] for row in figures("growth.py", "--quick")["rows"]}
    assert set(rows["at rest: bytes a conversation"]) == {"10", "20"}
    assert rows["folds a turn"]["20"] > 0
    assert any(name.startswith("backlog") and values["backlog"] > 0 for name, values in rows.items())
