"""What a load test does: when each turn is due, in which conversation, and what it says.

Owns the schedule, which is open: a turn is due when the plan says so, whether the one before has been answered or not.
Pure; the same seed gives the same plan, and a conversation's part of it does not depend on the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from typing import Final

from memora.errors import CallerError
from memora.offline_model.markers import Marker

USUAL_CONVERSATIONS: Final = 50
USUAL_THINK_SECONDS: Final = 10.0
"""To read a short answer and to write the next short message."""

MOST_CONVERSATIONS: Final = 100_000
MOST_TURNS: Final = 10_000_000
"""Whoever waits for more has mistaken a unit; the times of so many are kept in memory."""

THINK_SPREAD: Final = 0.7
"""Sigma of the log-normal think times: half of them lie between 0.5 and 1.25 times the mean, one in fifty above 3.3."""

WORDS_SPREAD: Final = 0.7
"""Sigma of the log-normal message lengths: half of them lie between 0.6 and 1.6 times the median."""

MOST_TIMES_THE_MEDIAN: Final = 4
"""A longer message is cut to this, so that the longest is known before and fits the budget of a context."""

_CHINESE_CHARACTERS_A_WORD: Final = 2

_SENTENCES: Final = (
    "I take the TOEIC next month and I am a little nervous about the listening part.",
    "Please give me three useful words for a job interview.",
    "我住在台北，每天坐捷運上班，大概要四十分鐘。",
    "What is the difference between journey and travel?",
    "我的貓叫小花，今年三歲，最喜歡睡在我的鍵盤上。",
    "How do I use the present perfect when I talk about my last job?",
    "昨天的電影很好看，可是英文字幕跑得太快了。",
    "My sister moved to Kaohsiung, so we only meet on Sundays.",
    "請用簡單的英文再說一次，句子短一點。",
    "Could you correct this sentence for me: he don't likes coffee?",
    "My manager wants me to write the report by Friday, and I do not know how to begin.",
    "這兩個單字我老是搞混，可以各給我一個例句嗎？",
    "Let us talk about food: I cook for my family every weekend.",
    "下個星期我要跟外國客戶開會，想先練習自我介紹。",
    "Is it better to say I am used to it, or I used to it?",
    "謝謝，這樣清楚多了，我們再練習一次。",
)


class WrongLoad(CallerError):
    """What is asked for contradicts itself, or cannot be done."""

    code = "wrong_load"


@dataclass(frozen=True, slots=True)
class Load:
    """How much: so many conversations for so long, in messages of about so many words.

    `think_seconds` lie on average between two turns of a conversation, from the one being due to the next being due.
    """

    conversations: int
    think_seconds: float
    duration_seconds: float
    message_words: int = 15
    seed: int = 1

    @property
    def rate(self) -> float:
        """Turns a second, of all conversations together."""
        return self.conversations / self.think_seconds

    @property
    def turns(self) -> int:
        """How many turns that makes."""
        return max(1, round(self.rate * self.duration_seconds))

    @property
    def longest_message_words(self) -> int:
        """No message has more words."""
        return self.message_words * MOST_TIMES_THE_MEDIAN

    def turns_of(self, conversation: int) -> int:
        """How many of them one conversation has: as many as any other, or one more."""
        return self.turns // self.conversations + (conversation < self.turns % self.conversations)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn: seconds after the beginning at which it is due, and the conversation it is of."""

    due: float
    conversation: int
    marker: Marker
    text: str


def settle(rate: float | None, conversations: int | None, think_seconds: float | None) -> tuple[int, float]:
    """Conversations and think time; of these and the turns a second any two say the third.

    Raises:
        WrongLoad: all three are given and do not agree, or two make more conversations than there can be.
    """
    if rate is None:
        return conversations or USUAL_CONVERSATIONS, think_seconds or USUAL_THINK_SECONDS
    if think_seconds is None:
        conversations = conversations or USUAL_CONVERSATIONS
        return conversations, conversations / rate
    needed = max(1, round(rate * think_seconds))
    asked = f"--rate {rate:g} and --think-seconds {think_seconds:g} make {needed:,} conversations"
    if conversations is not None and not math.isclose(conversations, needed, rel_tol=0.01):
        raise WrongLoad(f"{asked}, not {conversations:,}: leave one of the three out")
    if needed > MOST_CONVERSATIONS:
        raise WrongLoad(f"{asked}, and {MOST_CONVERSATIONS:,} are the most: make one of the two smaller")
    return conversations or needed, (conversations or needed) / rate


def plan_turns(load: Load) -> Iterator[PlannedTurn]:
    """Every turn by the time it is due."""
    return merge(*(_turns_of(load, number) for number in range(load.conversations)), key=lambda turn: turn.due)


def think_dues(turns: int, duration_seconds: float, dice: random.Random) -> list[float]:
    """When the turns of one conversation are due, ascending.

    They lie on a circle as long as the test, log-normal think times apart, that is turned by chance: so their number is
    exact, and the load is the same from the first second to the last, with no conversation that begins before another.
    """
    if not turns:
        return []
    thinking = [dice.lognormvariate(0, THINK_SPREAD) for _ in range(turns)]
    scale, at = duration_seconds / math.fsum(thinking), dice.uniform(0, duration_seconds)
    dues = []
    for seconds in thinking:
        dues.append(at % duration_seconds)
        at += seconds * scale
    return sorted(dues)


def message_text(median_words: int, dice: random.Random) -> str:
    """A message in English and Traditional Chinese, of a log-normal number of words, the last sentence cut to it."""
    wanted = round(median_words * dice.lognormvariate(0, WORDS_SPREAD))
    wanted = min(max(wanted, 1), median_words * MOST_TIMES_THE_MEDIAN)
    chosen: list[str] = []
    while wanted > 0:
        sentence = _first_words(dice.choice(_SENTENCES), wanted)
        chosen.append(sentence)
        wanted -= word_count(sentence)
    return " ".join(chosen)


def word_count(sentence: str) -> int:
    """Words of a sentence; two Chinese characters count as one."""
    return len(sentence.split()) if sentence.isascii() else math.ceil(len(sentence) / _CHINESE_CHARACTERS_A_WORD)


def _turns_of(load: Load, conversation: int) -> Iterator[PlannedTurn]:
    """The turns of one conversation; their texts are made when they are due, as there may be many."""
    dice = random.Random(f"{load.seed} {conversation}")  # noqa: S311  # a plan is no secret
    for number, due in enumerate(think_dues(load.turns_of(conversation), load.duration_seconds, dice)):
        marker = Marker(f"k{conversation}", number)
        yield PlannedTurn(due, conversation, marker, f"{message_text(load.message_words, dice)} {marker}")


def _first_words(sentence: str, words: int) -> str:
    if sentence.isascii():
        return " ".join(sentence.split()[:words])
    return sentence[: words * _CHINESE_CHARACTERS_A_WORD]
