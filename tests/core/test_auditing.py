"""The checks over plain records: what is sound gives nothing, and what is not is named, whatever the pages were."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from any_text import texts
from hypothesis import given

from memora.core.auditing import (
    LONGEST_WAIT_MS,
    NEVER,
    OVERDUE_MS,
    Engine,
    Finding,
    HistoryScan,
    Part,
    Problem,
    RepairKind,
    StoredConversation,
    TrailScan,
    audit_conversation,
    audit_engine,
    audit_job,
    scan_history,
    scan_trail,
    whole_number,
)
from memora.core.quality_gate import SummaryCap
from memora.core.tokens import DEFAULT_VOCABULARY, VOCABULARIES, count_text_tokens

CAP = SummaryCap(max_words=150, max_tokens=300)
NOW = 1_000_000
WINDOW = 6


def message(position: int, content: str = "hello", **other: Any) -> bytes:
    """A message as it is stored at this position."""
    role = "assistant" if position % 2 else "user"
    record = {"role": role, "content": content, "tokens": count_text_tokens(content), "at": 1, **other}
    return json.dumps(record, ensure_ascii=False).encode()


def entry(version: int, start: int, end: int, summary: str) -> bytes:
    """An entry of the audit trail."""
    record = {"version": version, "from": start, "to": end, "summary": summary, "model": "m", "input_tokens": 7}
    return json.dumps({**record, "output_tokens": 3, "duration_seconds": 0.1, "at": 1}).encode()


def sound(turns: int = 6, ends: tuple[int, ...] = (2, 6)) -> tuple[StoredConversation, HistoryScan, TrailScan]:
    """A conversation in which everything holds, with folds that end at these messages."""
    count, folded = 2 * turns, ends[-1] if ends else 0
    summary = f"summary to {folded}" if ends else ""
    starts = (0, *ends)
    trail = [entry(n, starts[n - 1], end, f"summary to {end}") for n, end in enumerate(ends, 1)]
    fields = {
        "summary": summary,
        "message_count": str(count),
        "summarized_message_count": str(folded),
        "version": str(len(ends)),
        "generation": "0123456789abcdef",
        "summary_tokens": str(count_text_tokens(summary)),
        "window_messages": str(WINDOW),
        "fold_input_tokens": str(7 * len(ends)),
        "fold_output_tokens": str(3 * len(ends)),
    }
    stored = StoredConversation(
        id="demo",
        key_prefix="memora:{0}:",
        now=NOW,
        types={"history": "list", "summary": "hash", "folds": "list", "turns": "zset"},
        expiries=dict.fromkeys(("history", "summary", "folds", "turns"), NEVER),
        fields=fields,
        history_length=count,
        folds_length=len(ends),
        turns_length=1,
        turns=(("t", float(count)),),
        indexed_at=1.0,
        due_at=1.0 if count - WINDOW > folded else None,
    )
    return stored, scan_history(HistoryScan(), [message(n) for n in range(count)]), scan_trail(TrailScan(), trail)


def checks(findings: list[Finding]) -> set[str]:
    """Which checks found something."""
    return {finding.check for finding in findings}


@given(turns=st.integers(1, 30), data=st.data())
def test_whatever_is_sound_gives_no_finding(turns: int, data: st.DataObject) -> None:
    """Any number of turns and any tiling of any beginning of them."""
    ends = data.draw(st.lists(st.integers(1, turns), unique=True).map(sorted))
    stored, history, trail = sound(turns, tuple(2 * end for end in ends))
    assert audit_conversation(stored, history, trail, CAP) == []


@given(
    contents=st.lists(texts, max_size=12),
    vocabulary=st.sampled_from([None, *sorted(VOCABULARIES)]),
    cut=st.integers(0, 12),
)
def test_any_text_and_any_pages_scan_the_same(contents: list[str], vocabulary: str | None, cut: int) -> None:
    """Where a page ends changes nothing, and a count by the message's own vocabulary is right."""
    raw = [
        message(n, text, vocabulary=vocabulary, tokens=count_text_tokens(text, vocabulary or DEFAULT_VOCABULARY))
        for n, text in enumerate(contents)
    ]
    at_once = scan_history(HistoryScan(), raw)
    assert at_once == scan_history(scan_history(HistoryScan(), raw[:cut]), raw[cut:])
    assert at_once == HistoryScan(len(raw))


