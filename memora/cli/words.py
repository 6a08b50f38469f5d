"""What a typed line means: something to say, one of our words, or nothing.

Owns the words and how to say one of them to the model. Pure.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Word(Enum):
    """The command words of the chat."""

    HISTORY = "history"
    CONTEXT = "context"
    SUMMARY = "summary"
    EXIT = "exit"
    HELP = "help"


@dataclass(frozen=True, slots=True)
class Message:
    """Something to say to the model, exactly as it was typed."""

    text: str


@dataclass(frozen=True, slots=True)
class UnknownWord:
    """A single `/word` that is none of ours, and the one it is closest to."""

    word: str
    guess: str | None


_BARE: Final = {word.value: word for word in Word if word is not Word.HELP}
"""`help` alone is a thing people say to a model; with a slash it is ours."""

_SLASHED: Final = {f"/{word.value}": word for word in Word}
_SLASH_WORD: Final = re.compile(r"/[^\W\d_][\w-]*")


def understand(line: str) -> Message | Word | UnknownWord:
    """Read one line. A space or a backslash in front makes a word an ordinary message; the backslash is not sent."""
    said = line.rstrip()
    if _is_word(said):
        return _BARE.get(said) or _SLASHED.get(said) or _unknown(said)
    return Message(line[1:] if said.startswith("\\") and _is_word(said[1:]) else line)


def _is_word(said: str) -> bool:
    return said in _BARE or _SLASH_WORD.fullmatch(said) is not None


def _unknown(said: str) -> UnknownWord:
    guesses = difflib.get_close_matches(said, _SLASHED, n=1)
    return UnknownWord(said, guesses[0] if guesses else None)
