"""The judge of the offline model: each kind of violation planted and found, and none in honest traffic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from memora.core.prompts import Piece, control_request, fold_request, shorten_request, summary_message, unfolded_note
from memora.offline_model.call import Call, read_call
from memora.offline_model.judge import MAX_SHOWN_VIOLATIONS, MAX_WAITING_TURNS, OUTCOMES, Judge, Outcome, Report
from memora.offline_model.markers import Coverage, Marker, Spans

TAG = "k3"


def mark(turn: int, tag: str = TAG) -> str:
    return f"a message {Marker(tag, turn)}"


def call_of(messages: Sequence[tuple[str, str]]) -> Call:
    items = [{"type": "message", "role": role, "content": content} for role, content in messages]
    return read_call(json.dumps({"model": "m", "input": items}).encode())


def tail(*turns: int) -> list[tuple[str, str]]:
    return [(role, mark(turn)) for turn in turns for role in ("user", "assistant")]


def answer_call(turn: int, *, summary: str = "", messages: Sequence[tuple[str, str]] = ()) -> Call:
    background = [("developer", summary_message(summary))] if summary else []
    return call_of([*background, *messages, ("user", mark(turn))])


def fold_call(summary: str, messages: Sequence[tuple[str, str]], parts: str = "1/1") -> Call:
    part, count = map(int, parts.split("/"))
    pieces = [Piece("user" if role == "user" else "assistant", content, part, count) for role, content in messages]
    return call_of(fold_request(summary, pieces, max_words=150, max_tokens=300).messages)


def covering(*turns: int, half: int | None = None, noted: int = 0, tag: str = TAG) -> str:
    return str(Coverage(tag, Spans.of(turns), half, noted))


def ask(judge: Judge, turn: int, *shown: int, summary: str = "") -> None:
    judge.read(answer_call(turn, summary=summary, messages=tail(*shown)))


def tell(judge: Judge, turn: int, outcome: Outcome = "ok", gap_messages: int = 0) -> None:
    judge.report(Report(Marker(TAG, turn), outcome, gap_messages))


def kinds(judge: Judge) -> list[str]:
    verdict = judge.verdict()
    assert verdict["ok"] is (verdict["violation_count"] == 0)
    return [violation["kind"] for violation in verdict["violations"]]


@pytest.fixture
def judge() -> Judge:
    return Judge()


def test_honest_traffic_is_clean(judge: Judge) -> None:
    """Turns that are answered, refused, tried again and folded the way they should be leave no violation."""
    summary = ""
    shown: list[int] = []
    for turn in range(200):
        ask(judge, turn, *shown, summary=summary)
        if turn % 9 == 4:
            tell(judge, turn, "failed")
            continue
        ask(judge, turn, *shown, summary=summary)
        tell(judge, turn)
        shown.append(turn)
        if len(shown) > 5:
            summary = judge.read(fold_call(summary, tail(*shown[:3]))) or ""
            shown = shown[3:]
    verdict = judge.verdict()
    assert verdict["ok"], verdict
    assert verdict["violations"] == []
    assert (verdict["conversations"], verdict["markers"], verdict["requests"]) == (1, 200, 378)
    assert verdict["reported"] == {"ok": 178, "failed": 22, "unknown": 0}
    assert verdict["folds"] > 50


def test_an_answer_echoes_the_marker_it_answers(judge: Judge) -> None:
    """So that assistant messages are judged as well."""
    assert str(judge.read(answer_call(0))).startswith("[#k3:0] ")


def test_a_request_without_markers_is_none_of_its_business(judge: Judge) -> None:
    """It says nothing to one, counts it, and finds no fault with the summariser's own harmless fold."""
    assert judge.read(call_of([("user", "hello")])) is None
    assert judge.read(call_of(control_request(max_words=150, max_tokens=300).messages)) is None
    assert judge.verdict()["unmarked_requests"] == 2
    assert kinds(judge) == []


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (answer_call(2, messages=[*tail(0), ("user", mark(1))]), "half_turn"),
        (answer_call(2, messages=[("assistant", mark(0)), *tail(1)]), "half_turn"),
        (answer_call(2, messages=[("user", mark(0)), ("assistant", mark(1))]), "half_turn"),
        (answer_call(2, messages=[("user", mark(0)), ("assistant", "no marker")]), "half_turn"),
        (answer_call(2, summary=covering(0, half=1)), "half_turn"),
        (answer_call(2, messages=tail(0, 1, 1)), "repeated"),
        (answer_call(1, messages=tail(0, 1)), "repeated"),
        (answer_call(2, summary=covering(0, 1), messages=tail(1)), "repeated"),
        (answer_call(2, messages=tail(1, 0)), "out_of_order"),
        (answer_call(2, messages=tail(3)), "out_of_order"),
        (answer_call(4, summary=covering(0, 2), messages=tail(1)), "out_of_order"),
        (answer_call(1, messages=[("user", mark(0, "zz")), ("assistant", mark(0, "zz"))]), "foreign"),
        (answer_call(1, summary=covering(0, tag="zz")), "foreign"),
        (answer_call(1, summary="The user has a cat."), "summary"),
        (answer_call(1, summary=covering(0).replace(":0", ":0-1")), "summary"),
        (answer_call(1, summary=covering(0)[:-8]), "summary"),
        (answer_call(1, messages=[("user", "no marker"), ("assistant", "none either")]), "unmarked"),
        (call_of([*tail(0), ("user", "no marker")]), "unmarked"),
        (call_of([("user", mark(0) + mark(1))]), "several_markers"),
        (fold_call("", [*tail(0), ("user", mark(1))]), "half_turn"),
        (fold_call("", [("assistant", mark(0)), *tail(1)]), "half_turn"),
        (fold_call("", tail(0, 0)), "repeated"),
        (fold_call(covering(0, 1), tail(1, 2)), "repeated"),
        (fold_call(covering(0, 2), tail(1)), "out_of_order"),
        (fold_call(covering(0), [*tail(1), ("user", mark(2, "zz")), ("assistant", mark(2, "zz"))]), "foreign"),
        (fold_call(covering(0)[:-8], tail(1)), "summary"),
        (fold_call(covering(0) + covering(0, 1), tail(2)), "summary"),
        (fold_call(covering(*range(0, 400, 2)), tail(401)), "overflow"),
    ],
)
def test_a_planted_violation_is_found(judge: Judge, call: Call, kind: str) -> None:
    """Whatever is wrong inside one request is found in that request, under its name."""
    judge.read(call)
    assert kind in kinds(judge)


