"""What can be said of a text without understanding it: its words, its scripts, where its sentences end.

Owns cutting and measuring. Must not know about tokens, prompts or conversations.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final

CJK: Final = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f"
    "\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Scripts written without spaces between words: Han, kana, bopomofo. Korean spaces its words, so Hangul is not here."""

_CJK_CHARACTER = re.compile(f"[{CJK}]")
_SPACED_WORD = re.compile(rf"[^\W{CJK}]+(?:['’-][^\W{CJK}]+)*")
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
# The look-behind keeps a long row of dots, which ends nothing, from being tried again at each of its dots.
_SENTENCE_END = re.compile(r"[。！？!?；;…]+[」』”\"')）\]】]*|(?<!\.)\.++[”\"')\]]*+(?=\s|$)|\n+")

CJK_CHARACTERS_PER_WORD: Final = 2
"""Chinese words average near two characters, so a cap in words also means something for text without spaces."""


def count_words(text: str) -> int:
    """Words of a text: each spaced word is one, every two CJK characters are one; marks and punctuation are none."""
    if not text.isascii():
        text = "".join(character for character in text if not unicodedata.category(character).startswith("M"))
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


def character_ends(text: str) -> list[int]:
    """Positions where a cut does not tear what is seen as one character (joined emoji, flags, combining marks)."""
    ends: list[int] = []
    flag_halves = 0
    for position in range(1, len(text)):
        before, after = text[position - 1], text[position]
        flag_halves = flag_halves + 1 if _is_flag_half(before) else 0
        completes_flag = flag_halves % 2 == 1 and _is_flag_half(after)
        if not (completes_flag or before == _JOINER or _joins_left(after) or (before == "\r" and after == "\n")):
            ends.append(position)
    return [*ends, len(text)]


def cut_to_fit(text: str, fits: Callable[[str], bool]) -> str:
    """The longest beginning that `fits`, without blanks at its end; the whole text as it is if that fits.

    It ends after a sentence if a sentence fits, else between characters, in the last resort (a character longer than
    all the room) inside one; "" if nothing fits. `fits` must be monotone: what holds for a text holds for its prefixes.
    """
    if fits(text):
        return text
    for ends in _ways_to_cut(text):
        head = text[: _last_fitting(text, 0, ends, lambda part: fits(part.rstrip()))].rstrip()
        if head:
            return head
    return ""


def split_to_fit(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Parts that each `fit` and join to exactly the text, each as long as it can be and cut as `cut_to_fit` cuts.

    A single code point that does not fit is a part nevertheless: nothing is left out.
    """
    ways = tuple(_ways_to_cut(text))
    parts: list[str] = []
    start = 0
    while start < len(text):
        cuts = (_last_fitting(text, start, ends, fits) for ends in ways)
        end = next((cut for cut in cuts if cut > start), start + 1)
        parts.append(text[start:end])
        start = end
    return parts


_JOINER: Final = "\u200d"


def _is_flag_half(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _joins_left(character: str) -> bool:
    """Whether a character continues the one before: joiner, mark, skin tone, tag, jamo, second surrogate."""
    if character < "\u0300":
        return False
    return (
        character == _JOINER
        or unicodedata.category(character) in ("Mn", "Me", "Mc")
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e007f"
        or "\u1160" <= character <= "\u11ff"
        or "\udc00" <= character <= "\udfff"
    )


def _ways_to_cut(text: str) -> Iterator[Sequence[int]]:
    """Where a text may be cut, the best way first."""
    yield sentence_ends(text)
    yield character_ends(text)
    yield range(1, len(text) + 1)


def _last_fitting(text: str, start: int, ends: Sequence[int], fits: Callable[[str], bool]) -> int:
    """The last of `ends` up to which the text from `start` on fits; `start` if there is none.

    It looks ahead in growing steps, so that the work depends on the length of the part, not of the text.
    """
    low = high = bisect_right(ends, start)
    step = 1
    while high < len(ends) and fits(text[start : ends[high]]):
        low = high + 1
        high += step
        step *= 2
    high = min(high, len(ends))
    while low < high:
        middle = (low + high) // 2
        if fits(text[start : ends[middle]]):
            low = middle + 1
        else:
            high = middle
    return ends[low - 1] if low and ends[low - 1] > start else start
