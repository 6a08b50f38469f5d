"""Which part of a conversation is sent for one answer.

Owns the window, the budget and the gap. A context is always whole: `summary of [0, c)` + whole turns of the tail + the
current message; what did not fit is counted. Must not know where messages come from or go to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from memora.core.conversation import MESSAGES_PER_TURN, Conversation, Message, Summary, turns
from memora.core.prompts import ModelRequest, summary_message
from memora.core.text import cut_to_fit
from memora.core.tokens import (
    DEFAULT_VOCABULARY,
    PRIMING_TOKENS,
    Calibration,
    count_text_tokens,
    fits_in_tokens,
    message_tokens,
)
from memora.errors import ContextLengthExceeded

MESSAGE_RESERVE_SHARE: Final = 8
"""The window leaves an eighth of the budget to the current message, whose size nobody knows beforehand."""

BATCH_RESERVE_SHARE: Final = 4
"""Turns that only wait for others to leave the window with them leave twice as much to the current message."""

_SMALLEST_SUMMARY_TOKENS: Final = 8
"""A summary cut below this says nothing; then it is left out of the request."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one conversation's contexts, in tokens, messages and words of the settings."""

    max_input_tokens: int
    max_recent_turns: int
    max_summary_tokens: int
    vocabulary: str = DEFAULT_VOCABULARY
    summary_in_instructions: bool = False
    calibration: Calibration = Calibration()
    fold_batch_turns: int = 1

    @property
    def most_recent_turns(self) -> int:
        """How far the window may grow before turns leave it: the next one makes a whole batch leave."""
        return self.max_recent_turns + self.fold_batch_turns - 1

    @property
    def local_tokens(self) -> int:
        """The ceiling in tokens as they are counted here."""
        return self.calibration.budget(self.max_input_tokens)


@dataclass(frozen=True, slots=True)
class Window:
    """How many of the newest messages stay word for word: `messages`, or more while a batch of turns gathers.

    It grows up to `most_messages`; the turn that goes beyond makes it fall back to `messages`, and what has left it is
    folded together. Without batches both are the same.
    """

    messages: int
    most_messages: int

    def holding(self, unsummarized_messages: int) -> int:
        """Its size when the summary leaves so many messages uncovered."""
        gathers = unsummarized_messages <= self.most_messages
        return max(self.messages, unsummarized_messages) if gathers else self.messages


@dataclass(frozen=True, slots=True)
class ContextTokens:
    """Where the counted input tokens of a context go; overheads are part of the part that causes them."""

    instructions: int = 0
    summary: int = 0
    tail: int = 0
    message: int = 0

    @property
    def total(self) -> int:
        """Everything, with what starts the reply."""
        return PRIMING_TOKENS + self.instructions + self.summary + self.tail + self.message


@dataclass(frozen=True, slots=True)
class Context:
    """What is sent to the model for one answer.

    `summary` is the text as sent: a prefix of the stored one when it had to be shortened, "" when there is none.
    `gap_messages` counts the messages that are in neither the summary nor the tail as sent.
    """

    instructions: str
    summary: str
    summary_version: int
    tail: tuple[Message, ...]
    message: str
    tail_start: int
    gap_messages: int
    tokens: ContextTokens
    counted_input_tokens: int
    summary_in_instructions: bool = False

    @property
    def request(self) -> ModelRequest:
        """The request, exactly as it goes out."""
        sent = [message for message in self.tail if not message.absent]
        tail = [(message.role, message.content) for message in sent]
        request = assemble(
            self.instructions, self.summary, tail, self.message, in_instructions=self.summary_in_instructions
        )
        first = len(request.messages) - len(tail) - 1
        phases = tuple((first + place, message.phase) for place, message in enumerate(sent) if message.phase)
        return replace(request, phases=phases)

    @property
    def messages_sent(self) -> int:
        """Messages of the request: summary if any, tail, and the current one."""
        has_background = bool(self.summary) and not self.summary_in_instructions
        return has_background + sum(not message.absent for message in self.tail) + 1


def assemble(
    instructions: str,
    summary: str,
    tail: Sequence[tuple[str, str]],
    message: str,
    *,
    in_instructions: bool,
) -> ModelRequest:
    """Put the parts of a context in their order: summary, tail, current message."""
    background: list[tuple[str, str]] = []
    if summary and in_instructions:
        instructions = "\n\n".join(part for part in (instructions, summary_message(summary)) if part)
    elif summary:
        background = [("developer", summary_message(summary))]
    return ModelRequest(instructions, (*background, *tail, ("user", message)))


def select_context(conversation: Conversation, instructions: str, message: str, budget: Budget) -> Context:
    """Choose what is sent: everything if it fits, else the newest whole turns, and count what was left out.

    Raises:
        ContextLengthExceeded: instructions and message alone are over the budget.
    """
    fixed = _fixed_tokens(instructions, message, budget)
    room = budget.local_tokens - fixed.total
    summary, summary_tokens = _fit_summary(conversation.summary, room, budget)
    tail = _newest_turns(conversation.tail, room - summary_tokens, budget)
    tokens = ContextTokens(fixed.instructions, summary_tokens, _tail_tokens(tail, budget.vocabulary), fixed.message)
    return Context(
        instructions=instructions,
        summary=summary,
        summary_version=conversation.summary.version,
        tail=tail,
        message=message,
        tail_start=conversation.message_count - len(tail),
        gap_messages=conversation.unsummarized_messages - len(tail),
        tokens=tokens,
        counted_input_tokens=budget.calibration.apply(tokens.total),
        summary_in_instructions=budget.summary_in_instructions,
    )