@given(which=st.integers(0, 11), damage=st.binary(max_size=20))
def test_bytes_that_are_no_message_are_found_where_they_are(which: int, damage: bytes) -> None:
    """Whatever stands in a message's place, the scan goes on behind it and names the position."""
    raw = [message(n) for n in range(12)]
    raw[which] = damage
    scan = scan_history(HistoryScan(), raw)
    assert scan.position == 12
    assert f"message {which} " in scan.problems["history"].found
    assert scan.problems["history"].count >= 1


def test_equal_problems_are_counted_and_the_first_is_named() -> None:
    """A history in which everything is wrong gives one finding, not one a message."""
    stored, _, trail = sound()
    history = scan_history(HistoryScan(), [message(n, tokens=99) for n in range(12)])
    (finding,) = audit_conversation(stored, history, trail, CAP)
    assert (finding.check, finding.expected) == ("tokens", "1 tokens by a recount")
    assert finding.found == "message 0 says 99 (and 11 more like it)"
    assert finding.keys == ("memora:{0}:demo:history",)
    for wrong, more in ((1, ""), (2, " (and 1 more like it)")):
        history = scan_history(HistoryScan(), [message(n, tokens=99 if n < wrong else 1) for n in range(12)])
        (finding,) = audit_conversation(stored, history, trail, CAP)
        assert finding.found == "message 0 says 99" + more


@given(
    ends=st.lists(st.integers(1, 20), min_size=2, unique=True).map(sorted),
    data=st.data(),
)
def test_folds_that_do_not_tile_are_found(ends: list[int], data: st.DataObject) -> None:
    """A fold that is left out, or told twice, breaks the tiling, and no counter is derived from it."""
    which = data.draw(st.integers(0, len(ends) - 2))
    starts = (0, *ends)
    entries = [entry(n, 2 * starts[n - 1], 2 * end, "text") for n, end in enumerate(ends, 1)]
    twice, without = entries[: which + 1] + entries[which:], entries[:which] + entries[which + 1 :]
    for broken in (twice, without):
        trail = scan_trail(TrailScan(), broken)
        assert "folds" in trail.problems
        assert not trail.is_sound


@given(st.integers(-3, 40), st.integers(-3, 40), st.integers(-3, 10))
def test_counters_are_derived_from_their_lists_or_left_alone(count: int, folded: int, version: int) -> None:
    """Any three counters are found wrong unless they are right; with the derived ones in place all is sound."""
    stored, history, trail = sound()
    wrong = {"message_count": str(count), "summarized_message_count": str(folded), "version": str(version)}
    broken = replace(stored, fields={**stored.fields, **wrong})
    findings = [found for found in audit_conversation(broken, history, trail, CAP) if found.check == "counters"]
    derived = {change.name: change.derived for finding in findings for change in finding.changes}
    assert {**wrong, **derived} == {"message_count": "12", "summarized_message_count": "6", "version": "2"}
    assert all(finding.repair is RepairKind.COUNTERS for finding in findings)
    mended = replace(stored, fields={**broken.fields, **derived})
    assert audit_conversation(mended, history, trail, CAP) == []


@pytest.mark.parametrize(
    ("due_in", "has_job", "expected"),
    [
        (-OVERDUE_MS - 1, False, {"outbox"}),
        (-OVERDUE_MS - 1, True, set()),
        (-OVERDUE_MS + 1, False, set()),
        (5_000, False, set()),
    ],
)
def test_an_entry_of_the_outbox_that_settles_itself_is_no_finding(
    due_in: int, has_job: bool, expected: set[str]
) -> None:
    """With nothing pending, a fold that is on its way or about to be asked for takes the conversation out."""
    stored, history, trail = sound(6, (2, 6))
    stored = replace(stored, due_at=float(NOW + due_in), has_job=has_job)
    assert checks(audit_conversation(stored, history, trail, CAP)) == expected


