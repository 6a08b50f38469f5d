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
    NEVER,
    OVERDUE_MS,
    Engine,
    Finding,
    HistoryScan,
    RepairKind,
    StoredConversation,
    TrailScan,
    audit_conversation,
    audit_engine,
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


def test_an_engine_that_forgets_is_found() -> None:
    """Evicting, keeping only snapshots, and a file that cannot be written, each for itself."""
    assert audit_engine(Engine("noeviction", appends_only=True)) == []
    found = audit_engine(Engine("allkeys-lru", appends_only=False, write_status="err"))
    assert [finding.check for finding in found] == ["engine"] * 3


@given(st.text(max_size=20))
def test_a_number_is_what_the_scripts_can_count_with(text: str) -> None:
    """Up to fifteen plain digits, as in the scripts."""
    expected = 0 < len(text) <= 15 and all(character in "0123456789" for character in text)
    assert (whole_number(text) is not None) == expected
