"""A few turns, word for word: what the model was really sent against what is stored, to the last character.

For texts of any kind and size, the budget included. It knows nothing of how a context is chosen. Long conversations of
many clients are for the judge of the offline model, which follows markers alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from talk import sent_messages

from memora.chat import TurnResult
from memora.core.conversation import Message
from memora.core.prompts import SUMMARY_FENCE
from memora.core.tokens import request_tokens
from memora.store import Fold


def check_request(
    record: dict[str, Any], result: TurnResult, history: Sequence[Message], folds: Sequence[Fold], budget: int
) -> None:
    """Check one recorded request for an answer.

    Raises:
        AssertionError: a message was left out in silence, sent twice or out of order, or the budget was broken.
    """
    messages = sent_messages(record)
    tokens = request_tokens(record["body"].get("instructions", ""), messages)
    assert tokens <= budget
    summary = sent_summary(messages)
    tail = [message for message in messages[:-1] if message[0] != "developer"]
    asked_at = result.stats.stored_messages - 2
    assert messages[-1] == ("user", history[asked_at].content)
    start = asked_at - len(tail)
    assert tail == [(message.role, message.content) for message in history[start:asked_at]]
    assert start % 2 == 0
    covered = 0
    if result.context.summary_version:
        fold = folds[result.context.summary_version - 1]
        covered = fold.end
        assert fold.summary.startswith(summary)
    assert result.stats.gap_messages == start - covered >= 0


def sent_summary(messages: Sequence[tuple[str, str]]) -> str:
    """The summary inside the developer message, "" if there is none."""
    carriers = [content for role, content in messages if role == "developer"]
    assert len(carriers) <= 1
    if not carriers:
        return ""
    lines = carriers[0].splitlines()
    assert lines.count(f"</{SUMMARY_FENCE}>") == 1
    return str(json.loads(lines[lines.index(f"<{SUMMARY_FENCE}>") + 1]))


def check_folds(folds: Sequence[Fold], documents: Sequence[dict[str, Any]], history: Sequence[Message]) -> None:
    """Check that the folds tile the history from its beginning, and each message was shown, oldest first, once.

    `documents` are the requests of the committed folds alone.
    """
    assert [fold.start for fold in folds] == [0, *(fold.end for fold in folds)][: len(folds)]
    assert [fold.version for fold in folds] == list(range(1, len(folds) + 1))
    texts: list[tuple[str, str]] = []
    for document in documents:
        for item in document["new_messages"]:
            part, _, _ = item.get("part", "1/1").partition("/")
            if part == "1":
                texts.append((item["role"], item["content"]))
            else:
                texts[-1] = (texts[-1][0], texts[-1][1] + item["content"])
    end = folds[-1].end if folds else 0
    assert texts == [(message.role, message.content) for message in history[:end]]
