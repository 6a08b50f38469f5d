"""Which sentences answer a question.

Owns how evidence is measured and how much of it is enough. Must not word anything.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Final

from memora.offline_model.extractive.characters import has_han
from memora.offline_model.extractive.concepts import SUBJECTS, search_terms
from memora.offline_model.extractive.corrections import Corrections
from memora.offline_model.extractive.cues import Cue
from memora.offline_model.extractive.messages import read_messages
from memora.offline_model.extractive.notation import read_summary
from memora.offline_model.extractive.pieces import WORTH_KEEPING, Piece, without_repeats
from memora.offline_model.extractive.questions import ABOUT_MEMORY, wanted_speaker, wanted_values
from memora.offline_model.extractive.utterances import Utterance

_NEIGHBOUR_SHARE: Final = 0.5
_TYPE_EVIDENCE: Final = 0.4
_SPEAKER_EVIDENCE: Final = {"user": 0.4, "assistant": 0.8}  # if one asks for the assistant's words, they are meant
_WORTH_EVIDENCE: Final = 0.05
_MOST_WORTH: Final = 4.0
_NEWER_EVIDENCE: Final = 0.01
_ENOUGH_EVIDENCE: Final = 0.28
_ENOUGH_EVIDENCE_ELSE: Final = 0.5  # a question about the world is only answered if most of it was spoken of
_CLOSE_TO_BEST: Final = 0.6
_MOST_QUOTED: Final = 3
_MOST_LISTED: Final = 5
_SINGLE_HAN_SHARE: Final = 0.35
_MARKED_SHARES: Final = {"#": 0.6, "@": 2.0}  # an everyday concept says less than a word, a calendar day more


class Context:
    """The sentences that may be quoted, oldest first: no questions, nothing the offline model said itself."""

    def __init__(self, summary: str, messages: Sequence[Utterance], question: str) -> None:
        kept, day = read_summary(summary)
        spoken, _ = read_messages(messages, day)
        asked = {piece.text for piece in read_messages([Utterance("user", question)], "")[0]}
        pieces = without_repeats([*kept, *spoken])
        self.pieces = [piece for piece in pieces if not piece.is_question and piece.text not in asked]

    def best_matches(self, question: str) -> list[Piece]:
        """The sentences that answer the question best, with what corrects them, oldest first; empty if none does."""
        enough = _ENOUGH_EVIDENCE if ABOUT_MEMORY.is_in(question) else _ENOUGH_EVIDENCE_ELSE
        evidence = _smoothed(_evidence(self.pieces, question), self.pieces, enough)
        order = heapq.nlargest(_MOST_QUOTED, range(len(evidence)), key=lambda index: (evidence[index], index))
        if not order or evidence[order[0]] < enough:
            return []
        close = [index for index in order if evidence[index] >= max(enough, _CLOSE_TO_BEST * evidence[order[0]])]
        return self._pieces_at(self._with_corrections(close) - self._corrections.superseded)

    def best_facts(self) -> list[Piece]:
        """The facts about the user most worth keeping, with what corrects them, oldest first."""
        facts = [
            index
            for index, piece in enumerate(self.pieces)
            if piece.role == "user" and index not in self._corrections.superseded and piece.worth >= WORTH_KEEPING
        ]
        best = heapq.nlargest(_MOST_LISTED, facts, key=lambda index: (self.pieces[index].worth, index))
        return self._pieces_at(self._with_corrections(best))

    @cached_property
    def _corrections(self) -> Corrections:
        return Corrections(self.pieces)

    def _with_corrections(self, indices: Sequence[int]) -> set[int]:
        return {member for index in indices for member in self._corrections.chain(index)}

    def _pieces_at(self, indices: set[int]) -> list[Piece]:
        return [self.pieces[index] for index in sorted(indices)]


def _evidence(pieces: Sequence[Piece], question: str) -> list[float]:
    """How much of the question each sentence speaks of, 0 to 1, and a little for being of the kind asked for."""
    asked = search_terms(question, "")
    spoken = [search_terms(piece.comparable, piece.day) & asked for piece in pieces]
    frequency = Counter(term for terms in spoken for term in terms)
    # Sorted here and below, because a sum of floats depends on the order and the order of a set on the process.
    weights = {term: _share(term) * math.log(1 + len(pieces) / (frequency[term] + 0.5)) for term in sorted(asked)}
    whole = sum(weights.values())
    subjects = asked & SUBJECTS
    if not whole or (subjects and not any(frequency[subject] for subject in subjects)):
        return [0.0] * len(pieces)
    shares = [sum(weights[term] for term in sorted(terms)) / whole for terms in spoken]
    values, speaker = wanted_values(question), wanted_speaker(question)
    return [
        share and share * _fitness(piece, values, speaker) + _NEWER_EVIDENCE * (place / len(pieces))
        for place, (piece, share) in enumerate(zip(pieces, shares, strict=True))
    ]


def _share(term: str) -> float:
    if term[0] in _MARKED_SHARES:
        return _MARKED_SHARES[term[0]]
    return _SINGLE_HAN_SHARE if len(term) == 1 and has_han(term) else 1.0


def _fitness(piece: Piece, values: Sequence[Cue], speaker: str) -> float:
    fitness = 1 + _WORTH_EVIDENCE * min(_MOST_WORTH, piece.worth)
    if any(value.is_in(piece.comparable) for value in values):
        fitness += _TYPE_EVIDENCE
    return fitness + (_SPEAKER_EVIDENCE[speaker] if piece.role == speaker else 0.0)


def _smoothed(evidence: Sequence[float], pieces: Sequence[Piece], enough: float) -> list[float]:
    """Sentences lend some evidence to their neighbours: what one names the next one tells of.

    Those worth nothing borrow none. What a sentence is worth takes long to tell, so it is asked only of those that
    could have enough.
    """
    padded = [0.0, *evidence, 0.0]
    raised = [
        own + _NEIGHBOUR_SHARE * max(before, after)
        for before, own, after in zip(padded, padded[1:], padded[2:], strict=False)
    ]
    return [
        high if high >= enough and piece.worth > 0 else own
        for own, high, piece in zip(evidence, raised, pieces, strict=True)
    ]
