"""Which messages a fold moves into the summary, and how they are shown to the summariser.

Owns the plan of one fold. Oldest whole turns first, as many as the summariser's input takes; smaller after failures.
Must not call anything: `fold` executes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memora.core.conversation import MESSAGES_PER_TURN, Message, Summary, turns
from memora.core.prompts import Piece, as_data, fold_request
from memora.core.quality_gate import SummaryCap
from memora.core.text import split_to_fit
from memora.core.tokens import DEFAULT_VOCABULARY, count_text_tokens, fits_in_tokens, request_tokens

TRIES_PER_SIZE: Final = 2
"""How often a fold of one size may fail before a smaller one is tried."""

_PIECE_OVERHEAD_TOKENS: Final = 24
"""What a message's JSON keys, quotes and part number cost in the fold request, rounded up."""

SMALLEST_ROOM_TOKENS: Final = 64 + _PIECE_OVERHEAD_TOKENS
"""A fold request leaves at least this much for messages: smaller pieces of one would say nothing."""

_MOST_HALVINGS: Final = 2
"""How often the pieces of a message are halved when they fail: the model may take less than the settings say."""

LONGEST_BACKOFF_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class FoldLimits:
    """The summariser's caps: tokens of one request to it, in its own vocabulary, and of the summary it returns."""

    max_input_tokens: int
    cap: SummaryCap
    vocabulary: str = DEFAULT_VOCABULARY


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
    start = work.summary.summarized_message_count
    fitting = _turns_that_fit(pending, limits, _room(work.summary.text, limits))
    level = work.failures // TRIES_PER_SIZE
    size = max(fitting, 1) >> level
    if size and fitting:
        return _in_one_step(start, pending[:size])
    last_try = level > 0 and max(fitting, 1) >> (level - 1) == 0
    return _piece_by_piece(work.summary, pending[0], limits, level, last_try=last_try)


def backoff_seconds(failures: int, first_seconds: float, jitter: float) -> float:
    """How long to wait before try `failures` + 1: doubled each time, capped, and spread by `jitter` in [0, 1)."""
    whole = min(first_seconds * 2.0 ** min(max(failures - 1, 0), 16), LONGEST_BACKOFF_SECONDS)
    return whole * (0.75 + 0.5 * jitter)


def _room(summary: str, limits: FoldLimits) -> int:
    """Tokens a fold request with this summary leaves for messages."""
    return limits.max_input_tokens - _empty_request_tokens(summary, limits)


def _room_of_every_step(summary: str, limits: FoldLimits) -> int:
    """Tokens that are left for messages whatever summary the steps before have come to."""
    longest = _empty_request_tokens("", limits) + limits.cap.max_data_tokens
    used = max(longest, _empty_request_tokens(summary, limits))
    return limits.max_input_tokens - used


def _empty_request_tokens(summary: str, limits: FoldLimits) -> int:
    empty = fold_request(summary, (), max_words=limits.cap.max_words, max_tokens=limits.cap.max_tokens)
    return request_tokens(empty.instructions, empty.messages, limits.vocabulary)


def _turns_that_fit(pending: Sequence[tuple[Message, ...]], limits: FoldLimits, room: int) -> int:
    """How many of the oldest turns fit whole into one request."""
    fitting = 0
    for turn in pending:
        room -= sum(_shown_tokens(message.content, limits) for message in turn)
        if room < 0:
            break
        fitting += 1
    return fitting


def _shown_tokens(content: str, limits: FoldLimits) -> int:
    """Tokens of a message inside the JSON of a fold request."""
    return count_text_tokens(as_data(content), limits.vocabulary) + _PIECE_OVERHEAD_TOKENS


def _in_one_step(start: int, chosen: Sequence[tuple[Message, ...]]) -> FoldPlan:
    messages = list(enumerate((message for turn in chosen for message in turn), start))
    shown = [(position, message) for position, message in messages if not message.absent]
    pieces = tuple(Piece(message.role, message.content) for _, message in shown)
    steps = (FoldStep(pieces, tuple(position for position, _ in shown)),) if shown else ()
    return FoldPlan(start, start + len(messages), steps)


def _piece_by_piece(
    summary: Summary, turn: tuple[Message, ...], limits: FoldLimits, level: int, *, last_try: bool
) -> FoldPlan:
    """A single turn, a step for each message and for each part of one that is too large."""
    start = summary.summarized_message_count
    room = max(_room_of_every_step(summary.text, limits) >> min(level, _MOST_HALVINGS), SMALLEST_ROOM_TOKENS)
    pieces = [
        (position, piece)
        for position, message in enumerate(turn, start)
        if not message.absent
        for piece in _pieces(message, room, limits)
    ]
    steps = tuple(FoldStep((piece,), (position,)) for position, piece in pieces)
    return FoldPlan(start, start + MESSAGES_PER_TURN, steps, last_try)


def _pieces(message: Message, room: int, limits: FoldLimits) -> list[Piece]:
    """Cut a message into parts that fit a request each; nothing is left out."""
    most = room - _PIECE_OVERHEAD_TOKENS
    fitting = split_to_fit(message.content, lambda text: fits_in_tokens(as_data(text), most, limits.vocabulary))
    contents = fitting or [message.content]
    return [Piece(message.role, content, part, len(contents)) for part, content in enumerate(contents, 1)]
