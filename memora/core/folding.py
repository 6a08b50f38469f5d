"""Which messages a fold moves into the summary, and how they are shown to the summariser.

Owns the plan of one fold. Oldest whole turns first, as many as the summariser's input takes; smaller after failures.
Must not call anything: `fold` executes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memora.core.conversation import MESSAGES_PER_TURN, Message, Summary, turns
from memora.core.prompts import Piece, as_data, fold_request
from memora.core.quality_gate import SummaryCap
from memora.core.text import cut_to_fit
from memora.core.tokens import count_text_tokens, request_tokens

TRIES_PER_SIZE: Final = 2
"""How often a fold of one size may fail before a smaller one is tried."""

_PIECE_OVERHEAD_TOKENS: Final = 24
"""What a message's JSON keys, quotes and part number cost in the fold request, rounded up."""

_SMALLEST_PIECE_TOKENS: Final = 64
_LONGEST_BACKOFF_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class FoldLimits:
    """The summariser's caps: tokens of one request to it, and of the summary it returns."""

    max_input_tokens: int
    cap: SummaryCap


@dataclass(frozen=True, slots=True)
class FoldWork:
    """What a fold starts from: the summary, the pending messages behind it, oldest first, and what failed so far.

    `failures` counts tries since the last commit, `rejections` those of them in which the model answered and the
    answer was no summary.
    """

    conversation_id: str
    generation: str
    summary: Summary
    messages: tuple[Message, ...]
    failures: int = 0
    rejections: int = 0


@dataclass(frozen=True, slots=True)
class FoldStep:
    """One call of the summariser; `positions` are the messages of which it shows a piece."""

    pieces: tuple[Piece, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """Messages `[start, end)` of the history, in the steps in which the summariser sees them.

    Each step starts from the result of the one before. On the `last_try`, a step that fails is represented by a note.
    """

    start: int
    end: int
    steps: tuple[FoldStep, ...]
    last_try: bool = False

    @property
    def message_count(self) -> int:
        """How many messages the fold moves."""
        return self.end - self.start


def plan_fold(work: FoldWork, limits: FoldLimits) -> FoldPlan | None:
    """Plan the next fold; None when nothing is pending."""
    pending = turns(work.messages)
    if not pending:
        return None
    room = _room(work.summary, limits)
    whole = _turns_that_fit(pending, room)
    level = work.failures // TRIES_PER_SIZE
    size = whole >> level
    if size:
        return _plan(work.summary.summarized_message_count, pending[:size], room, together=True)
    last_try = whole >> (level - 1) == 0 if level else False
    return _plan(work.summary.summarized_message_count, pending[:1], room, together=False, last_try=last_try)


def backoff_seconds(failures: int, first_seconds: float, jitter: float) -> float:
    """How long to wait before try `failures` + 1: doubled each time, capped, and spread by `jitter` in [0, 1)."""
    whole = min(first_seconds * 2.0 ** min(max(failures - 1, 0), 16), _LONGEST_BACKOFF_SECONDS)
    return whole * (0.75 + 0.5 * jitter)


def _room(summary: Summary, limits: FoldLimits) -> int:
    """Tokens a fold request leaves for messages."""
    empty = fold_request(summary.text, (), max_words=limits.cap.max_words, max_tokens=limits.cap.max_tokens)
    used = request_tokens(empty.instructions, empty.messages, limits.cap.vocabulary)
    return max(limits.max_input_tokens - used, _SMALLEST_PIECE_TOKENS + _PIECE_OVERHEAD_TOKENS)


def _turns_that_fit(pending: Sequence[tuple[Message, ...]], room: int) -> int:
    """How many of the oldest turns fit into one request; at least one, which is then cut into pieces."""
    fitting = 0
    for turn in pending:
        room -= sum(_shown_tokens(message.content) for message in turn)
        if room < 0:
            break
        fitting += 1
    return max(fitting, 1)


def _shown_tokens(content: str) -> int:
    """Tokens of a message inside the JSON of a fold request."""
    return count_text_tokens(as_data(content)) + _PIECE_OVERHEAD_TOKENS


def _plan(
    start: int, chosen: Sequence[tuple[Message, ...]], room: int, *, together: bool, last_try: bool = False
) -> FoldPlan:
    numbered = list(enumerate((message for turn in chosen for message in turn), start))
    end = start + len(chosen) * MESSAGES_PER_TURN
    if together and sum(_shown_tokens(message.content) for _, message in numbered) <= room:
        pieces = tuple(Piece(message.role, message.content) for _, message in numbered)
        return FoldPlan(start, end, (FoldStep(pieces, tuple(position for position, _ in numbered)),))
    steps = tuple(FoldStep((piece,), (position,)) for position, message in numbered for piece in _pieces(message, room))
    return FoldPlan(start, end, steps, last_try)


def _pieces(message: Message, room: int) -> list[Piece]:
    """Cut a message into parts that fit a request each; nothing is left out."""
    if _shown_tokens(message.content) <= room:
        return [Piece(message.role, message.content)]
    contents = _split(message.content, room)
    return [Piece(message.role, content, part, len(contents)) for part, content in enumerate(contents, 1)]


def _split(content: str, room: int) -> list[str]:
    """Cut a text into the fewest parts of roughly equal length that each fit."""
    step = max(1, math.ceil(len(content) / math.ceil(_shown_tokens(content) / room)))
    parts: list[str] = []
    rest = content
    while rest:
        part = cut_to_fit(rest[:step], lambda text: _shown_tokens(text) <= room) or rest[0]
        # cut_to_fit drops blanks at the cut; they go to the next part, so that the parts join to the whole.
        parts.append(part)
        rest = rest[len(part) :]
    return parts