def test_what_expired_may_be_listed_until_the_sweep_comes_by() -> None:
    """Only where conversations expire, and only after their time."""
    gone = StoredConversation("demo", "memora:{0}:", NOW, types={}, indexed_at=NOW - 5_000.0, due_at=1.0)
    nothing = HistoryScan(), TrailScan()
    assert checks(audit_conversation(gone, *nothing, CAP)) == {"index", "outbox"}
    assert checks(audit_conversation(gone, *nothing, CAP, ttl_ms=6_000)) == {"index", "outbox"}
    assert audit_conversation(gone, *nothing, CAP, ttl_ms=5_000) == []


def test_the_lifetimes_of_one_conversation_are_one() -> None:
    """All at `expires_at`, or all never; a Redis that cannot say is no finding."""
    stored, history, trail = sound()
    expiring = replace(stored, fields={**stored.fields, "expires_at": "2000000"})
    assert checks(audit_conversation(expiring, history, trail, CAP)) == {"lifetimes"}
    same = replace(expiring, expiries=dict.fromkeys(stored.types, 2_000_000))
    assert audit_conversation(same, history, trail, CAP) == []
    (finding,) = audit_conversation(replace(same, now=3_000_000, expiries=stored.expiries), history, trail, CAP)
    assert (finding.check, finding.repair) == ("lifetimes", None)
    unknown = replace(expiring, expiries=dict.fromkeys(stored.types, None))
    assert audit_conversation(unknown, history, trail, CAP) == []


def test_a_summary_may_have_been_counted_with_any_vocabulary() -> None:
    """The model may have been another then; a count that no vocabulary gives is a finding."""
    stored, history, trail = sound()
    text = "台北的天氣" * 12
    long_trail = replace(trail, summary=text)
    counts = {count_text_tokens(text, vocabulary) for vocabulary in VOCABULARIES}
    assert len(counts) == 2
    for tokens in (*counts, 1):
        fields = {**stored.fields, "summary": text, "summary_tokens": str(tokens)}
        found = audit_conversation(replace(stored, fields=fields), history, long_trail, CAP)
        assert checks(found) == (set() if tokens in counts else {"tokens"})


@pytest.mark.parametrize(("name", "spent"), [("fold_input_tokens", 14), ("fold_output_tokens", 6)])
def test_folds_cost_what_their_trail_says_or_more(name: str, spent: int) -> None:
    """Less is a finding with the sum of the trail as its repair; more is not, for folds that failed leave no entry."""
    stored, history, trail = sound()
    for counted, expected in ((spent + 1, []), (spent, []), (spent - 1, [(name, str(spent - 1), str(spent))])):
        said = replace(stored, fields={**stored.fields, name: str(counted)})
        found = audit_conversation(said, history, trail, CAP)
        changes = [change for finding in found for change in finding.changes]
        assert [(change.name, change.found, change.derived) for change in changes] == expected
        assert checks(found) == ({"usage"} if expected else set())


def history_problems(*raw: bytes) -> dict[str, str]:
    """What is wrong with a history, by check."""
    return {check: problem.found for check, problem in scan_history(HistoryScan(), raw).problems.items()}


