"""Which sentence corrects which: the newer of two that settle the same thing.

Must not drop anything: it says what is revised and what is superseded, others decide what to show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from memora.offline_model.extractive.cues import Cue
from memora.offline_model.extractive.facts import (
    CALL_ME,
    CALLED_VALUE,
    CORRECTION,
    DATE_VALUE,
    MY_NAME_IS_HAN,
    NAME_VALUE,
    NUMBER_VALUE,
    TITLE_VALUE,
)
from memora.offline_model.extractive.pieces import Piece
from memora.offline_model.extractive.terms import terms

# What one has only one of, and by which words a sentence is known to say it.
_SLOTS: Final = (
    ("name", Cue(rf"\bmy name is\b|{CALL_ME}", f"我的名字|{MY_NAME_IS_HAN}|叫我")),
    ("home", Cue(r"\bi(?: now)? live in\b", "我(?:现在)?住")),
    ("birthday", Cue(r"\bmy birthday\b", "我的?生日")),
    ("age", Cue(r"\byears old\b", r"\d ?岁")),
)
_OWN_THING = Cue(r"\bmy ((?:\w+ ){0,2}\w+) (?:is|are|was|has)\b", r"我(?:最喜欢)?的(\w{1,6}?)(?:是|叫|在)")
_KINDS: Final = (
    ("day", DATE_VALUE),
    ("number", NUMBER_VALUE),
    ("title", TITLE_VALUE),
    ("name", CALLED_VALUE),
    ("name", NAME_VALUE),
)
_LATEST_PER_TERM: Final = 8  # what a correction may mean is recent, and a word said everywhere must not cost more


class Corrections:
    """Which piece revises which, by their places: `revised_by[older] = newer`.

    A `superseded` piece says nothing that the one revising it does not say.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.revised_by: dict[int, int] = {}
        self.superseded: set[int] = set()
        self._pieces = pieces
        self._by_term: dict[str, list[int]] = {}
        self._by_slot: dict[str, int] = {}
        self._by_kind: dict[str, int] = {}
        for index, piece in enumerate(pieces):
            if piece.role == "user" and not piece.is_question:
                self._see(index, piece)

    def chain(self, index: int) -> list[int]:
        """The piece after the ones that revise it, newest first."""
        chain = [index]
        while (newer := self.revised_by.get(chain[-1])) is not None:
            chain.append(newer)
        return chain[::-1]

    def _see(self, index: int, piece: Piece) -> None:
        slot = _slot(piece.comparable)
        kinds = _kinds(piece.comparable)
        is_correction = CORRECTION.is_in(piece.comparable)
        older = self._by_slot.get(slot)
        if older is None and is_correction:
            older = self._corrected_by(piece, kinds)
        if older is not None:
            self.revised_by[older] = index
            if _says_it_all(piece, self._pieces[older], is_correction=is_correction):
                self.superseded.add(older)
        self._remember(index, piece, slot, kinds)

    def _remember(self, index: int, piece: Piece, slot: str, kinds: frozenset[str]) -> None:
        self._by_kind.update(dict.fromkeys(kinds, index))
        if slot:
            self._by_slot[slot] = index
        for term in piece.terms:
            self._by_term.setdefault(term, []).append(index)

    def _corrected_by(self, piece: Piece, kinds: frozenset[str]) -> int | None:
        shared = Counter(older for term in piece.terms for older in self._by_term.get(term, ())[-_LATEST_PER_TERM:])
        alike = [older for older in shared if shared[older] > 1 or kinds & _kinds(self._pieces[older].comparable)]
        if alike:
            return max(alike, key=lambda older: (shared[older], older))
        return max((self._by_kind[kind] for kind in kinds if kind in self._by_kind), default=None)


def _slot(comparable: str) -> str:
    """What a sentence settles, where a later sentence of the same slot would settle it anew; may be empty."""
    for slot, cue in _SLOTS:
        if cue.is_in(comparable):
            return slot
    own = _OWN_THING.pattern.search(comparable)
    return (own.group(1) or own.group(2)).casefold() if own else ""


def _kinds(comparable: str) -> frozenset[str]:
    return frozenset(kind for kind, cue in _KINDS if cue.is_in(comparable))


def _says_it_all(newer: Piece, older: Piece, *, is_correction: bool) -> bool:
    if not is_correction:
        return older.terms <= newer.terms
    topic = _topic(older.comparable)
    return bool(topic) and topic <= _topic(newer.comparable)


def _topic(comparable: str) -> frozenset[str]:
    """The terms of a sentence without its values: what it is about, not what it says of it."""
    for cue in (CORRECTION, *(cue for _, cue in _KINDS)):
        comparable = cue.pattern.sub(" ", comparable)
    return terms(comparable)
