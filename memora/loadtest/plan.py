"""What a load test does: when each turn starts, in which conversation, and what it says.

Owns the schedule, which is open: a turn starts when it is due, whether the ones before have been answered or not. Pure;
the same seed gives the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from memora.offline_model.markers import Marker

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
)


@dataclass(frozen=True, slots=True)
class Load:
    """How much: turns a second over so many conversations, for how long, in messages of about so many words."""

    rate: float
    conversations: int
    duration_seconds: float
    message_words: int = 15
    seed: int = 1

    @property
    def turns(self) -> int:
        """How many turns that makes."""
        return max(1, round(self.rate * self.duration_seconds))


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn: seconds after the beginning at which it is due, and the conversation it is of."""

    due: float
    conversation: int
    marker: Marker
    text: str


def plan_turns(load: Load) -> Iterator[PlannedTurn]:
    """Every turn by the time it is due.

    Arrivals are random and independent of each other, as those of people are; each conversation has its turn before one
    of them has the next.
    """
    dice = random.Random(load.seed)  # noqa: S311  # a plan is no secret
    due, order, said = 0.0, list[int](), [0] * load.conversations
    for _ in range(load.turns):
        due += dice.expovariate(load.rate)
        if not order:
            order = list(range(load.conversations))
            dice.shuffle(order)
        conversation = order.pop()
        marker = Marker(f"k{conversation}", said[conversation])
        said[conversation] += 1
        yield PlannedTurn(due, conversation, marker, f"{_text(load.message_words, dice)} {marker}")


def _text(words: int, dice: random.Random) -> str:
    """Whole sentences, about so many words of them, half as many or twice as many now and then."""
    wanted = words * dice.choice((0.5, 0.75, 1.0, 1.0, 1.5, 2.0))
    chosen: list[str] = []
    while sum(map(_words, chosen)) < wanted:
        chosen.append(dice.choice(_SENTENCES))
    return " ".join(chosen)


def _words(sentence: str) -> int:
    return len(sentence.split()) if sentence.isascii() else len(sentence) // 2
