"""Real conversations, replayed line by line through `memora chat` with a worker folding behind it.

The texts are not part of the project. They are read from `shared/data` beside the checkout, or from where
`MEMORA_TEST_DATA` points; without them these tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("MEMORA_TEST_DATA") or ROOT.parent / "shared" / "data")
BUDGET = 1_000
WINDOW_MESSAGES = 6

FILES = ("memorybank_en.jsonl", "memorybank_zh-tw.jsonl")


def memora(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MEMORA_DATA_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "memora", *arguments],
        input=text, env=environment, capture_output=True, text=True, encoding="utf-8", check=False, timeout=120,
    )  # fmt: skip


def conversations(name: str) -> list[list[str]]:
    """What the user says in each conversation, one line a turn."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the conversations to replay are not here: {path}")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [[" ".join(turn["user"].split()) for turn in row["turns"]] for row in rows]


@pytest.mark.parametrize("name", FILES)
def test_a_replayed_conversation_is_stored_whole_and_folded_without_a_gap(name: str, tmp_path: Path) -> None:
    """Every turn stored, counts consistent, every context within the budget, no gap once the worker has caught up."""
    for number, lines in enumerate(conversations(name)):
        chat_id = f"talk-{number}"
        done = memora(tmp_path, "chat", "-c", chat_id, "--json", text="\n".join(lines) + "\n")
        assert done.returncode == 0, done.stderr
        turns = [record for record in map(json.loads, done.stdout.splitlines()) if record["type"] == "turn"]
        check_turns(turns, lines)
        check_after(tmp_path, chat_id, lines)


def check_turns(turns: list[dict[str, Any]], lines: list[str]) -> None:
    """The figures of every turn hold together."""
    assert len(turns) == len(lines)
    for count, turn in enumerate(turns, 1):
        stats = turn["stats"]
        assert stats["stored_messages"] == 2 * count
        assert stats["counted_input_tokens"] == stats["actual_input_tokens"] <= BUDGET
        assert stats["summarized_messages"] + stats["pending_messages"] <= 2 * count
        assert stats["gap_messages"] <= stats["stored_messages"] - stats["summarized_messages"]


def check_after(folder: Path, chat_id: str, lines: list[str]) -> None:
    """Once the worker has caught up: nothing pending, no gap, the folds tile what is summarized."""
    state = json.loads(memora(folder, "inspect", chat_id, "--json").stdout)
    assert state["message_count"] == 2 * len(lines)
    assert state["pending_messages"] == 0
    assert state["summarized_message_count"] >= 2 * len(lines) - WINDOW_MESSAGES
    assert state["next_context"]["gap_messages"] == 0
    exported = json.loads(memora(folder, "export", chat_id).stdout)
    assert [message["content"] for message in exported["messages"]][::2] == lines
    ends = [0, *(fold["to"] for fold in exported["folds"])]
    assert [fold["from"] for fold in exported["folds"]] == ends[:-1]
    assert ends[-1] == state["summarized_message_count"]
    assert exported["folds"][-1]["summary"] == state["summary"]
