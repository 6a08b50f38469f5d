"""What room a summary has, and how sentences are taken into it.

Owns the two caps and what counts as a repetition. Must not rank: it takes what it is given in the order it is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from memora.offline_model.extractive.facts import DATE_VALUE, NAME_VALUE, TITLE_VALUE
from memora.offline_model.extractive.notation import day_mark, write_piece
from memora.offline_model.extractive.pieces import Piece

_REPEATS_SHARE: Final = 0.6  # of the terms of the shorter of two sentences
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Caps:
    """The most words and tokens a summary may have, and how they are counted."""

    max_words: int
    max_tokens: int
    count_words: Callable[[str], int]
    count_tokens: Callable[[str], int]

    def allow(self, text: str) -> bool:
        """Whether the text is within both caps."""
        return self.count_words(text) <= self.max_words and self.count_tokens(text) <= self.max_tokens


class Filling:
    """Sentences taken one after the other into what room there is; `chosen` has their places in the order of taking."""

    def __init__(self, pieces: Sequence[Piece], day: str, caps: Caps) -> None:
        self.chosen: dict[int, frozenset[str]] = {}
        self._pieces = pieces
        self._caps = caps
        mark = day_mark(day)
        self._days = {day}
        self._tokens = caps.max_tokens - caps.count_tokens(mark)
        self._words = caps.max_words - caps.count_words(mark)

    def add(self, group: Sequence[int]) -> None:
        """Take all of a group (what revises a sentence, and the sentence last) as far as not taken yet, or none."""
        group = [index for index in group if index not in self.chosen]
        if not group or self._repeats(self._pieces[group[-1]]):
            return
        days = {self._pieces[index].day for index in group} - self._days
        text = "".join(day_mark(day) for day in sorted(days))
        text += " ".join(write_piece(self._pieces[index]) for index in group) + " "
        tokens, words = self._caps.count_tokens(text), self._caps.count_words(text)
        if tokens > self._tokens or words > self._words:
            return
        self._tokens -= tokens
        self._words -= words
        self._days |= days
        self.chosen.update({index: _specifics(self._pieces[index].comparable) for index in group})

    def _repeats(self, piece: Piece) -> bool:
        alike = [said for other, said in self.chosen.items() if _is_alike(piece, self._pieces[other])]
        if not alike:
            return False
        specifics = _specifics(piece.comparable)
        return any(specifics <= said for said in alike)


def _is_alike(piece: Piece, other: Piece) -> bool:
    shared = len(piece.terms & other.terms)
    return shared > _REPEATS_SHARE * max(1, min(len(piece.terms), len(other.terms)))


def _specifics(comparable: str) -> frozenset[str]:
    """The numbers, names and days in a sentence: one that has others is no repetition."""
    return frozenset(
        match.group().casefold()
        for pattern in (_NUMBERS, NAME_VALUE.pattern, DATE_VALUE.pattern, TITLE_VALUE.pattern)
        for match in pattern.finditer(comparable)
    )
