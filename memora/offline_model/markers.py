"""Markers and what is made of them: sets of turn numbers kept as spans, and the summary that stands for such a set.

A message of turn 7 of the conversation `k3` carries `[#k3:7]`. A summary carries one `Coverage`, so it stays as short
after thousands of turns as after ten. Pure; must not judge.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

_MARKER: Final = re.compile(r"\[#(?P<tag>[0-9a-z]+):(?P<turn>[0-9]{1,12})\]")
_COVERAGE: Final = re.compile(
    r"\[#(?P<tag>[0-9a-z]+):(?P<spans>[0-9,\-]*)"
    r"(?: half (?P<half>[0-9]{1,12}))?(?: noted (?P<noted>[0-9]{1,12}))? proof (?P<proof>[0-9a-f]{8})\]"
)
_SPAN: Final = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_UNFOLDED_NOTE: Final = re.compile(
    r"\(Message ([0-9, ]+) could not be summarized\.\)|（第 ([0-9, ]+) 則訊息無法摘要。）"
)
"""What the summariser writes for messages that no model could take (`prompts.unfolded_note`)."""


class Marker(NamedTuple):
    """One turn of one conversation."""

    tag: str
    turn: int

    def __str__(self) -> str:
        return f"[#{self.tag}:{self.turn}]"


def read_markers(text: str) -> list[Marker]:
    """Every marker in a text, in order, each once: a model that repeats itself says nothing new."""
    found = (Marker(match["tag"], int(match["turn"])) for match in _MARKER.finditer(text))
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Spans:
    """A set of whole numbers as sorted, disjoint spans `[start, stop)` that do not touch."""

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        """The set of these numbers."""
        return cls().union(cls(tuple((number, number + 1) for number in sorted(set(numbers)))))

    @classmethod
    def between(cls, start: int, stop: int) -> Self:
        """Every number from `start` up to, without, `stop`."""
        return cls(((start, stop),) if start < stop else ())

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self.pairs, number, key=lambda pair: pair[0])
        return place > 0 and number < self.pairs[place - 1][1]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.pairs)

    @property
    def stop(self) -> int:
        """One more than the greatest number, 0 for none."""
        return self.pairs[-1][1] if self.pairs else 0

    @property
    def first(self) -> int:
        """The smallest number.

        Raises:
            IndexError: there is none.
        """
        return self.pairs[0][0]

    def with_number(self, number: int) -> Self:
        """The set with one number more. Numbers that come in order cost nothing to speak of."""
        if not self.pairs or number > self.pairs[-1][1]:
            return type(self)((*self.pairs, (number, number + 1)))
        return self.union(type(self).between(number, number + 1))

    def union(self, other: Spans) -> Self:
        """What is in either."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted((*self.pairs, *other.pairs)):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return type(self)(tuple(merged))

    def difference(self, other: Spans) -> Self:
        """What is here and not in the other."""
        return type(self)(tuple(_differences(self.pairs, other.pairs)))

    def intersection(self, other: Spans) -> Self:
        """What is in both."""
        return self.difference(self.difference(other))

    def __str__(self) -> str:
        return ",".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in self.pairs)


def read_spans(text: str) -> Spans:
    """The set that `str` wrote.

    Raises:
        ValueError: it did not write this.
    """
    pairs = []
    for part in filter(None, text.split(",")):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no span of turns")
        pairs.append((int(match[1]), int(match[2] or match[1]) + 1))
    spans = Spans(tuple(pairs))
    if str(Spans().union(spans)) != text:
        raise ValueError(f"{text!r} is no sorted list of spans")
    return spans


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a summary stands for: whole turns, perhaps the question of one more, and messages that only a note names.

    `half` exists only between the steps of one fold: a turn that is shown message by message.
    """

    tag: str
    turns: Spans = Spans()
    half: int | None = None
    noted_messages: int = 0

    @property
    def stop(self) -> int:
        """One more than the last turn of which something is covered."""
        return self.turns.stop if self.half is None else max(self.turns.stop, self.half + 1)

    def __str__(self) -> str:
        return f"The turns so far: {self._body} proof {self.proof}]."

    @property
    def proof(self) -> str:
        """A digest of all the rest: a summary that was altered anywhere proves nothing."""
        return hashlib.blake2s(self._body.encode(), digest_size=4).hexdigest()

    @property
    def _body(self) -> str:
        half = "" if self.half is None else f" half {self.half}"
        noted = f" noted {self.noted_messages}" if self.noted_messages else ""
        return f"[#{self.tag}:{self.turns}{half}{noted}"


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """What a summary was found to say. `fault` says why it is none of ours, "" if it is."""

    coverage: Coverage | None
    noted_messages: int
    fault: str = ""


def read_summary(text: str) -> ReadSummary:
    """Understand a summary; the notes that were written behind it are counted with those it already knows of."""
    notes = sum(len(_numbers(match[1] or match[2])) for match in _UNFOLDED_NOTE.finditer(text))
    matches = {match[0]: match for match in _COVERAGE.finditer(text)}
    if not matches:
        is_ours = not text.strip() or notes
        return ReadSummary(None, notes, "" if is_ours else "it is none that was written here")
    if len(matches) > 1:
        return ReadSummary(None, notes, "it is mixed from several")
    (match,) = matches.values()
    try:
        turns = read_spans(match["spans"])
    except ValueError as error:
        return ReadSummary(None, notes, str(error))
    half = None if match["half"] is None else int(match["half"])
    coverage = Coverage(match["tag"], turns, half, int(match["noted"] or 0))
    if coverage.proof != match["proof"]:
        return ReadSummary(None, notes, "it was altered")
    return ReadSummary(coverage, coverage.noted_messages + notes)


def _numbers(text: str) -> list[str]:
    return [part for part in text.replace(",", " ").split() if part]


def _differences(kept: tuple[tuple[int, int], ...], taken: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    place = 0
    for start, stop in kept:
        rest = start
        while place < len(taken) and taken[place][1] <= rest:
            place += 1
        behind = place
        while behind < len(taken) and taken[behind][0] < stop:
            if rest < taken[behind][0]:
                yield rest, taken[behind][0]
            rest = max(rest, taken[behind][1])
            behind += 1
        if rest < stop:
            yield rest, stop
