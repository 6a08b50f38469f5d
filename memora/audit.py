"""An audit: what must hold of everything that is stored, and what does not.

Owns how it is read: every conversation once, a batch at a time, long lists page by page, so that memory stays bounded
(only the ids are remembered, to count each one once). Chats and workers may go on meanwhile: small state is read in one
step, lists only grow within a generation, and what belongs to another generation by then is read again. Reads only,
unless told to repair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from memora.audit_store import AuditStore, FoundJob, FoundKey, PageWanted
from memora.core.auditing import (
    CHECKS,
    Finding,
    HistoryScan,
    RepairKind,
    StoredConversation,
    TrailScan,
    audit_conversation,
    audit_engine,
    audit_job,
    scan_history,
    scan_trail,
    unknown_key,
)
from memora.core.conversation import check_id
from memora.errors import ConversationNotFound, InvalidId, StoreRefused
from memora.storage import Storage

MOST_FINDINGS: Final = 1_000
"""Findings that are kept to be shown; all are counted."""

_AT_ONCE: Final = 64
"""Conversations read in one round trip."""

_TRIES: Final = 8
"""How often a conversation is read again that has begun another generation meanwhile."""

_MOST_REPAIRS: Final = 6
"""How often a conversation is looked at again after a repair: one may bring another to light."""

Status = Literal["ok", "finding", "unchecked"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: how many things it looked at, how many findings there are, and why it could not look at all."""

    name: str
    looked_at: int
    findings: int = 0
    unchecked: str = ""

    @property
    def status(self) -> Status:
        """A finding is a finding, whatever else could not be looked at."""
        return "finding" if self.findings else "unchecked" if self.unchecked else "ok"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    `findings` are those that are left, at most `MOST_FINDINGS`; `finding_count` counts all of them, `mendable_count`
    those that a repair could mend. `repaired` are those that it has mended. `unread` are conversations that were never
    the same for long enough to be read.
    """

    conversations: int
    messages: int
    folds: int
    checks: tuple[CheckResult, ...]
    findings: tuple[Finding, ...] = ()
    finding_count: int = 0
    mendable_count: int = 0
    repaired: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that was looked at holds."""
        return self.finding_count == 0

    @property
    def is_complete(self) -> bool:
        """Whether every conversation was looked at."""
        return not self.unread


@dataclass(frozen=True, slots=True)
class AuditProgress:
    """How far an audit is."""

    conversations: int
    messages: int


OnProgress = Callable[[AuditProgress], None]


async def audit(
    storage: Storage,
    conversation_id: str | None = None,
    *,
    repair: bool = False,
    on_progress: OnProgress | None = None,
) -> AuditReport:
    """Check everything that is stored, or one conversation; with `repair`, mend what can be derived.

    Raises:
        ConversationNotFound, InvalidId, StoreError.
    """
    auditor = _Auditor(storage, repair=repair, on_progress=on_progress)
    if conversation_id is not None:
        await auditor.look_at_one(check_id(conversation_id))
    else:
        await auditor.look_at_all()
    return auditor.report()


def audit_record(report: AuditReport, *, repair: bool = False) -> dict[str, Any]:
    """The report as `audit --json` writes it."""
    record: dict[str, Any] = {
        "ok": report.ok,
        "conversations": report.conversations,
        "messages": report.messages,
        "folds": report.folds,
        "findings": [_finding_record(finding) | {"repairable": bool(finding.repair)} for finding in report.findings],
        "finding_count": report.finding_count,
        "checks": [
            {"check": check.name, "status": check.status, "looked_at": check.looked_at}
            | ({"unchecked": check.unchecked} if check.unchecked else {})
            for check in report.checks
        ],
        "unread": list(report.unread),
    }
    return record | ({"repairs": [_finding_record(finding) for finding in report.repaired]} if repair else {})


def _finding_record(finding: Finding) -> dict[str, Any]:
    return {
        "conversation": finding.conversation,
        "check": finding.check,
        "expected": finding.expected,
        "found": finding.found,
        "keys": list(finding.keys),
    }


@dataclass
class _Lists:
    """The lists of one conversation, as far as they are read."""

    history: HistoryScan = field(default_factory=HistoryScan)
    trail: TrailScan = field(default_factory=TrailScan)

    def wanted(self, stored: StoredConversation) -> list[PageWanted]:
        """The next page of each list that is not read to its end."""
        pages = []
        if self.history.position < stored.history_length:
            pages.append(PageWanted(stored.id, "history", self.history.position, stored.history_length))
        if self.trail.length < stored.folds_length:
            pages.append(PageWanted(stored.id, "folds", self.trail.length, stored.folds_length))
        return pages

    def take(self, page: PageWanted, entries: Sequence[bytes]) -> None:
        """Go on over a page."""
        if page.part == "history":
            self.history = scan_history(self.history, entries)
        else:
            self.trail = scan_trail(self.trail, entries)