def window_messages(newest: Sequence[Message], summary: str, instructions: str, budget: Budget) -> int:
    """How many of the newest messages stay word for word: the last `max_recent_turns` turns, as far as they fit.

    A turn that cannot be sent next to the summary would be a gap in every context until it is folded, so it leaves the
    window early. `newest` ends with the newest message and holds whole turns.
    """
    room = _room_for_turns(summary, instructions, budget) - budget.local_tokens // MESSAGE_RESERVE_SHARE
    return _fitting_messages(newest, budget.max_recent_turns, room, budget)


def select_window(newest: Sequence[Message], summary: str, instructions: str, budget: Budget) -> Window:
    """The window of `window_messages`, and how far it may grow while turns gather to be folded together.

    Batches save tokens and must not cost a gap, so they gather only as long as there is room for a message that is
    larger than usual.
    """
    fewest = window_messages(newest, summary, instructions, budget)
    if budget.fold_batch_turns == 1:
        return Window(fewest, fewest)
    room = _room_for_turns(summary, instructions, budget) - budget.local_tokens // BATCH_RESERVE_SHARE
    return Window(fewest, max(fewest, _fitting_messages(newest, budget.most_recent_turns, room, budget)))


def most_useful_messages(budget: Budget) -> int:
    """More messages of the tail than this can never be sent, so there is no use in reading them."""
    could_fit = budget.max_input_tokens // message_tokens(0) + MESSAGES_PER_TURN
    wanted = max(could_fit, budget.most_recent_turns * MESSAGES_PER_TURN)
    return wanted - wanted % MESSAGES_PER_TURN


def _fixed_tokens(instructions: str, message: str, budget: Budget) -> ContextTokens:
    before = _instruction_tokens(instructions, budget)
    most = budget.local_tokens - PRIMING_TOKENS - before - message_tokens(0)
    if not fits_in_tokens(message, most, budget.vocabulary):
        raise ContextLengthExceeded(_too_long(message, most, budget))
    return ContextTokens(instructions=before, message=message_tokens(count_text_tokens(message, budget.vocabulary)))


def _too_long(message: str, most: int, budget: Budget) -> str:
    if most <= 0:
        return (
            f"the instructions alone fill the input budget of {budget.max_input_tokens} tokens: "
            "shorten MEMORA_INSTRUCTIONS or raise MEMORA_MAX_INPUT_TOKENS"
        )
    return (
        f"the message has {len(message):,} characters, more than the {budget.calibration.apply(most):,} tokens that "
        f"the input budget of {budget.max_input_tokens:,} leaves for it: shorten it or raise MEMORA_MAX_INPUT_TOKENS"
    )


def _instruction_tokens(instructions: str, budget: Budget) -> int:
    return message_tokens(_counted_instructions(instructions, budget.vocabulary)) if instructions else 0


@lru_cache(maxsize=16)
def _counted_instructions(instructions: str, vocabulary: str) -> int:
    """The same with nearly every turn. What belongs to one conversation is not kept like this."""
    return count_text_tokens(instructions, vocabulary)


def _summary_tokens(summary: str, budget: Budget) -> int:
    return message_tokens(count_text_tokens(summary_message(summary), budget.vocabulary)) if summary else 0


def _fit_summary(summary: Summary, room: int, budget: Budget) -> tuple[str, int]:
    """The summary, or the longest part of it that fits, with what it costs in the request."""
    whole = _summary_tokens(summary.text, budget)
    if whole <= room:
        return summary.text, whole
    short = cut_to_fit(summary.text, lambda text: _summary_tokens(text, budget) <= room)
    if count_text_tokens(short, budget.vocabulary) < _SMALLEST_SUMMARY_TOKENS:
        return "", 0
    return short, _summary_tokens(short, budget)


def _room_for_turns(summary: str, instructions: str, budget: Budget) -> int:
    """What is left for turns and the current message."""
    fixed = PRIMING_TOKENS + _instruction_tokens(instructions, budget)
    return budget.local_tokens - fixed - _summary_tokens(summary, budget)


def _fitting_messages(newest: Sequence[Message], most_turns: int, room: int, budget: Budget) -> int:
    """How many messages of the newest turns, at most so many, fit into the room."""
    kept = 0
    for turn in reversed(turns(newest)[-most_turns:] if most_turns else []):
        room -= _tail_tokens(turn, budget.vocabulary)
        if room < 0:
            break
        kept += MESSAGES_PER_TURN
    return kept


def _newest_turns(tail: Sequence[Message], room: int, budget: Budget) -> tuple[Message, ...]:
    kept: list[tuple[Message, ...]] = []
    for turn in reversed(turns(tail)):
        room -= _tail_tokens(turn, budget.vocabulary)
        if room < 0:
            break
        kept.append(turn)
    return tuple(message for turn in reversed(kept) for message in turn)


def _tail_tokens(messages: Sequence[Message], vocabulary: str) -> int:
    return sum(message_tokens(_content_tokens(message, vocabulary)) for message in messages)


def _content_tokens(message: Message, vocabulary: str) -> int:
    """As counted when it was stored, unless another model family answers now."""
    if (message.vocabulary or DEFAULT_VOCABULARY) == vocabulary:
        return message.tokens
    return count_text_tokens(message.content, vocabulary)
