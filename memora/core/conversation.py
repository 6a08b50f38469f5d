"""The records of a conversation and their arithmetic.

Owns what a message, a turn, a summary and a conversation are, and which ids and texts may become one. Must not know
how they are stored, sent or counted in tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from memora.errors import InvalidId, InvalidMessage

Role = Literal["user", "assistant"]

MESSAGES_PER_TURN: Final = 2
"""A turn is one user message and the reply to it; history has no other shape, so positions of turns are arithmetic."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the history.

    `tokens` counts the content alone, without the overhead a request adds; `at` is Redis time in milliseconds since
    the epoch, 0 before it is stored. `phase` is what the provider wants back with an assistant message, `incomplete`
    the reason why an answer was cut off. `vocabulary` is what `tokens` was counted with, None for the usual one.
    An `absent` message only keeps its place, where an imported history lacks the other half of a turn: it is never
    sent, shown or folded. `details` is what an entry point wants to find again with the message.
    """

    role: Role
    content: str
    tokens: int
    at: int = 0
    phase: str | None = None
    incomplete: str | None = None
    vocabulary: str | None = None
    absent: bool = False
    details: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The running text that stands for the first `summarized_message_count` messages; `version` counts commits."""

    text: str = ""
    summarized_message_count: int = 0
    version: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a conversation has cost so far, answers and folds apart."""

    answer_input_tokens: int = 0
    answer_output_tokens: int = 0
    fold_input_tokens: int = 0
    fold_output_tokens: int = 0

    @property
    def fold_tokens(self) -> int:
        """What keeping the summary has cost, also in folds that failed or lost their race."""
        return self.fold_input_tokens + self.fold_output_tokens

    @property
    def total_tokens(self) -> int:
        """Everything the conversation has cost."""
        return self.answer_input_tokens + self.answer_output_tokens + self.fold_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is stored of a conversation, as far as one turn or one fold needs it.

    `generation` is empty for a conversation that does not exist yet. `tail` is the newest part of
    `history[summarized_message_count:]`; its front may be missing when it could not fit into any context anyway.
    """

    id: str
    generation: str = ""
    message_count: int = 0
    summary: Summary = Summary()
    tail: tuple[Message, ...] = ()
    usage: Usage = Usage()

    @property
    def life(self) -> str:
        """Names the history, which stays when only the summary begins anew."""
        return self.generation.partition(".")[0]

    @property
    def exists(self) -> bool:
        """Whether a first turn has been stored."""
        return bool(self.generation)

    @property
    def unsummarized_messages(self) -> int:
        """How many messages the summary does not cover."""
        return self.message_count - self.summary.summarized_message_count


def pending_messages(message_count: int, summarized_message_count: int, window_messages: int) -> int:
    """Messages that have left the window and wait for a fold."""
    return max(0, message_count - window_messages - summarized_message_count)


def turns(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Cut messages, which start with a whole turn, into turns, oldest first."""
    return [tuple(messages[start : start + MESSAGES_PER_TURN]) for start in range(0, len(messages), MESSAGES_PER_TURN)]


def pair_up(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Make whole turns of any sequence of messages: absent ones fill the places where a half is missing."""
    paired: list[Message] = []
    for message in messages:
        expected: Role = "user" if len(paired) % MESSAGES_PER_TURN == 0 else "assistant"
        if message.role != expected:
            paired.append(absent_message(expected))
        paired.append(message)
    if len(paired) % MESSAGES_PER_TURN:
        paired.append(absent_message("assistant"))
    return tuple(paired)


def absent_message(role: Role) -> Message:
    """What stands where there is no message."""
    return Message(role, "", 0, absent=True)


def check_id(conversation_id: str) -> str:
    """Return the id as it is.

    Raises:
        InvalidId: it is not 1 to 128 letters, digits, `_` or `-`.
    """
    if not _ID.fullmatch(conversation_id):
        shown = conversation_id if len(conversation_id) <= 40 else conversation_id[:40] + "…"
        raise InvalidId(f"conversation id {shown!r} is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 _ -")
    return conversation_id


def check_text(text: str, max_chars: int) -> str:
    """Return a user's text exactly as it came.

    Raises:
        InvalidMessage: it is blank, longer than `max_chars`, or holds a lone surrogate, which no encoding can carry.
    """
    if len(text) > max_chars:
        raise InvalidMessage(
            f"the message has {len(text):,} characters; at most {max_chars:,} are allowed (MEMORA_MAX_MESSAGE_CHARS)"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            f"the message holds a broken character (a lone surrogate) at position {error.start}: send it again as UTF-8"
        ) from None
    if is_blank(text):
        raise InvalidMessage("the message is empty: write something first")
    return text


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: only spaces, controls and characters without width."""
    return all(unicodedata.category(character) in _UNSEEN or _FILLER.match(character) for character in text)


# Not `str.isprintable`: it also denies what is newer than Python's tables, the emoji of the last years for one.
_UNSEEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp", "Zs"))
_FILLER: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
