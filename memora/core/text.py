"""What can be said of a text without understanding it: its words, its scripts, where its sentences end.

Owns cutting and measuring. Must not know about tokens, prompts or conversations.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Final

CJK: Final = (
    "\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_CJK_CHARACTER = re.compile(f"[{CJK}]")
_SPACED_WORD = re.compile(rf"[^\W{CJK}]+(?:['’-][^\W{CJK}]+)*")
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_SENTENCE_END = re.compile(r"[。！？!?；;…]+[」』”\"')）\]】]*|\.+[”\"')\]]*(?=\s|$)|\n+")

CJK_CHARACTERS_PER_WORD: Final = 2
"""Chinese words average near two characters, so a cap in words also means something for text without spaces."""


def count_words(text: str) -> int:
    """Words of a text: each spaced word is one, every two CJK characters are one."""
    characters = len(_CJK_CHARACTER.findall(text))
    return len(_SPACED_WORD.findall(text)) + -(-characters // CJK_CHARACTERS_PER_WORD)


def han_share(text: str) -> float:
    """Share of the letters that are Chinese characters, 0.0 to 1.0; 0.0 for a text without letters."""
    letters = sum(character.isalpha() for character in text)
    return len(_HAN.findall(text)) / letters if letters else 0.0


def sentence_ends(text: str) -> list[int]:
    """Positions right after each sentence, ascending; the end of the text is always the last."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    if not ends or ends[-1] != len(text):
        ends.append(len(text))
    return ends


def cut_to_fit(text: str, fits: Callable[[str], bool]) -> str:
    """The longest prefix that `fits`, cut after a sentence if one fits, else between characters; "" if none does.

    `fits` must be monotone: what holds for a text holds for its prefixes.
    """
    if fits(text):
        return text
    after_sentence = _longest_fitting(text, sentence_ends(text), fits)
    if after_sentence.strip():
        return after_sentence.rstrip()
    return _longest_fitting(text, character_ends(text), fits).rstrip()


def character_ends(text: str) -> list[int]:
    """Positions where a cut does not tear what is seen as one character (joined emoji, combining marks)."""
    ends = [
        position
        for position in range(1, len(text))
        if not _joins_left(text[position]) and text[position - 1] != "\u200d"
    ]
    return [*ends, len(text)]


def _joins_left(character: str) -> bool:
    return character == "\u200d" or unicodedata.category(character) in ("Mn", "Me", "Sk")


def _longest_fitting(text: str, ends: list[int], fits: Callable[[str], bool]) -> str:
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        if fits(text[: ends[middle]]):
            low = middle + 1
        else:
            high = middle
    return text[: ends[low - 1]] if low else ""
