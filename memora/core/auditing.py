"""What must hold of one conversation as it is stored, and what can be mended of it.

Owns the checks, over plain records of what was read and nothing else: small state as one picture, lists page by page.
Must not read or write anything, and never proposes to change a message or an entry of the audit trail: what was said
and what was folded cannot be derived from anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Literal, TypeGuard

from memora.core.conversation import MESSAGES_PER_TURN, pending_messages
from memora.core.quality_gate import SummaryCap
from memora.core.tokens import DEFAULT_VOCABULARY, VOCABULARIES, count_text_tokens

Part = Literal["history", "summary", "folds", "turns", "context", "lock", "events"]

PART_TYPES: Final[Mapping[Part, str]] = {
    "history": "list",
    "summary": "hash",
    "folds": "list",
    "turns": "zset",
    "context": "string",
    "lock": "string",
    "events": "stream",
}
"""The keys of a conversation, in the order in which they are read."""

CHECKS: Final = (
    *("keys", "index", "history", "tokens", "folds", "summary"),
    *("counters", "usage", "turns", "outbox", "jobs", "lifetimes", "engine"),
)
"""Everything that is checked, in the order in which it is reported."""

TURN_IDS_KEPT: Final = 64
"""The append script forgets older ones."""

OVERDUE_MS: Final = 30_000
"""The sweep looks every second; what it has not settled by then, nothing will."""

LONGEST_WAIT_MS: Final = 3_600_000
"""No fold is put off for longer: a back-off is a minute, and what a provider may ask for is five."""

NEVER: Final = -1
"""When a key expires that does not."""

_COUNTERS: Final = ("message_count", "summarized_message_count", "version")
_USAGE: Final = ("answer_input_tokens", "answer_output_tokens", "fold_input_tokens", "fold_output_tokens")
_OTHER_NUMBERS: Final = (
    *("expires_at", "fold_conflicts", "fold_failures", "fold_rejections"),
    *("seen_summarized_message_count", "seen_fold_tokens"),
)
_REQUIRED_FIELDS: Final = 4
"""Role, content, tokens and at: a message that has no more, as most, has no options to look at."""

_MOST_DIGITS: Final = 15
"""Longer numbers are refused by the scripts: Lua could not count with them."""


class RepairKind(Enum):
    """What can be mended, in the order in which it is: later ones need the earlier ones done."""

    COUNTERS = "counters"
    TURNS = "turns"
    INDEX = "index"
    OUTBOX = "outbox"
    LIFETIMES = "lifetimes"
    LEFTOVERS = "leftovers"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Change:
    """A field of the summary hash that can be derived: what was found ("" for nothing) and what it should be."""

    name: str
    found: str
    derived: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must hold and does not.

    `conversation` is None where it is no conversation's; `repair` is set where it can be mended.
    """

    conversation: str | None
    check: str
    expected: str
    found: str
    keys: tuple[str, ...]
    repair: RepairKind | None = None
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """One picture of a conversation, read in one step and exactly as it is stored.

    `types` and `expiries` (ms since the epoch, -1 for never, None where Redis cannot say) are of the keys that exist.
    `fields` is the summary hash. `turns` are the newest turn ids with the message count each reached. `indexed_at` and
    `due_at` are its places in the index and the outbox, None where it is not listed.
    """

    id: str
    key_prefix: str
    now: int
    types: Mapping[Part, str]
    expiries: Mapping[Part, int | None] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    history_length: int = 0
    folds_length: int = 0
    turns_length: int = 0
    turns: tuple[tuple[str, float], ...] = ()
    context: bytes | None = None
    indexed_at: float | None = None
    due_at: float | None = None
    has_job: bool = False

    @property
    def exists(self) -> bool:
        """Whether there is a conversation, damaged or not."""
        return "history" in self.types or "summary" in self.types

    @property
    def generation(self) -> str:
        """The nonce of its life, "" if there is none."""
        return self.fields.get("generation", "")

    def key(self, part: Part) -> str:
        """The name of one of its keys."""
        return f"{self.key_prefix}{self.id}:{part}"

    def shared_key(self, name: str) -> str:
        """The name of a key of its shard."""
        return f"{self.key_prefix}{name}"

    def number(self, name: str) -> int | None:
        """A field of the summary that is a number to count with; None for anything else."""
        return whole_number(self.fields.get(name, ""))

    def has_sound_types(self) -> bool:
        """Whether each of its keys is of the type it should be."""
        return all(self.types[part] == PART_TYPES[part] for part in self.types)