@pytest.mark.parametrize(
    ("position", "changes", "check", "found"),
    [
        (0, {"role": "assistant"}, "history", "message 0 is of 'assistant'"),
        (1, {"role": "user"}, "history", "message 1 is of 'user'"),
        (0, {"content": ["hello"]}, "history", "message 0 lacks one"),
        (0, {"at": None}, "history", "message 0 lacks one"),
        (0, {"at": -1}, "history", "message 0 lacks one"),
        (0, {"at": 1.0}, "history", "message 0 lacks one"),
        (0, {"phase": 3}, "history", "message 0 has others"),
        (0, {"incomplete": 3}, "history", "message 0 has others"),
        (0, {"details": "text"}, "history", "message 0 has others"),
        (0, {"absent": 1, "content": "", "tokens": 0}, "history", "message 0 has others"),
        (0, {"absent": True}, "history", "message 0 is absent and has one"),
        (0, {"tokens": "1"}, "tokens", "message 0 has '1'"),
        (0, {"tokens": -1}, "tokens", "message 0 has -1"),
        (0, {"tokens": True}, "tokens", "message 0 has True"),
        (0, {"tokens": 2}, "tokens", "message 0 says 2"),
        (0, {"vocabulary": "klingon"}, "tokens", "message 0 says 1"),
        (0, {"content": "\ud800"}, "tokens", "message 0 says 1"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(position: int, changes: dict[str, Any], check: str, found: str) -> None:
    """One fault, one finding, with the position and what stands there."""
    raw = [message(n) for n in range(2)]
    record = json.loads(raw[position]) | changes
    raw[position] = json.dumps(record).encode()
    assert history_problems(*raw) == {check: found}


@pytest.mark.parametrize(
    "changes",
    [
        {"absent": True, "content": "", "tokens": 0},
        {"absent": False},
        {"phase": "final", "incomplete": "max_output_tokens", "vocabulary": "cl100k_base", "details": {"key": "k"}},
        {"phase": None, "details": None},
        {"at": 0},
        {"content": "", "tokens": 0},
    ],
)
def test_a_message_may_have_what_entry_points_need(changes: dict[str, Any]) -> None:
    """Every option in its form is no finding."""
    assert history_problems(json.dumps(json.loads(message(0)) | changes).encode()) == {}


def trail_problem(*entries: bytes) -> str:
    """What is wrong with a trail, "" for nothing."""
    problem = scan_trail(TrailScan(), entries).problems.get("folds")
    return problem.found if problem else ""


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ""),
        ({"unfolded": [2, 5]}, ""),
        ({"unfolded": [6]}, "for (6,)"),
        ({"unfolded": [1]}, "for (1,)"),
        ({"unfolded": ["2"]}, "entry 2 is none"),
        ({"unfolded": 2}, "entry 2 is none"),
        ({"version": 3}, "version 3 in its place"),
        ({"from": 0}, "messages [0, 6)"),
        ({"to": 2}, "messages [2, 2)"),
        ({"to": 5}, "messages [2, 5)"),
        ({"summary": None}, "entry 2 is none"),
        ({"output_tokens": -3}, "entry 2 is none"),
        ({"at": 0.5}, "entry 2 is none"),
    ],
)
def test_what_is_wrong_with_an_entry_of_the_trail_is_named(changes: dict[str, Any], found: str) -> None:
    """Its number, its messages or its notes; without fault it adds its cost and its summary to the scan."""
    second = json.dumps(json.loads(entry(2, 2, 6, "b")) | changes).encode()
    assert trail_problem(entry(1, 0, 2, "a"), second) == found
    if not found:
        scan = scan_trail(TrailScan(), [entry(1, 0, 2, "a"), second])
        assert scan == TrailScan(length=2, end=6, input_tokens=14, output_tokens=6, summary="b")


def test_faults_do_not_hide_each_other() -> None:
    """A conversation that is not listed is checked like any other; one of foreign types only for these."""
    stored, history, _ = sound()
    trail = scan_trail(TrailScan(), [b"[]"])
    unlisted = replace(stored, indexed_at=None)
    assert checks(audit_conversation(unlisted, history, trail, CAP)) >= {"index", "folds", "summary"}
    foreign = replace(unlisted, types={**stored.types, "folds": "set"})
    assert checks(audit_conversation(foreign, history, trail, CAP)) == {"index", "keys"}
    nameless = replace(unlisted, fields={})
    assert checks(audit_conversation(nameless, history, trail, CAP)) == {"index", "keys"}


@pytest.mark.parametrize(("position", "expected"), [(2, "user at even positions"), (3, "assistant at odd positions")])
def test_a_role_out_of_place_says_where_it_belongs(position: int, expected: str) -> None:
    """Users speak first, so their messages are at even positions."""
    raw = [message(n) for n in range(4)]
    raw[position] = message(position, role="system")
    assert scan_history(HistoryScan(), raw).problems["history"].expected == expected


def test_half_a_turn_is_named() -> None:
    """A history is made of whole turns, whatever its counter says."""
    stored, history, trail = sound()
    half = replace(stored, history_length=11, fields={**stored.fields, "message_count": "11"})
    found = {finding.check: finding for finding in audit_conversation(half, history, trail, CAP)}
    assert (found["history"].expected, found["history"].found) == ("whole turns", "11 messages")


