"""How a model behaves that is honest and yet not perfect: how long it takes, and how often it fails.

Owns the chances. They are drawn from the seed and the text of a request alone: the same request meets the same fate,
whatever else is asked meanwhile and in whatever order. Pure; must not send anything, and must not wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from memora.offline_model.call import Call
from memora.offline_model.faults import Fault, read_rule


def _fault(**fault: object) -> Fault:
    checked = read_rule({"fault": fault}).fault
    assert checked  # noqa: S101  # it was given
    return checked


FAILURES: Final = (
    _fault(kind="status", status=500),
    _fault(kind="status", status=503),
    _fault(kind="status", status=429, headers={"retry-after-ms": "200"}),
    _fault(kind="reset"),
)
"""The ways in which a provider fails now and then, before it has said anything: trying again is the remedy."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a text goes out: its first piece after so many seconds, each other one so many after the one before."""

    first_seconds: float = 0.0
    piece_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Mean delays in seconds: to the first piece of an answer, for all of it, and for a summary.

    Each is spread evenly by `jitter`: 0.3 is ± 30 %. `piece_delay_seconds` is for each piece of any text, and is not
    spread. Of all requests for a text, `failing_share` (0 to 1) fail the first time they are made.
    """

    first_seconds: float = 0.0
    reply_seconds: float = 0.0
    summary_seconds: float = 0.0
    jitter: float = 0.0
    failing_share: float = 0.0
    piece_delay_seconds: float = 0.0
    seed: int = 0

    def timing(self, call: Call, pieces: int) -> Timing:
        """How a text of so many pieces goes out."""
        dice = self._dice("timing", call)
        if call.kind != "answer":
            first, whole = self._spread(self.summary_seconds, dice), 0.0
        else:
            first, whole = self._spread(self.first_seconds, dice), self._spread(self.reply_seconds, dice)
        rest = max(whole - first, 0.0) / max(pieces - 1, 1)
        return Timing(first + self.piece_delay_seconds, rest + self.piece_delay_seconds)

    def failure(self, call: Call) -> Fault | None:
        """What goes wrong with a request that is made for the first time; mostly nothing."""
        if not self.failing_share:
            return None
        dice = self._dice("failure", call)
        return dice.choice(FAILURES) if dice.random() < self.failing_share else None

    def _spread(self, seconds: float, dice: random.Random) -> float:
        return seconds * dice.uniform(1 - self.jitter, 1 + self.jitter)

    def _dice(self, purpose: str, call: Call) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {call.kind} {call.question}")  # noqa: S311  # chance, and no secret
