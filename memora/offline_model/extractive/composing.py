"""Composing a summary: which sentences stay, within the caps.

Owns the ranking of sentences against each other. Must not change a sentence, and never keeps a corrected one without
its correction.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from memora.offline_model.extractive.characters import UNPRINTABLE, han_of
from memora.offline_model.extractive.corrections import Corrections
from memora.offline_model.extractive.facts import GREETING
from memora.offline_model.extractive.filling import Caps, Filling
from memora.offline_model.extractive.messages import read_messages
from memora.offline_model.extractive.notation import read_summary, write_summary
from memora.offline_model.extractive.pieces import WORTH_KEEPING, Piece, without_repeats
from memora.offline_model.extractive.utterances import Utterance

_NOVELTY_SHARE: Final = 0.35  # how much rare terms count beside the cues
_LENGTH_DAMPING: Final = 0.5  # how much a long sentence has to be better to win over a short one
_MOST_CONSIDERED: Final = 400


def summarise(
    existing_summary: str,
    messages: Sequence[Utterance],
    *,
    max_words: int,
    max_tokens: int,
    count_tokens: Callable[[str], int],
    count_words: Callable[[str], int],
) -> str:
    """The existing summary with what is worth keeping of the messages (oldest first), one line, within both caps.

    Messages that say nothing leave the summary as it is. A first summary keeps what the user opened with if there is
    nothing better; it is empty where that was a greeting.
    """
    caps = Caps(max_words, max_tokens, count_words, count_tokens)
    kept, known_day = read_summary(existing_summary)
    fresh, day = read_messages(messages, known_day)
    said = without_repeats(fresh)
    fresh = [piece for piece in said if piece.worth >= WORTH_KEEPING] or ([] if kept else _opening(said))
    if not fresh and day == known_day:
        return _unchanged(existing_summary, kept, day, caps)
    return _compose([*kept, *fresh], day, caps)


def shorten(
    summary: str,
    *,
    max_words: int,
    max_tokens: int,
    count_tokens: Callable[[str], int],
    count_words: Callable[[str], int],
) -> str:
    """The best of a summary's sentences within both caps; unchanged where it already fits."""
    kept, day = read_summary(summary)
    return _unchanged(summary, kept, day, Caps(max_words, max_tokens, count_words, count_tokens))


def _opening(pieces: Sequence[Piece]) -> list[Piece]:
    """The best of what the user said, greetings aside, however little it is worth."""
    said = [piece for piece in pieces if piece.role == "user" and not GREETING.is_in(piece.comparable)]
    return [max(said, key=lambda piece: piece.worth)] if said else []


def _unchanged(summary: str, kept: Sequence[Piece], day: str, caps: Caps) -> str:
    is_one_line = len(summary.splitlines()) <= 1 and not UNPRINTABLE.search(summary)
    text = summary if is_one_line else write_summary(kept, day)
    return text if caps.allow(text) else _compose(kept, day, caps)


def _compose(pieces: Sequence[Piece], day: str, caps: Caps) -> str:
    pieces = _most_promising(without_repeats(pieces))
    text = _filled(pieces, day, caps)
    if not text and day:  # no room for days
        text = _filled([replace(piece, day="") for piece in pieces], "", caps)
    return text


def _most_promising(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """As many as are worth a closer look, so that one huge message costs no more than reading it."""
    if len(pieces) <= _MOST_CONSIDERED:
        return pieces
    values = _values(pieces)
    best = heapq.nlargest(_MOST_CONSIDERED, range(len(pieces)), key=lambda index: (values[index], index))
    return [pieces[index] for index in sorted(best)]


def _filled(pieces: Sequence[Piece], day: str, caps: Caps) -> str:
    corrections = Corrections(pieces)
    filling = Filling(pieces, day, caps)
    for index in _ranked(pieces, corrections):
        filling.add(corrections.chain(index))
    chosen = list(filling.chosen)
    while chosen:  # put together they may count a little more than one by one
        text = write_summary([pieces[index] for index in sorted(chosen)], day)
        if caps.allow(text):
            return text
        chosen.pop()
    return ""


def _ranked(pieces: Sequence[Piece], corrections: Corrections) -> list[int]:
    """The sentences from the most to the least worth keeping; of equals, the newer first."""
    values = _values(pieces)
    for older in sorted(corrections.revised_by, reverse=True):
        values[older] = max(values[older], values[corrections.revised_by[older]])
    candidates = [index for index in range(len(pieces)) if index not in corrections.superseded]
    return sorted(candidates, key=lambda index: (values[index], index), reverse=True)


def _values(pieces: Sequence[Piece]) -> list[float]:
    """What each sentence is worth among these: its own worth, how new it is, and how much room it takes."""
    frequency = Counter(term for piece in pieces for term in piece.terms)
    rarity = {term: math.log(1 + len(pieces) / count) for term, count in frequency.items()}
    return [_value(piece, rarity) for piece in pieces]


def _value(piece: Piece, rarity: Mapping[str, float]) -> float:
    # Sorted, because a sum of floats depends on the order and the order of a set on the process.
    novelty = sum(rarity[term] for term in sorted(piece.terms)) / math.sqrt(len(piece.terms) + 3)
    value = piece.worth + _NOVELTY_SHARE * novelty
    return value / _width(piece.text) ** _LENGTH_DAMPING if value > 0 else value


def _width(text: str) -> int:
    """About how many letters it takes: a Chinese character says as much as three."""
    return len(text) + 2 * len(han_of(text)) + 10