def test_the_lifetimes_of_foreign_keys_are_not_judged() -> None:
    """A summary of another type does not say when anything expires."""
    stored, history, trail = sound()
    foreign = replace(
        stored,
        types={**stored.types, "summary": "set"},
        expiries=dict.fromkeys(stored.types, 2_000_000),
        fields={},
    )
    assert checks(audit_conversation(foreign, history, trail, CAP)) == {"keys"}


def test_what_stands_there_instead_is_shown_cut_short() -> None:
    """A finding is a line, not a dump."""
    entries = (entry(1, 0, 2, "a"), json.dumps(json.loads(entry(2, 2, 6, "b")) | {"unfolded": [9] * 60}).encode())
    assert trail_problem(*entries) == f"for {(9,) * 60}"[:80]
    stored, history, trail = sound()
    said = replace(stored, fields={**stored.fields, "updated_at": "x" * 60})
    (finding,) = audit_conversation(said, history, trail, CAP)
    assert finding.found == "'" + "x" * 39


def test_where_a_conversation_should_be_listed_is_named() -> None:
    """The keys of its shard, for one that is there and not listed, and for one that is listed and gone."""
    stored, history, trail = sound(6, (2,))
    found = audit_conversation(replace(stored, indexed_at=None, due_at=None), history, trail, CAP)
    lists = {"index": ("memora:{0}:conversations",), "outbox": ("memora:{0}:pending",)}
    repairs = {"index": RepairKind.INDEX, "outbox": RepairKind.OUTBOX}
    gone = StoredConversation("demo", "memora:{0}:", NOW, types={}, indexed_at=1.0, due_at=1.0)
    for findings in (found, audit_conversation(gone, HistoryScan(), TrailScan(), CAP)):
        assert {finding.check: finding.keys for finding in findings} == lists
        assert {finding.check: finding.repair for finding in findings} == repairs


def test_a_job_of_nobody_says_whose_it_was() -> None:
    """A conversation that is gone, or one that has moved on; either way it can be removed."""
    for is_gone, found in ((True, "there is no such conversation"), (False, "the conversation has moved on")):
        finding = audit_job("demo", "arq:job:x", is_gone=is_gone)
        assert (finding.conversation, finding.check, finding.found) == ("demo", "jobs", found)
        assert (finding.keys, finding.repair) == (("arq:job:x",), RepairKind.JOB)


@pytest.mark.parametrize(
    ("types", "expiries", "left"),
    [
        ({"lock": "string"}, {"lock": 5}, ()),
        ({"lock": "string"}, {"lock": NEVER}, ("lock",)),
        ({"folds": "list", "lock": "string"}, {"folds": NEVER, "lock": 5}, ("folds",)),
        ({"events": "stream"}, {"events": 5}, ("events",)),
    ],
)
def test_of_a_conversation_that_is_gone_only_a_lock_that_runs_out_may_be_left(
    types: dict[Part, str], expiries: dict[Part, int | None], left: tuple[str, ...]
) -> None:
    """It may be held for a conversation that is about to begin."""
    gone = StoredConversation("demo", "memora:{0}:", NOW, types=types, expiries=expiries)
    found = audit_conversation(gone, HistoryScan(), TrailScan(), CAP)
    assert [finding.keys for finding in found] == (
        [tuple(f"memora:{{0}}:demo:{part}" for part in left)] if left else []
    )


@pytest.mark.parametrize(
    ("due_in", "pending", "found"),
    [
        (LONGEST_WAIT_MS, True, set()),
        (LONGEST_WAIT_MS + 1, True, {"outbox"}),
        (-OVERDUE_MS, False, set()),
        (-OVERDUE_MS - 1, False, {"outbox"}),
        (-OVERDUE_MS - 1, True, set()),
    ],
)
def test_a_fold_is_due_within_the_hour_and_settled_half_a_minute_later(
    due_in: int, pending: bool, found: set[str]
) -> None:
    """To the millisecond; one with pending messages may wait for a worker as long as it takes."""
    stored, history, trail = sound(6, (2,) if pending else (2, 6))
    due = replace(stored, due_at=float(NOW + due_in))
    assert checks(audit_conversation(due, history, trail, CAP)) == found