@dataclass(frozen=True, slots=True)
class Engine:
    """What Redis does when it is full and when it ends. `write_status` is how the last write of its file went."""

    maxmemory_policy: str
    appends_only: bool
    write_status: str = "ok"


@dataclass(frozen=True, slots=True)
class Problem:
    """The first entry of a list at which something does not hold, and how many entries are like it."""

    expected: str
    found: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class HistoryScan:
    """The history up to a position: what was wrong so far, by check. Nothing of its text is kept."""

    position: int = 0
    problems: Mapping[str, Problem] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrailScan:
    """The audit trail up to an entry: how far its folds reach, what they cost, and the summary they came to."""

    length: int = 0
    end: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    summary: str = ""
    problems: Mapping[str, Problem] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether every entry is what it should be."""
        return not self.problems


def whole_number(text: str) -> int | None:
    """A number as the scripts count with it; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def scan_history(scan: HistoryScan, page: Sequence[bytes]) -> HistoryScan:
    """Go on over the next messages."""
    problems = dict(scan.problems)
    for position, raw in enumerate(page, scan.position):
        for check, problem in _message_problems(position, raw):
            _note(problems, check, problem)
    return HistoryScan(scan.position + len(page), problems)


def scan_trail(scan: TrailScan, page: Sequence[bytes]) -> TrailScan:
    """Go on over the next entries of the audit trail."""
    for raw in page:
        scan = _next_entry(scan, raw)
    return scan


def audit_conversation(
    stored: StoredConversation,
    history: HistoryScan,
    trail: TrailScan,
    cap: SummaryCap,
    *,
    ttl_ms: int = 0,
) -> list[Finding]:
    """Everything that does not hold of one conversation, whose lists were read to their ends.

    `ttl_ms` is how long conversations live (0: for ever): what expired may be listed until the sweep comes by.
    """
    if not stored.exists:
        return [*_leftovers(stored), *_listed_though_gone(stored, ttl_ms)]
    findings = [*_key_problems(stored), *_index(stored), *_lifetimes(stored)]
    if findings and not (stored.has_sound_types() and stored.generation):
        return findings
    findings += _from_scan(stored, "history", history.problems)
    findings += _from_scan(stored, "folds", trail.problems)
    counters = list(_counters(stored, trail))
    # What is remembered of turns can only be held against a history that is counted.
    is_counted = all(finding.repair for finding in counters)
    findings += [*_whole_turns(stored), *counters, *_summary(stored, trail, cap), *_usage(stored, trail)]
    findings += [*_turns(stored, is_counted), *_last_context(stored, is_counted)]
    if not counters:
        findings += _outbox(stored, trail)  # wrong counters say nothing of what is pending
    return findings


def audit_engine(engine: Engine) -> list[Finding]:
    """Whether Redis keeps what it is given."""
    found = []
    if engine.maxmemory_policy != "noeviction":
        found.append(("maxmemory-policy noeviction", engine.maxmemory_policy))
    if not engine.appends_only:
        found.append(("appendonly yes", "no: a crash loses what was said since the last snapshot, or everything"))
    if engine.write_status != "ok":
        found.append(("an append-only file that is written", f"the last write went {engine.write_status}"))
    return [Finding(None, "engine", expected, what, ()) for expected, what in found]


def audit_job(conversation_id: str, job_key: str, *, is_gone: bool) -> Finding:
    """A fold job that no conversation waits for."""
    found = "there is no such conversation" if is_gone else "the conversation has moved on"
    expected = "a job its conversation waits for"
    return Finding(conversation_id, "jobs", expected, found, (job_key,), RepairKind.JOB)


def unknown_key(key: str, expected: str) -> Finding:
    """A key under our prefix that is none of ours, or not where we look for it. Nobody knows whose it is."""
    return Finding(None, "keys", expected, "another", (key,))


# --- lists ---


def _message_problems(position: int, raw: bytes) -> Iterator[tuple[str, Problem]]:
    record = _object(raw)
    if record is None:
        yield "history", Problem("a JSON object", f"message {position} is none")
        return
    expected = "assistant" if position % MESSAGES_PER_TURN else "user"
    role, content, tokens = record.get("role"), record.get("content"), record.get("tokens")
    if role != expected:
        yield "history", Problem(f"{expected} at {_parity(position)} positions", f"message {position} is of {role!r}")
    if not isinstance(content, str) or not _is_count(record.get("at")):
        yield "history", Problem("a text and a time", f"message {position} lacks one")
        return
    if len(record) > _REQUIRED_FIELDS and not _has_sound_options(record):
        yield "history", Problem("phase, vocabulary and the like as they are written", f"message {position} has others")
    if record.get("absent") and content:
        yield "history", Problem("no text where there is no message", f"message {position} is absent and has one")
    if not _is_count(tokens):
        yield "tokens", Problem("a token count", f"message {position} has {tokens!r}")
        return
    counted = _count(content, record.get("vocabulary") or DEFAULT_VOCABULARY)
    if counted != tokens:
        yield "tokens", Problem(f"{_shown(counted)} tokens by a recount", f"message {position} says {tokens}")


