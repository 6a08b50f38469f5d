"""Where sentences end, and how one is sealed so that it ends there wherever it is put.

Owns cutting a text into sentences and putting them together again. Must not know who speaks or what is said.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

from memora.offline_model.extractive.characters import UNPRINTABLE, has_han

_WIDE_STOPS: Final = frozenset("。！？；")
_STOPS: Final = "。！？；.!?;"
_CLOSERS: Final = "”’」』）)]\"'"
_SENTENCE_END = re.compile(rf"[{_STOPS}]+[{re.escape(_CLOSERS)}]*")
_TITLE_BEFORE_DOT = re.compile(r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|vs|no|e\.g|i\.e|[a-hj-z])$", re.IGNORECASE)
_ABBREVIATION_BEFORE_DOT = re.compile(r"(?:^|[\s\d(])(?:a\.m|p\.m|etc|inc|ltd|co|jr|sr)$", re.IGNORECASE)
_NUMBERING = re.compile(r"\s*\d{1,3}$")
_NUMBERING_CHARS: Final = 4
_LOOK_BACK_CHARS: Final = 6  # the longest abbreviation and what stands before it

# A longer sentence is cut at a comma or a space, so that one breathless message can be kept in part.
_MAX_SENTENCE_CHARS: Final = 240
_MAX_HAN_SENTENCE_CHARS: Final = 120
_SEAL_CHARS: Final = 8  # what sealing may add; a sealed part must not count as too long when it is read back
_CLAUSE_END = re.compile(r"[，,、:：]")
_JOINED_TO_THE_LEFT: Final = "\u200d\ufe0f"  # parts of an emoji
_SPEAKS = re.compile(r"[^\W_]")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, unsealed, blanks single, none much longer than the longest allowed."""
    for line in UNPRINTABLE.sub(" ", text).splitlines():
        start = 0
        for stop in _SENTENCE_END.finditer(line):
            if _ends_sentence(line, start, stop):
                yield from _bounded(line[start : stop.end()])
                start = stop.end()
        yield from _bounded(line[start:])


def sealed(sentence: str) -> str:
    """A sentence with single blanks, closed by a stop that stays one whatever follows; empty if it says nothing."""
    sentence = sentence.lstrip().rstrip(" ,，、:：-")
    if not _SPEAKS.search(sentence):
        return ""
    stops = list(_SENTENCE_END.finditer(sentence, max(0, len(sentence) - _SEAL_CHARS)))
    stop = stops[-1] if stops else None
    if stop is None or stop.end() != len(sentence):
        return sentence + ("。" if has_han(sentence) else ".")
    return sentence + ";" if _is_soft(sentence, stop) else sentence


def joined(text: str, addition: str) -> str:
    """Both in one line: Chinese sentences follow each other without a blank, unless they would become one."""
    if not text or not addition:
        return text + addition
    is_tight = text[-1] in _WIDE_STOPS and addition[0] not in _CLOSERS + _STOPS
    return text + ("" if is_tight else " ") + addition


def _ends_sentence(line: str, start: int, stop: re.Match[str]) -> bool:
    mark = stop.group()
    if not _WIDE_STOPS.isdisjoint(mark):
        return True
    after = line[stop.end() : stop.end() + 2]
    if after and not after[0].isspace():
        return mark[0] in "!?" and has_han(after[0])
    if mark != ".":
        return True
    before = _before(line, start, stop)
    if _is_title_or_number(before, stop.start() - start):
        return False
    return not (after[1:].islower() and _ABBREVIATION_BEFORE_DOT.search(before))


def _is_soft(sentence: str, stop: re.Match[str]) -> bool:
    """Whether the stop might be read as a part of a longer sentence once another follows."""
    if stop.group() != ".":
        return False
    before = _before(sentence, 0, stop)
    return _is_title_or_number(before, stop.start()) or _ABBREVIATION_BEFORE_DOT.search(before) is not None


def _before(line: str, start: int, stop: re.Match[str]) -> str:
    return line[max(start, stop.start() - _LOOK_BACK_CHARS) : stop.start()]


def _is_title_or_number(before: str, length: int) -> bool:
    """Whether a dot after this, `length` characters into a sentence, belongs to a title ("Dr.") or a list ("1.")."""
    if _TITLE_BEFORE_DOT.search(before):
        return True
    return length <= _NUMBERING_CHARS and _NUMBERING.match(before) is not None


def _bounded(sentence: str) -> Iterator[str]:
    sentence = " ".join(sentence.split())
    limit = _MAX_HAN_SENTENCE_CHARS if has_han(sentence) else _MAX_SENTENCE_CHARS
    start = 0
    while len(sentence) - start > limit + _SEAL_CHARS:
        end = start + _cut_at(sentence[start : start + limit])
        yield sentence[start:end]
        start = end
    yield sentence[start:]


def _cut_at(part: str) -> int:
    half = len(part) // 2
    clause_ends = [match.end() for match in _CLAUSE_END.finditer(part, half)]
    if clause_ends:
        return clause_ends[-1]
    space = part.rfind(" ", half)
    if space > 0:
        return space
    end = len(part)
    while end > half and (unicodedata.combining(part[end - 1]) or part[end - 1] in _JOINED_TO_THE_LEFT):
        end -= 1
    return end
