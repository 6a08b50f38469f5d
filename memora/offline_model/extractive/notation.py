"""How a summary is written down, and read back as exactly the sentences that were written.

A row of sealed sentences, oldest first, each verbatim, in one line. `[2023-05-01]` stands before the first sentence of
a day, and a sentence of the assistant is marked as such; an unmarked one is the user's. Must not choose what is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from memora.offline_model.extractive.characters import has_han
from memora.offline_model.extractive.pieces import Piece
from memora.offline_model.extractive.sentences import joined, sealed, sentences
from memora.offline_model.extractive.utterances import is_own_reply

_DAY = re.compile(r"\[(\d{4}-\d{2}-\d{2})\]\s*")
_ASSISTANT_LABELS: Final = ("Assistant: ", "助理：")
_USER_LABELS: Final = ("User: ", "使用者：")
_LABEL = re.compile("|".join([*_ASSISTANT_LABELS, *_USER_LABELS]))


def read_summary(summary: str) -> tuple[list[Piece], str]:
    """The sentences of a summary, and the day that its end belongs to."""
    pieces: list[Piece] = []
    day = ""
    for marked in sentences(summary):
        sentence, day = split_day(marked, day)
        label = _LABEL.match(sentence)
        text = sealed(sentence[label.end() :] if label else sentence)
        role = "assistant" if label and label.group() in _ASSISTANT_LABELS else "user"
        if text and not (role == "assistant" and is_own_reply(text)):
            pieces.append(Piece(text, role, day, is_kept=True))
    return pieces, day


def write_summary(pieces: Iterable[Piece], day: str) -> str:
    """The pieces in their order, each new day marked, and the last day even if nothing of it is kept."""
    text, shown = "", ""
    for piece in pieces:
        mark = day_mark(piece.day) if piece.day != shown else ""
        shown = piece.day or shown
        text = joined(text, mark + write_piece(piece))
    return text if day == shown else joined(text, day_mark(day).rstrip())


def write_piece(piece: Piece) -> str:
    """One piece without its day. The user's is labelled only where it could be taken for labelled itself."""
    if piece.role == "assistant":
        return _ASSISTANT_LABELS[has_han(piece.text)] + piece.text
    return _USER_LABELS[has_han(piece.text)] + piece.text if _LABEL.match(piece.text) else piece.text


def day_mark(day: str) -> str:
    """What stands before the first sentence of a day; nothing for none."""
    return f"[{day}] " if day else ""


def split_day(sentence: str, day: str) -> tuple[str, str]:
    """A sentence without the day marks before it, and the day they set; `day` if there are none."""
    sentence = sentence.lstrip()
    while mark := _DAY.match(sentence):
        sentence, day = sentence[mark.end() :], mark.group(1)
    return sentence, day