def _has_sound_options(record: dict[str, Any]) -> bool:
    texts = (record.get(name) for name in ("phase", "incomplete", "vocabulary"))
    sound = all(isinstance(text, str | None) for text in texts) and isinstance(record.get("details"), dict | None)
    return sound and isinstance(record.get("absent", False), bool)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the audit trail as far as it is looked at."""

    summary: str
    unfolded: tuple[int, ...]
    version: int
    start: int
    end: int
    input_tokens: int
    output_tokens: int
    at: int


def _entry(raw: bytes) -> _Entry | None:
    """None for what is none."""
    record = _object(raw) or {}
    names = ("version", "from", "to", "input_tokens", "output_tokens", "at")
    numbers = [number for name in names if _is_count(number := record.get(name))]
    summary, unfolded = record.get("summary"), record.get("unfolded", [])
    if len(numbers) < len(names) or not isinstance(summary, str) or not isinstance(unfolded, list):
        return None
    if not all(map(_is_count, unfolded)):
        return None
    return _Entry(summary, tuple(unfolded), *numbers)


def _next_entry(scan: TrailScan, raw: bytes) -> TrailScan:
    problems, number = dict(scan.problems), scan.length + 1
    entry = _entry(raw)
    if entry is None:
        expected = "a fold with version, from, to, summary, tokens and at"
        _note(problems, "folds", Problem(expected, f"entry {number} is none"))
        return replace(scan, length=number, problems=problems)
    if entry.version != number:
        _note(problems, "folds", Problem(f"version {number}", f"version {entry.version} in its place"))
    if entry.start != scan.end or entry.end <= entry.start or entry.end % MESSAGES_PER_TURN:
        expected = f"version {number} folds whole turns from message {scan.end:,} on"
        _note(problems, "folds", Problem(expected, f"messages [{entry.start:,}, {entry.end:,})"))
    if not all(entry.start <= position < entry.end for position in entry.unfolded):
        expected = f"notes of version {number} for its own messages"
        _note(problems, "folds", Problem(expected, f"for {entry.unfolded}"[:80]))
    return TrailScan(
        length=number,
        end=entry.end,
        input_tokens=scan.input_tokens + entry.input_tokens,
        output_tokens=scan.output_tokens + entry.output_tokens,
        summary=entry.summary,
        problems=problems,
    )


def _note(problems: dict[str, Problem], check: str, problem: Problem) -> None:
    first = problems.get(check)
    problems[check] = replace(first, count=first.count + 1) if first else problem


def _from_scan(stored: StoredConversation, part: Part, problems: Mapping[str, Problem]) -> Iterator[Finding]:
    for check, problem in problems.items():
        more = f" (and {problem.count - 1:,} more like it)" if problem.count > 1 else ""
        yield Finding(stored.id, check, problem.expected, problem.found + more, (stored.key(part),))


# --- the keys and where they are listed ---


def _key_problems(stored: StoredConversation) -> Iterator[Finding]:
    for part, found in stored.types.items():
        if found != PART_TYPES[part]:
            yield Finding(stored.id, "keys", f"a {PART_TYPES[part]}", f"a {found}", (stored.key(part),))
    if "summary" not in stored.types or (stored.types["summary"] == "hash" and not stored.generation):
        found = f"{stored.history_length:,} messages and no generation"
        yield Finding(stored.id, "keys", "a summary hash with a generation", found, (stored.key("summary"),))


def _leftovers(stored: StoredConversation) -> Iterator[Finding]:
    """What is left of a conversation that is gone. A lock may be there before the conversation is, if it runs out."""
    left = [part for part in stored.types if part != "lock" or stored.expiries.get("lock") == NEVER]
    if left:
        keys = tuple(stored.key(part) for part in left)
        yield Finding(
            stored.id, "keys", "no key of a conversation that is gone", "left over", keys, RepairKind.LEFTOVERS
        )


def _listed_though_gone(stored: StoredConversation, ttl_ms: int) -> Iterator[Finding]:
    expired = ttl_ms and (stored.indexed_at is None or stored.indexed_at + ttl_ms <= stored.now)
    if stored.indexed_at is not None and not expired:
        yield _missing(stored, "index", "conversations", RepairKind.INDEX)
    if stored.due_at is not None and not expired:
        yield _missing(stored, "outbox", "pending", RepairKind.OUTBOX)


def _missing(stored: StoredConversation, check: str, name: str, repair: RepairKind) -> Finding:
    return Finding(
        stored.id, check, "conversations that are there", "one that is not", (stored.shared_key(name),), repair
    )


def _index(stored: StoredConversation) -> Iterator[Finding]:
    if stored.indexed_at is None:
        key = stored.shared_key("conversations")
        yield Finding(stored.id, "index", "every conversation", "this one is not listed", (key,), RepairKind.INDEX)


def _outbox(stored: StoredConversation, trail: TrailScan) -> Iterator[Finding]:
    pending = pending_messages(stored.history_length, trail.end, stored.number("window_messages") or 0)
    key = stored.shared_key("pending")
    if stored.due_at is None:
        if pending:
            found = f"{pending:,} wait, and it is not listed"
            yield Finding(stored.id, "outbox", "every one with pending messages", found, (key,), RepairKind.OUTBOX)
        return
    if stored.due_at - stored.now > LONGEST_WAIT_MS:
        found = f"due in {(stored.due_at - stored.now) / 1_000:,.0f} s"
        yield Finding(stored.id, "outbox", "folds due within the hour", found, (key,), RepairKind.OUTBOX)
    elif not pending and not stored.has_job and stored.now - stored.due_at > OVERDUE_MS:
        # With a job, the fold finds nothing to do and takes it out; without one, so does the sweep's.
        found = "nothing pending, and no fold that would settle it"
        yield Finding(stored.id, "outbox", "only those with pending messages", found, (key,), RepairKind.OUTBOX)


def _lifetimes(stored: StoredConversation) -> Iterator[Finding]:
    if stored.types.get("summary", "hash") != "hash":
        return
    written = stored.fields.get("expires_at", "")
    expected = whole_number(written) if written else NEVER
    if expected is None:
        return  # the counters say so
    different = [
        part for part, expiry in stored.expiries.items() if part != "lock" and expiry is not None and expiry != expected
    ]
    # Deleting is not repairing: what should have expired already is left to whoever reads the finding.
    is_over = expected != NEVER and expected <= stored.now
    repair = None if is_over else RepairKind.LIFETIMES
    if different:
        found = ", ".join(f"{part} {_when(stored.expiries[part])}" for part in different)
        keys = tuple(stored.key(part) for part in different)
        yield Finding(stored.id, "lifetimes", f"all keys expire {_when(expected)}", found, keys, repair)
    if stored.expiries.get("lock") == NEVER:
        found = "one that stays for ever"
        yield Finding(
            stored.id, "lifetimes", "a lock that runs out", found, (stored.key("lock"),), RepairKind.LIFETIMES
        )


# --- figures ---


def _whole_turns(stored: StoredConversation) -> Iterator[Finding]:
    if stored.history_length % MESSAGES_PER_TURN:
        found = f"{stored.history_length:,} messages"
        yield Finding(stored.id, "history", "whole turns", found, (stored.key("history"),))


def _counters(stored: StoredConversation, trail: TrailScan) -> Iterator[Finding]:
    """Counters that differ from the lists they count."""
    derived: dict[str, tuple[int, Part]] = {
        "message_count": (stored.history_length, "history"),
        "version": (stored.folds_length, "folds"),
        "summarized_message_count": (trail.end, "folds"),
    }
    is_sound = trail.is_sound and trail.end <= stored.history_length and not stored.history_length % MESSAGES_PER_TURN
    # A history that is gone as a whole is no reason to say that nothing was ever said.
    is_sound = is_sound and "history" in stored.types
    # A trail that does not lead to the summary is not the trail of it, and proves nothing.
    is_sound = is_sound and trail.summary == stored.fields.get("summary", "")
    for name, (value, part) in derived.items():
        if stored.number(name) != value:
            found = stored.fields.get(name, "")
            change = Change(name, found, str(value))
            repair = RepairKind.COUNTERS if is_sound else None
            keys = (stored.key("summary"), stored.key(part))
            yield Finding(
                stored.id, "counters", f"{name} {value:,}, by the {part}", found or "none", keys, repair, (change,)
            )
    for name in (*_USAGE, *_OTHER_NUMBERS, "window_messages", "summary_tokens", "created_at", "updated_at"):
        if name in stored.fields and stored.number(name) is None:
            found = repr(stored.fields[name])[:40]
            yield Finding(stored.id, "counters", f"a number in {name}", found, (stored.key("summary"),))


def _summary(stored: StoredConversation, trail: TrailScan, cap: SummaryCap) -> Iterator[Finding]:
    text, keys = stored.fields.get("summary", ""), (stored.key("summary"),)
    if text != trail.summary:
        whose = f"the result of version {trail.length}" if trail.length else "no summary before the first fold"
        found = f"another text of {len(text):,} characters"
        yield Finding(stored.id, "summary", whose, found, (*keys, stored.key("folds")))
    # Whichever model answered when it was made, its vocabulary is one of these.
    caps = [replace(cap, vocabulary=vocabulary) for vocabulary in sorted(VOCABULARIES)]
    if text and not any(_fits(text, each) for each in caps):
        found = f"{_shown(_count(text, cap.vocabulary))} tokens"
        yield Finding(stored.id, "summary", f"at most {cap.max_tokens} tokens, {cap.max_words} words", found, keys)
    counted, said = {_count(text, each.vocabulary) for each in caps}, stored.number("summary_tokens")
    if said is not None and said not in counted:
        change = Change("summary_tokens", str(said), _shown(_count(text, cap.vocabulary)))
        repair = RepairKind.COUNTERS if None not in counted else None
        expected = f"summary_tokens {change.derived} by a recount"
        yield Finding(stored.id, "tokens", expected, str(said), keys, repair, (change,))


def _usage(stored: StoredConversation, trail: TrailScan) -> Iterator[Finding]:
    """Folds that failed or lost their race are counted and leave no entry, so the counters may be higher."""
    for name, spent in (("fold_input_tokens", trail.input_tokens), ("fold_output_tokens", trail.output_tokens)):
        counted = stored.number(name)
        if counted is not None and counted < spent:
            keys = (stored.key("summary"), stored.key("folds"))
            change = Change(name, str(counted), str(spent))
            repair = RepairKind.COUNTERS if trail.is_sound else None
            expected = f"{name} of at least {spent:,}, by the folds"
            yield Finding(stored.id, "usage", expected, f"{counted:,}", keys, repair, (change,))


def _turns(stored: StoredConversation, is_counted: bool) -> Iterator[Finding]:
    """The turn ids that make a turn safe to send again."""
    keys, count = (stored.key("turns"),), stored.history_length
    ends = [end for _, end in stored.turns]
    beyond = [end for end in ends if end > count]
    if beyond:
        found = f"one that ends at {max(beyond):,.0f}"
        repair = RepairKind.TURNS if is_counted else None
        yield Finding(stored.id, "turns", f"turns of the {count:,} messages", found, keys, repair)
    elif count and (not ends or max(ends) != count):
        yield Finding(stored.id, "turns", "the id of the newest turn", "it is not remembered", keys)
    if any(end % MESSAGES_PER_TURN for end in ends) or stored.turns_length > TURN_IDS_KEPT:
        found = f"{stored.turns_length:,} ids, {sum(bool(end % MESSAGES_PER_TURN) for end in ends)} of no whole turn"
        yield Finding(stored.id, "turns", f"at most {TURN_IDS_KEPT} ids of whole turns", found, keys)


def _last_context(stored: StoredConversation, is_counted: bool) -> Iterator[Finding]:
    if stored.context is None:
        return
    keys, record = (stored.key("context"),), _object(stored.context) or {}
    position = record.get("position")
    if not _is_count(position):
        yield Finding(stored.id, "turns", "a record of the last context", "something else", keys)
    elif position + MESSAGES_PER_TURN > stored.history_length:
        found = f"message {position}"
        repair = RepairKind.TURNS if is_counted else None
        yield Finding(stored.id, "turns", "the context of a message that is there", found, keys, repair)


# --- values ---


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _count(text: str, vocabulary: object) -> int | None:
    """None for what cannot be counted."""
    if vocabulary not in VOCABULARIES or not isinstance(vocabulary, str):
        return None
    try:
        return count_text_tokens(text, vocabulary)
    except UnicodeEncodeError:
        return None


def _fits(text: str, cap: SummaryCap) -> bool:
    try:
        return cap.fits(text)
    except UnicodeEncodeError:
        return False


def _shown(count: int | None) -> str:
    return "no" if count is None else str(count)


def _parity(position: int) -> str:
    return "odd" if position % MESSAGES_PER_TURN else "even"


def _when(expiry: int | None) -> str:
    return "never" if expiry == NEVER else f"at {expiry}"
