"""A piece: one sealed sentence with its speaker and its day, and what it is worth by itself.

Must not know what else was said: the same sentence always weighs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from memora.offline_model.extractive.characters import comparable, han_of
from memora.offline_model.extractive.facts import (
    ASSISTANT_CUES,
    COSTS,
    GREETING,
    NAME_VALUE,
    NAME_WORTH,
    NAMES_COUNTED,
    QUESTION,
    USER_CUES,
    VALUE_CUES,
)
from memora.offline_model.extractive.terms import terms

WORTH_KEEPING: Final = 1.3
"""A sentence of the user needs one cue above the base worth, one of the assistant two."""

_USER_BASE: Final = 1.0
_GREETING_COST: Final = 1.5
_GREETING_CHARS: Final = 30  # a longer sentence that begins with a greeting says something else too
_TINY_COST: Final = 1.0
_TINY_WIDTH: Final = 10


@dataclass(frozen=True)
class Piece:
    """One sealed sentence. `is_kept` tells what was already in the summary from what is new; `day` may be empty."""

    text: str
    role: str
    day: str = ""
    is_kept: bool = False

    @cached_property
    def comparable(self) -> str:
        """The text as it is compared."""
        return comparable(self.text)

    @cached_property
    def terms(self) -> frozenset[str]:
        """What it is compared by."""
        return terms(self.comparable)

    @cached_property
    def worth(self) -> float:
        """What it is worth by itself, see `WORTH_KEEPING`."""
        return _gains(self.comparable, self.role) - _costs(self.comparable)

    @property
    def is_question(self) -> bool:
        """Whether it asks."""
        return QUESTION.is_in(self.comparable)


def without_repeats(pieces: Sequence[Piece]) -> list[Piece]:
    """Each sentence once, at the place where it was said last: what was said again holds again."""
    latest = {(piece.role, piece.text.casefold()): index for index, piece in enumerate(pieces)}
    return [pieces[index] for index in sorted(latest.values())]


def _gains(text: str, role: str) -> float:
    base, cues = (0.0, ASSISTANT_CUES) if role == "assistant" else (_USER_BASE, USER_CUES)
    gains = base + sum(value for value, cue in cues if cue.is_in(text))
    gains += sum(value for value, cue in VALUE_CUES if cue.is_in(text))
    return gains + NAME_WORTH * min(NAMES_COUNTED, len(NAME_VALUE.pattern.findall(text)))


def _costs(text: str) -> float:
    costs = sum(cost for cost, cue in COSTS if cue.is_in(text))
    if len(text) <= _GREETING_CHARS and GREETING.is_in(text):
        costs += _GREETING_COST
    if len(text) + len(han_of(text)) < _TINY_WIDTH:
        costs += _TINY_COST
    return costs