def test_an_answered_turn_that_a_request_passes_over_is_lost() -> None:
    """In the middle of the tail, at its end, inside the summary, between two folds; whenever the report comes."""
    for plant in (
        lambda judge: ask(judge, 3, 0, 2),
        lambda judge: ask(judge, 2, 0),
        lambda judge: ask(judge, 4, 3, summary=covering(0, 2)),
        lambda judge: judge.read(fold_call(covering(0), tail(2))),
        lambda judge: judge.read(fold_call("", tail(0, 2))),
    ):
        before, after = Judge(), Judge()
        ask(before, 1, 0)
        tell(before, 1)
        plant(before)
        ask(after, 1, 0)
        plant(after)
        tell(after, 1)
        assert kinds(before) == kinds(after) == ["lost"]


def test_a_turn_that_may_not_be_stored_may_be_passed_over(judge: Judge) -> None:
    """Nobody promised the client that a failed or an unknown turn is there."""
    for turn, outcome in enumerate(OUTCOMES):
        ask(judge, turn)
        tell(judge, turn, outcome)
    ask(judge, 3, 0)
    ask(judge, 3, 0, 2)
    tell(judge, 3)
    assert kinds(judge) == []


@pytest.mark.parametrize("told_first", [True, False])
def test_a_refused_turn_must_never_be_seen(judge: Judge, told_first: bool) -> None:
    """The client was told that nothing was stored; whether it says so before or after the request."""
    ask(judge, 0)
    if told_first:
        tell(judge, 0, "failed")
    ask(judge, 1, 0)
    if not told_first:
        tell(judge, 0, "failed")
    assert kinds(judge) == ["failed_but_visible"]


@pytest.mark.parametrize(
    ("reported", "found"), [(0, ["unreported_gap"]), (2, ["unreported_gap"]), (4, []), (6, ["overstated_gap"])]
)
def test_a_gap_is_what_was_reported(judge: Judge, reported: int, found: list[str]) -> None:
    """Two answered turns between summary and tail are four messages of gap, no fewer and no more."""
    for turn in range(5):
        ask(judge, turn, *range(turn))
        tell(judge, turn)
    ask(judge, 5, 3, 4, summary=covering(0))
    tell(judge, 5, gap_messages=reported)
    assert kinds(judge) == found
    assert judge.verdict()["gap_messages"] == reported


