"""Sets of turns kept as spans, and the summary that stands for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memora.core.prompts import unfolded_note
from memora.core.quality_gate import Accepted, SummaryCap, judge_summary
from memora.offline_model.markers import Coverage, Marker, Spans, read_markers, read_spans, read_summary

NUMBERS = st.sets(st.integers(0, 40))
CAP = SummaryCap(max_words=150, max_tokens=300)


def numbers_in(spans: Spans) -> set[int]:
    return {number for number in range(60) if number in spans}


@given(NUMBERS, NUMBERS)
def test_spans_are_sets(one: set[int], other: set[int]) -> None:
    """Spans answer like sets of numbers, and are written so that they can be read again."""
    left, right = Spans.of(one), Spans.of(other)
    assert numbers_in(left) == one
    assert len(left) == len(one)
    assert left.stop == max(one, default=-1) + 1
    assert numbers_in(left.union(right)) == one | other
    assert numbers_in(left.difference(right)) == one - other
    assert numbers_in(left.intersection(right)) == one & other
    assert read_spans(str(left)) == left


@given(NUMBERS, st.integers(0, 40))
def test_one_number_more(numbers: set[int], number: int) -> None:
    """A number can be added anywhere, and spans that touch become one."""
    assert Spans.of(numbers).with_number(number) == Spans.of(numbers | {number})


def test_ten_thousand_turns_are_one_span() -> None:
    """Memory grows with the holes, not with the turns."""
    spans = Spans()
    for number in range(10_000):
        spans = spans.with_number(number)
    assert spans.pairs == ((0, 10_000),)


@pytest.mark.parametrize("text", ["3-", "x", "1,,2", "2,1", "1-3,2-5", "1,2"])
def test_only_what_was_written_is_read(text: str) -> None:
    """Spans out of order, overlapping, or of another form are no spans."""
    with pytest.raises(ValueError, match=r"span"):
        read_spans(text)


def test_markers_are_read_in_order_and_once() -> None:
    """A text that repeats a marker shows one; something like a marker is none."""
    text = "[#k3:7] hello [#k3:7] [#zz:0] [#K3:1] [#k3:] [#k3:1-2] #k3:9"
    assert read_markers(text) == [Marker("k3", 7), Marker("zz", 0)]
    assert read_markers(str(Marker("k3", 7))) == [Marker("k3", 7)]


@given(NUMBERS, st.none() | st.integers(0, 50), st.integers(0, 5))
def test_a_coverage_comes_back_from_its_summary(numbers: set[int], half: int | None, noted: int) -> None:
    """What a summary says is read as it was written, also when a model says it several times."""
    coverage = Coverage("k3", Spans.of(numbers), half, noted)
    read = read_summary(" ".join([str(coverage)] * 3) + " The turns so far: [#k3:0-")
    assert (read.coverage, read.noted_messages, read.fault) == (coverage, noted, "")
    assert read_markers(str(coverage)) == []


@pytest.mark.parametrize("chinese", [False, True])
def test_the_notes_of_the_summariser_are_counted(chinese: bool) -> None:
    """A note about messages that could not be summarized is understood in both of its languages."""
    read = read_summary(f"{Coverage('k3', Spans.of([0]), None, 1)} {unfolded_note([2, 3], chinese=chinese)}")
    assert read.noted_messages == 3
    assert not read.fault
    assert read_summary(unfolded_note([0], chinese=chinese)).fault == ""


@pytest.mark.parametrize(
    "alter",
    [
        lambda text: text.replace("0-7", "0-8"),
        lambda text: text.replace("k3", "k4"),
        lambda text: text[: len(text) // 2],
        lambda text: f"{text} {Coverage('k3', Spans.of([1]))}",
        lambda _: "The user has seven cats.",
    ],
)
def test_a_summary_that_was_altered_is_none(alter: object) -> None:
    """A summary cut, mixed, widened, moved to another conversation or written by somebody else is told apart."""
    assert callable(alter)
    read = read_summary(alter(str(Coverage("k3", Spans.between(0, 8)))))
    assert read.coverage is None
    assert read.fault


def test_a_coverage_passes_the_quality_gate() -> None:
    """What stands for a hundred thousand turns with holes is a summary to Memora, well inside its caps."""
    text = str(Coverage("k3", Spans.between(0, 100_000).difference(Spans.of(range(7, 400, 10)))))
    assert judge_summary(text, "", (), CAP) == Accepted(text)
