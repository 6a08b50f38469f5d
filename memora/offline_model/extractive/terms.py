"""Terms: what two sentences are compared by. Word stems, and pairs of neighbouring Chinese characters.

Owns which words carry nothing. Expects comparable text (see `characters`); must not know what a sentence is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from memora.offline_model.extractive.characters import HAN_OR_KANA, han_of, has_han
from memora.offline_model.extractive.cues import Cue

_STOP_WORDS_TEXT: Final = (
    "a an the and or but if so to of in on at for with from by as is are was were be been being am i i'm i've i'll i'd "
    "you you're your yours me my mine we it it's its this that these those do does did have has had will would can "
    "could should not no yes ok okay thanks thank please just also really very what what's which who whom whose when "
    "where how why there here he she they him his her hers their them our us about any some than then too up out into "
    "tell told remember mentioned mention said say talked talk earlier before ago previously again know don't didn't "
    "user assistant"
)
_STOP_WORDS: Final = frozenset(_STOP_WORDS_TEXT.split())
_FUNCTION_HAN: Final = frozenset(
    "的了是我你您妳他她它们吗呢啊吧也都很就和与在不这那个么什会着过把被让给对呀哦啦嗯哪谁几"
)
_ASKING_HAN = Cue(
    "什么时候|什么|甚么|怎么样|怎么|为什么|哪里|哪些|哪个|哪|谁|多少|是不是|有没有|还记得|记不记得|记得|曾经|之前|以前|刚才|告诉|"
    "提到|提过|说过|讲过|聊过|请问|知道|可以|觉得",
    is_case_sensitive=True,
)
_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
_WORD_OR_HAN_RUN = Cue(rf"[{HAN_OR_KANA}]+|[^\W_{HAN_OR_KANA}]+(?:['-][^\W_{HAN_OR_KANA}]+)*", is_case_sensitive=True)
_SUFFIXES: Final = ("ings", "ing", "ied", "ies", "ed", "es", "s", "e", "y")  # the longer ones first
_SHORTEST_STEM_CHARS: Final = 3


def terms(comparable: str) -> frozenset[str]:
    """Word stems and pairs of neighbouring Han characters, without the words that carry nothing."""
    found: set[str] = set()
    for run in _runs(comparable.casefold()):
        if has_han(run[0]):
            found.update(_han_pairs(run))
        elif run not in _STOP_WORDS and (len(run) > 1 or run.isdigit()):
            found.add(_stem(run))
    return frozenset(found)


def single_han(comparable: str) -> Iterator[str]:
    """Each Han character that carries something: a question may share no more than one with its answer."""
    return (char for char in han_of(_without_asking(comparable)) if char not in _FUNCTION_HAN)


def _runs(text: str) -> list[str]:
    """Words and rows of Chinese characters."""
    return _WORD.findall(text) if text.isascii() else _WORD_OR_HAN_RUN.pattern.findall(_without_asking(text))


def _without_asking(text: str) -> str:
    return text if text.isascii() else _ASKING_HAN.pattern.sub(" ", text)


def _stem(word: str) -> str:
    word = word.removesuffix("'s")
    if word.endswith(_SUFFIXES):
        for suffix in _SUFFIXES:
            if word.endswith(suffix) and len(word) - len(suffix) >= _SHORTEST_STEM_CHARS:
                word = word[: -len(suffix)]
                break
    return word[:-1] if len(word) > _SHORTEST_STEM_CHARS and word[-1] == word[-2] else word


def _han_pairs(run: str) -> Iterator[str]:
    for first, second in pairwise(run):
        if first not in _FUNCTION_HAN and second not in _FUNCTION_HAN:
            yield first + second
    if len(run) == 1 and run not in _FUNCTION_HAN:
        yield run
