"""Answering: a reply that quotes what was said, or says that there is nothing to quote.

Must not invent anything; what it finds is `matching`'s matter, and how it is worded that of `phrases`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from memora.offline_model.extractive.characters import has_han
from memora.offline_model.extractive.cues import Cue
from memora.offline_model.extractive.matching import Context
from memora.offline_model.extractive.messages import read_messages
from memora.offline_model.extractive.phrases import CHINESE, ENGLISH, Phrases
from memora.offline_model.extractive.pieces import WORTH_KEEPING, Piece
from memora.offline_model.extractive.questions import OVERVIEW, REQUEST, asks, gist
from memora.offline_model.extractive.utterances import Utterance

# In the order of `Phrases.small_talk`.
_SMALL_TALK_OPENINGS: Final = (
    Cue(r"^(?:hi|hello|hey|good (?:morning|evening))\b", "^(?:[你您]好|嗨|哈喽|早安)"),
    Cue("^thank", "^[谢多]谢"),
)


def answer(summary: str, messages: Sequence[Utterance], question: str) -> str:
    """A reply from what is in the summary and the messages (oldest first), and from nothing else.

    Chinese for a question with any Han character, else English. Begins with one of `OWN_MARKS`.
    """
    phrases = CHINESE if has_han(question) else ENGLISH
    wanted = gist(question)
    if OVERVIEW.is_in(wanted):
        return _quotation(Context(summary, messages, question).best_facts(), phrases) or phrases.nothing_yet
    if REQUEST.is_in(wanted):
        return phrases.cannot_do
    if asks(wanted):
        matches = Context(summary, messages, question).best_matches(wanted)
        return _quotation(matches, phrases) or phrases.nothing_found
    return _acknowledgement(question, wanted, phrases)


def _quotation(pieces: Sequence[Piece], phrases: Phrases) -> str:
    """The sentences quoted, those of the summary first and named as such; empty without sentences."""
    kept = _attributed([piece for piece in pieces if piece.is_kept], phrases)
    spoken = _attributed([piece for piece in pieces if not piece.is_kept], phrases)
    parts = [part for part in (kept and phrases.from_summary + kept, spoken) if part]
    return phrases.between.join([phrases.mark, *parts]) if parts else ""


def _attributed(pieces: Sequence[Piece], phrases: Phrases) -> str:
    quotes: list[str] = []
    shown: tuple[str, str] | None = None
    for piece in pieces:
        said = (phrases.said_on if piece.day else phrases.said)[piece.role].format(day=piece.day)
        quotes.append(("" if shown == (piece.role, piece.day) else said) + phrases.quote(piece.text))
        shown = (piece.role, piece.day)
    return phrases.between.join(quotes)


def _acknowledgement(statement: str, wanted: str, phrases: Phrases) -> str:
    pieces, _ = read_messages([Utterance("user", statement)], "")
    fact = max(pieces, key=lambda piece: piece.worth, default=None)
    if fact is None or fact.worth < WORTH_KEEPING:
        return _small_talk(wanted, phrases)
    # The checksum varies the wording and still gives the same reply to the same message.
    noted = phrases.noted[zlib.crc32(fact.text.encode()) % len(phrases.noted)]
    return f"{phrases.mark}{phrases.between}{noted}{phrases.quote(fact.text)}"


def _small_talk(wanted: str, phrases: Phrases) -> str:
    for cue, reply in zip(_SMALL_TALK_OPENINGS, phrases.small_talk, strict=True):
        if cue.is_in(wanted):
            return reply
    return phrases.listening
