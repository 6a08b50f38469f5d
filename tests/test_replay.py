"""Real conversations, replayed line by line through `memora chat` with a worker folding behind it.

The texts are not part of the project. They are read from `shared/data` beside the checkout, or from where
`MEMORA_TEST_DATA` points; without them these tests skip.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("MEMORA_TEST_DATA") or ROOT.parent / "shared" / "data")
BUDGET = 1_000
WINDOW_MESSAGES = 6

CONVERSATIONS = int(os.environ.get("MEMORA_TEST_CONVERSATIONS") or 3)
"""Of each file; eight are all of them."""

FILES = ("memorybank_en.jsonl", "memorybank_zh-tw.jsonl")


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
    command_line = CommandLine(tmp_path)
    talks = {f"talk-{number}": lines for number, lines in enumerate(conversations(name)[:CONVERSATIONS])}
    for chat_id, lines in talks.items():
        chat = command_line.run("chat", "-c", chat_id, "--json", typed="\n".join(lines) + "\n")
        assert chat.code == 0, chat.err
        check_turns([record for record in chat.objects if record["type"] == "turn"], lines)
    for chat_id, lines in talks.items():
        state = command_line.run("inspect", chat_id, "--json").json
        check_after(state, command_line.run("export", chat_id).json, lines)


def check_turns(turns: list[dict[str, Any]], lines: list[str]) -> None:
    """The figures of every turn hold together."""
    assert len(turns) == len(lines)
    for count, turn in enumerate(turns, 1):
        stats = turn["stats"]
        assert stats["stored_messages"] == 2 * count
        assert stats["counted_input_tokens"] == stats["actual_input_tokens"] <= BUDGET
        assert stats["summarized_messages"] + stats["pending_messages"] <= 2 * count
        # Counted when the context was made; the worker may have folded some of them since.
        assert stats["gap_messages"] < stats["stored_messages"]


def check_after(state: dict[str, Any], exported: dict[str, Any], lines: list[str]) -> None:
    """Once the worker has caught up: nothing pending, no gap, the folds tile what is summarized."""
    assert state["message_count"] == 2 * len(lines)
    assert state["pending_messages"] == 0
    assert state["summarized_message_count"] >= 2 * len(lines) - WINDOW_MESSAGES
    assert state["next_context"]["gap_messages"] == 0
    assert [message["content"] for message in exported["messages"]][::2] == lines
    ends = [0, *(fold["to"] for fold in exported["folds"])]
    assert [fold["from"] for fold in exported["folds"]] == ends[:-1]
    assert ends[-1] == state["summarized_message_count"]
    assert exported["folds"][-1]["summary"] == state["summary"]