class _Auditor:
    """One audit: what was looked at so far, and what was found."""

    def __init__(self, storage: Storage, *, repair: bool, on_progress: OnProgress | None) -> None:
        self._storage = storage
        self._store = AuditStore(storage.redis, shards=storage.settings.shards)
        self._cap = storage.settings.fold_limits.cap
        self._ttl_ms = (storage.settings.conversation_ttl or 0) * 1_000
        self._repairs = repair
        self._on_progress = on_progress
        self._seen: set[str] = set()
        self._strange: set[str] = set()
        self._looked_at: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._unchecked: dict[str, str] = {}
        self._findings: list[Finding] = []
        self._repaired: list[Finding] = []
        self._unread: list[str] = []
        self._conversations = self._messages = self._folds = self._mendable = 0

    async def look_at_all(self) -> None:
        """Everything under our prefix, everything that is listed, every fold job, and the server."""
        await self._look_at_engine()
        await self._look_at_shared_keys()
        async for found in self._store.keys():
            await self._look_at_keys(found)
        async for listed in self._store.listed():
            await self._look_at_listed(listed)
        async for jobs in self._store.jobs():
            await self._look_at_jobs(jobs)

    async def look_at_one(self, conversation_id: str) -> None:
        """One conversation, its keys and its fold jobs.

        Raises:
            ConversationNotFound: there is nothing of it, not even a trace.
        """
        async for found in self._store.keys(conversation_id):
            await self._look_at_keys(found)
        await self._look_at_some([conversation_id])
        async for jobs in self._store.jobs(conversation_id):
            await self._look_at_jobs(jobs)
        if not (self._conversations or self._findings or self._repaired or self._unread):
            what = f"there is no conversation {conversation_id}: `memora inspect` lists those there are"
            raise ConversationNotFound(what)

    def report(self) -> AuditReport:
        """What came of it."""
        return AuditReport(
            conversations=self._conversations,
            messages=self._messages,
            folds=self._folds,
            checks=tuple(
                CheckResult(name, self._looked_at[name], self._found[name], self._unchecked.get(name, ""))
                for name in CHECKS
                if name in self._looked_at or name in self._unchecked
            ),
            findings=tuple(self._findings),
            finding_count=self._found.total(),
            mendable_count=self._mendable,
            repaired=tuple(self._repaired),
            unread=tuple(self._unread),
        )

    # --- what is no conversation's ---

    async def _look_at_engine(self) -> None:
        try:
            found = audit_engine(await self._store.engine())
        except StoreRefused:
            self._unchecked["engine"] = "the Redis user may not run INFO"
        else:
            self._count(["engine"])
            self._add(found)

    async def _look_at_shared_keys(self) -> None:
        for key, kind in (await self._store.shared_types()).items():
            if kind != "zset":
                self._add([Finding(None, "keys", "a zset", f"a {kind}", (key,))])

    async def _look_at_keys(self, found: Sequence[FoundKey]) -> None:
        self._looked_at["keys"] += len(found)
        for key in found:
            if not key.part or key.is_misplaced:
                self._look_at_strange(key)
        await self._look_at_some([key.conversation_id for key in found if key.part and not key.is_misplaced])

    def _look_at_strange(self, key: FoundKey) -> None:
        if key.name in self._strange:
            return
        if len(self._strange) < MOST_FINDINGS:
            self._strange.add(key.name)
        expected = "a key of the layout"
        if key.is_misplaced:
            expected = f"a key of the shard its conversation belongs to (MEMORA_SHARDS={self._storage.settings.shards})"
        self._add([unknown_key(key.name, expected)])

    async def _look_at_listed(self, ids: Sequence[str]) -> None:
        allowed = [name for name in ids if _is_allowed(name)]
        for name in ids:
            if not _is_allowed(name):
                self._add([Finding(None, "index", "ids of conversations", repr(name)[:80], ())])
        await self._look_at_some(allowed)

    async def _look_at_jobs(self, jobs: Sequence[FoundJob]) -> None:
        self._looked_at["jobs"] += len(jobs)
        for job, is_gone in await self._store.unwanted(jobs):
            if is_gone and self._ttl_ms:
                continue  # of one that expired; arq drops it, or the fold finds nothing
            finding = audit_job(job.conversation_id, job.key, is_gone=is_gone)
            if self._repairs and await self._store.remove_job(job):
                self._repaired.append(finding)
            else:
                self._add([finding])

    # --- conversations ---

    async def _look_at_some(self, ids: Sequence[str]) -> None:
        """Look at those that were not looked at yet."""
        new = [name for name in dict.fromkeys(ids) if name not in self._seen]
        self._seen.update(new)
        for start in range(0, len(new), _AT_ONCE):
            waiting: Sequence[str] = new[start : start + _AT_ONCE]
            for _ in range(_TRIES):
                waiting = [name async for name in self._try(waiting)]
            self._unread += waiting

    async def _try(self, ids: Sequence[str]) -> AsyncIterator[str]:
        """Look at conversations; yields those that changed their generation meanwhile."""
        states = await self._store.states(ids)
        lists = {stored.id: _Lists() for stored in states}
        moved = await self._read(states, lists)
        for stored in states:
            if stored.id in moved:
                yield stored.id
            else:
                await self._judge(stored, lists[stored.id])

    async def _read(self, states: Sequence[StoredConversation], lists: dict[str, _Lists]) -> set[str]:
        """Read all lists to their ends, the pages of all at once. Returns those that changed meanwhile."""
        moved: set[str] = set()
        generations = {stored.id: stored.generation for stored in states}
        reading = [stored for stored in states if stored.has_sound_types()]
        while reading:
            wanted = [page for stored in reading for page in lists[stored.id].wanted(stored)]
            if not wanted:
                break
            for page, raw in zip(wanted, await self._store.pages(wanted), strict=True):
                if raw.generation != generations[page.conversation_id] or not raw.entries:
                    moved.add(page.conversation_id)
                else:
                    lists[page.conversation_id].take(page, raw.entries)
            reading = [stored for stored in reading if stored.id not in moved]
            self._tell()
        return moved

    async def _judge(self, stored: StoredConversation, lists: _Lists) -> None:
        findings = self._check(stored, lists)
        if stored.exists:
            self._conversations += 1
            self._messages += stored.history_length
            self._folds += stored.folds_length
            self._count(("index", "history", "tokens", "folds", "summary", "counters", "usage", "turns", "outbox"))
            if None in stored.expiries.values():
                self._unchecked["lifetimes"] = "this Redis is too old to say when a key expires"
            self._count(["lifetimes"])
        if self._repairs and any(finding.repair for finding in findings):
            findings = await self._mend(stored, findings)
        self._add(findings)

    def _check(self, stored: StoredConversation, lists: _Lists) -> list[Finding]:
        return audit_conversation(stored, lists.history, lists.trail, self._cap, ttl_ms=self._ttl_ms)

    async def _mend(self, stored: StoredConversation, findings: list[Finding]) -> list[Finding]:
        """Mend what can be, look again, and return what is left."""
        for _ in range(_MOST_REPAIRS):
            mended = await self._mend_once(stored, findings)
            if not mended:
                break
            self._repaired += mended
            (stored,) = await self._store.states([stored.id])
            lists = {stored.id: _Lists()}
            if await self._read([stored], lists):
                break  # it lives on; the next audit sees what is left
            findings = self._check(stored, lists[stored.id])
        return findings

    async def _mend_once(self, stored: StoredConversation, findings: Sequence[Finding]) -> list[Finding]:
        """Do the first kind of repair that does anything."""
        for kind in RepairKind:
            of_kind = [finding for finding in findings if finding.repair is kind]
            changes = [change for finding in of_kind for change in finding.changes]
            if of_kind and await self._store.repair(kind, stored, changes):
                return of_kind
        return []

    # --- the report ---

    def _count(self, checks: Sequence[str]) -> None:
        self._looked_at.update(checks)

    def _add(self, findings: Sequence[Finding]) -> None:
        self._found.update(finding.check for finding in findings)
        self._mendable += sum(finding.repair is not None for finding in findings)
        self._findings += findings[: MOST_FINDINGS - len(self._findings)]
        for finding in findings:
            self._looked_at.setdefault(finding.check, 0)

    def _tell(self) -> None:
        if self._on_progress:
            self._on_progress(AuditProgress(self._conversations, self._messages))


def _is_allowed(conversation_id: str) -> bool:
    try:
        check_id(conversation_id)
    except InvalidId:
        return False
    return True