def test_pending_messages_must_be_listed() -> None:
    """The finding says how many wait."""
    stored, history, trail = sound(6, (2,))
    (finding,) = audit_conversation(replace(stored, due_at=None), history, trail, CAP)
    assert (finding.check, finding.found, finding.repair) == (
        "outbox",
        "4 wait, and it is not listed",
        RepairKind.OUTBOX,
    )
    windowless = {name: value for name, value in stored.fields.items() if name != "window_messages"}
    (finding,) = audit_conversation(replace(stored, due_at=None, fields=windowless), history, trail, CAP)
    assert finding.found == "10 wait, and it is not listed"


def test_a_conversation_that_is_over_is_not_mended() -> None:
    """From the millisecond on in which it should have expired; a lock that never runs out is mended whenever."""
    stored, history, trail = sound()
    for expires_at, repair in ((NOW, None), (NOW + 1, RepairKind.LIFETIMES)):
        over = replace(stored, fields={**stored.fields, "expires_at": str(expires_at)})
        (finding,) = audit_conversation(over, history, trail, CAP)
        assert (finding.check, finding.repair) == ("lifetimes", repair)
        assert finding.expected == f"all keys expire at {expires_at}"
        assert finding.found == ", ".join(f"{part} never" for part in stored.expiries)
    locked = replace(stored, types={**stored.types, "lock": "string"}, expiries={**stored.expiries, "lock": NEVER})
    (finding,) = audit_conversation(locked, history, trail, CAP)
    assert (finding.check, finding.keys, finding.repair) == (
        "lifetimes",
        ("memora:{0}:demo:lock",),
        RepairKind.LIFETIMES,
    )
    held = replace(locked, expiries={**stored.expiries, "lock": NOW + 5})
    assert audit_conversation(held, history, trail, CAP) == []


def test_counters_are_not_derived_from_lists_that_prove_nothing() -> None:
    """A trail that is broken, reaches too far or led to another summary, half a turn, or no history at all."""
    stored, history, trail = sound()
    wrong = replace(stored, fields={**stored.fields, "version": "9"})
    another = replace(wrong, fields={**wrong.fields, "summary": "another"})
    half = replace(wrong, history_length=11, fields={**wrong.fields, "message_count": "11"})
    without: dict[Part, str] = {part: kind for part, kind in stored.types.items() if part != "history"}
    for broken, read in (
        (wrong, replace(trail, problems={"folds": Problem("a", "b")})),
        (wrong, replace(trail, end=14)),
        (another, trail),
        (half, trail),
        (replace(wrong, types=without), trail),
    ):
        found = [finding for finding in audit_conversation(broken, history, read, CAP) if finding.check == "counters"]
        assert found
        assert {finding.repair for finding in found} == {None}
    (finding,) = audit_conversation(wrong, history, trail, CAP)
    assert finding.repair is RepairKind.COUNTERS
    assert (finding.expected, finding.found) == ("version 2, by the folds", "9")
    assert finding.keys == ("memora:{0}:demo:summary", "memora:{0}:demo:folds")
    stored, history, trail = sound(3, (6,))
    whole = replace(stored, fields={**stored.fields, "message_count": "8"})
    (finding,) = audit_conversation(whole, history, trail, CAP)
    assert (finding.repair, finding.keys[1:]) == (RepairKind.COUNTERS, ("memora:{0}:demo:history",))


@pytest.mark.parametrize(
    "name", ["answer_input_tokens", "expires_at", "window_messages", "summary_tokens", "updated_at"]
)
def test_other_numbers_are_numbers_if_they_are_there(name: str) -> None:
    """The finding shows what stands there instead; nothing is derived for it."""
    stored, history, trail = sound()
    (finding, *_) = audit_conversation(replace(stored, fields={**stored.fields, name: "-5"}), history, trail, CAP)
    assert (finding.check, finding.expected, finding.found) == ("counters", f"a number in {name}", "'-5'")
    assert finding.repair is None