def test_a_gap_excuses_nothing_behind_it(judge: Judge) -> None:
    """A turn missing inside the tail is lost, however large the gap that was reported."""
    for turn in range(6):
        ask(judge, turn, *range(turn))
        tell(judge, turn)
    ask(judge, 6, 3, 5, summary=covering(0))
    tell(judge, 6, gap_messages=6)
    assert "lost" in kinds(judge)


def test_a_turn_answered_without_the_model_is_found(judge: Judge) -> None:
    """An answer nobody asked the model for cannot be one."""
    tell(judge, 0)
    assert kinds(judge) == ["never_asked"]


def test_a_long_message_is_folded_step_by_step(judge: Judge) -> None:
    """Piece by piece, question and answer in a step each: the half turn exists between the steps alone."""
    summary = covering(0)
    summary = judge.read(fold_call(summary, [("user", mark(1))], "1/3")) or ""
    assert "half 1" in summary
    for part in ("2/3", "3/3"):
        summary = judge.read(fold_call(summary, [("user", "the rest of it")], part)) or ""
    summary = judge.read(fold_call(summary, [("assistant", mark(1))])) or ""
    assert summary == covering(0, 1)
    assert kinds(judge) == []


def test_messages_that_only_a_note_stands_for_were_reported_by_it(judge: Judge) -> None:
    """A note in the summary admits to so many messages, and to no more."""
    noted = f"{covering(0)} {unfolded_note([2, 3], chinese=False)}"
    ask(judge, 1, 0)
    tell(judge, 1)
    ask(judge, 2, 0, 1)
    tell(judge, 2)
    summary = judge.read(fold_call(noted, tail(2))) or ""
    assert summary == covering(0, 2, noted=2)
    ask(judge, 3, summary=summary)
    tell(judge, 3)
    assert kinds(judge) == []
    for turn in (4, 5, 6):
        tell(judge, turn - 1)
        ask(judge, turn, summary=summary)
        tell(judge, turn)
    assert "unreported_gap" in kinds(judge)


def test_half_a_turn_may_be_noted(judge: Judge) -> None:
    """A question that could not be summarized leaves its answer alone, and the other way round; both are reported."""
    alone = f"{covering(0)} {unfolded_note([2], chinese=False)}"
    assert judge.read(fold_call(alone, [("assistant", mark(1))])) == covering(0, noted=1)
    cut_off = f"{covering(0, half=1)} {unfolded_note([3], chinese=True)}"
    assert judge.read(fold_call(cut_off, tail(2))) == covering(0, 1, 2, noted=1)
    assert kinds(judge) == []


def test_a_spoilt_answer_is_no_half_turn(judge: Judge) -> None:
    """A fault of the model's own may take the marker out of an answer; its turn is whole all the same."""
    call = answer_call(0)
    judge.read(call)
    judge.spoil(call, "I'm sorry, but I can't help with that.")
    tell(judge, 0)
    judge.read(answer_call(1, messages=[("user", mark(0)), ("assistant", "I'm sorry.")]))
    tell(judge, 1)
    assert kinds(judge) == []


def test_a_summary_said_over_and_over_is_shortened_to_one(judge: Judge) -> None:
    """A reply far too long, shortened by request or cut in the middle, still says what it covers."""
    long_text = " ".join([covering(0, 1)] * 40)
    shorten = call_of(shorten_request(long_text, max_words=150, max_tokens=300).messages)
    assert judge.read(shorten) == covering(0, 1)
    assert judge.read(fold_call(long_text[:700], tail(2))) == covering(0, 1, 2)
    assert kinds(judge) == []


def test_memory_is_bounded(judge: Judge) -> None:
    """Ten thousand turns nobody reports on keep a fixed number of gaps, and the first hundred violations are shown."""
    for turn in range(10_000):
        ask(judge, turn)
    for turn in range(10_000):
        tell(judge, turn)
    (conversation,) = judge._conversations.values()
    assert len(conversation.gaps) <= MAX_WAITING_TURNS
    assert len(conversation.asked.pairs) == len(conversation.outcomes["ok"].pairs) == 1
    verdict: dict[str, Any] = judge.verdict()
    assert verdict["violation_count"] > len(verdict["violations"]) == MAX_SHOWN_VIOLATIONS