@pytest.mark.parametrize(
    ("turns", "length", "expected"),
    [
        ((12.0,), 64, {}),
        ((12.0,), 65, {"at most 64 ids of whole turns": "65 ids, 0 of no whole turn"}),
        ((11.0, 12.0), 2, {"at most 64 ids of whole turns": "2 ids, 1 of no whole turn"}),
        ((10.0,), 1, {"the id of the newest turn": "it is not remembered"}),
        ((), 0, {"the id of the newest turn": "it is not remembered"}),
        ((12.0, 14.0), 2, {"turns of the 12 messages": "one that ends at 14"}),
    ],
)
def test_turn_ids_are_those_of_the_newest_turns(
    turns: tuple[float, ...], length: int, expected: dict[str, str]
) -> None:
    """Sixty-four at most, each at the end of a whole turn, the newest among them, and none beyond the history."""
    stored, history, trail = sound()
    remembered = replace(stored, turns=tuple((str(end), end) for end in turns), turns_length=length)
    found = audit_conversation(remembered, history, trail, CAP)
    assert {finding.expected: finding.found for finding in found} == expected


@pytest.mark.parametrize(
    ("context", "found"),
    [
        (b'{"position":10}', None),
        (b'{"position":11}', "message 11"),
        (b'{"position":-1}', "something else"),
        (b"[]", "something else"),
    ],
)
def test_the_last_context_is_that_of_a_message_that_is_there(context: bytes, found: str | None) -> None:
    """With its reply behind it."""
    stored, history, trail = sound()
    findings = audit_conversation(replace(stored, context=context), history, trail, CAP)
    assert [finding.found for finding in findings] == ([found] if found else [])


def test_what_is_remembered_is_mended_only_beside_a_history_that_is_counted() -> None:
    """As long as nobody knows how long it is, nobody knows which turn is not there."""
    stored, history, trail = sound()
    beyond = replace(stored, turns=(("t", 14.0),), context=b'{"position":12}')
    assert [finding.repair for finding in audit_conversation(beyond, history, trail, CAP)] == [RepairKind.TURNS] * 2
    uncounted = replace(beyond, fields={**stored.fields, "answer_input_tokens": "many"})
    found = [finding for finding in audit_conversation(uncounted, history, trail, CAP) if finding.check == "turns"]
    assert [finding.repair for finding in found] == [None] * 2


def test_a_summary_is_what_its_trail_came_to_within_its_cap() -> None:
    """Another text and one over every vocabulary's cap are found, and a wrong count is mended if it can be counted."""
    stored, history, trail = sound()
    for text, found in (("word " * 151, "151 tokens"), ("\ud800", "no tokens")):
        said = replace(stored, fields={**stored.fields, "summary": text, "summary_tokens": "999"})
        over, counted = audit_conversation(said, history, replace(trail, summary=text), CAP)
        assert (over.check, over.expected) == ("summary", "at most 300 tokens, 150 words")
        assert over.found == found or over.found == f"{count_text_tokens(text)} tokens"
        assert (counted.check, counted.found) == ("tokens", "999")
        assert counted.repair == (None if text == "\ud800" else RepairKind.COUNTERS)
    other = replace(stored, fields={**stored.fields, "summary": "summary to 7"})
    (finding,) = audit_conversation(other, history, trail, CAP)
    assert (finding.expected, finding.found) == ("the result of version 2", "another text of 12 characters")
    fresh, history, trail = sound(2, ())
    (finding,) = audit_conversation(
        replace(fresh, fields={**fresh.fields, "summary": "x", "summary_tokens": "1"}), history, trail, CAP
    )
    assert finding.expected == "no summary before the first fold"


def test_an_engine_that_forgets_is_found() -> None:
    """Evicting, keeping only snapshots, and a file that cannot be written, each for itself."""
    assert audit_engine(Engine("noeviction", appends_only=True)) == []
    found = audit_engine(Engine("allkeys-lru", appends_only=False, write_status="err"))
    assert [finding.check for finding in found] == ["engine"] * 3


@given(st.text(max_size=20) | st.text("0123456789", min_size=14, max_size=17))
def test_a_number_is_what_the_scripts_can_count_with(text: str) -> None:
    """Up to fifteen plain digits, as in the scripts."""
    expected = 0 < len(text) <= 15 and all(character in "0123456789" for character in text)
    assert (whole_number(text) is not None) == expected
