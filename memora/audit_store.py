"""What an audit reads of Redis and what a repair writes: conversations as they are stored, damaged or not.

Owns the scripts of both and turns raw replies into the records of `core.auditing`. Unlike the store it expects nothing
of what it reads. Reads are sent many at a time; each repair looks again, in the step in which it writes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from arq.connections import ArqRedis

from memora.core.auditing import (
    PART_TYPES,
    TURN_IDS_KEPT,
    Change,
    Engine,
    Part,
    RepairKind,
    StoredConversation,
)
from memora.fold_queue import HEARTBEAT_PREFIX, QUEUE
from memora.redis_connection import redis_operation
from memora.store import SWEEP_GRACE_MS, script_source

PAGE: Final = 500
"""Entries of a list read at once; less if they are large."""

PAGE_BYTES: Final = 256 * 1024

_PARTS: Final = tuple(PART_TYPES)
_REMAINS: Final[tuple[Part, ...]] = ("folds", "turns", "context", "lock", "events")
_SHARED: Final = ("conversations", "pending")
_SCAN_COUNT: Final = 1_000
_BATCH_SECONDS: Final = 60.0
"""Deadline of one batch: many small scripts, or a few large pages."""

_LOCK_MS: Final = 60_000
"""What is left to a lock that would have stayed for ever."""

_Call = tuple[str, list[str], tuple[str | int, ...]]
"""A script, its keys and its arguments."""

_KEY = re.compile(r"memora:\{(\d+)\}:(?:([A-Za-z0-9_-]{1,128}):)?([a-z]+)")
_JOB = re.compile(r"arq:job:fold:([A-Za-z0-9_-]{1,128}):([^:]+):(\d+)")

_SCRIPTS: Final = (
    *("audit_state", "audit_page", "audit_job", "repair_counters", "repair_turns", "repair_index", "repair_outbox"),
    *("repair_lifetimes", "repair_leftovers", "repair_job"),
)


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key under our prefix. `part` is "" for one that cannot be one of ours, `is_misplaced`: in another's shard."""

    name: str
    conversation_id: str = ""
    part: str = ""
    is_misplaced: bool = False


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A fold job that arq would run."""

    key: str
    conversation_id: str
    generation: str
    start: str


@dataclass(frozen=True, slots=True)
class PageWanted:
    """Entries `[first, stop)` of a list of a conversation."""

    conversation_id: str
    part: Part
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class RawPage:
    """Entries as they are stored, and the generation they belong to."""

    generation: str
    entries: tuple[bytes, ...]


class AuditStore:
    """Conversations in one Redis, as they are. Safe to share between tasks."""

    def __init__(self, redis: ArqRedis, *, shards: int = 1) -> None:
        self._redis = redis
        self._shards = shards
        self._scripts = {name: redis.register_script(script_source(name)) for name in _SCRIPTS}

    # --- what there is ---

    async def keys(self, conversation_id: str | None = None) -> AsyncIterator[list[FoundKey]]:
        """Every key under our prefix that may be of a conversation, or those of one, in pages; some more than once.

        Raises:
            StoreError.
        """
        async for page in self._scan(f"memora:*:{conversation_id}:*" if conversation_id else "memora:*"):
            yield [found for key in page if (found := self._found(key))]

    async def jobs(self, conversation_id: str | None = None) -> AsyncIterator[list[FoundJob]]:
        """Every fold job arq has stored, or those of one conversation, in pages; some more than once.

        Raises:
            StoreError.
        """
        async for page in self._scan(f"arq:job:fold:{conversation_id or '*'}:*"):
            matches = [match for key in page if (match := _JOB.fullmatch(key))]
            yield [FoundJob(match[0], *match.groups()) for match in matches]

    async def listed(self) -> AsyncIterator[list[str]]:
        """Every id in the index or the outbox, in pages; some more than once.

        Raises:
            StoreError.
        """
        for key in self._shared_keys():
            cursor = 0
            while True:
                with redis_operation():
                    if await self._redis.type(key) != b"zset":
                        break
                    cursor, members = await self._redis.zscan(key, cursor, count=_SCAN_COUNT)
                yield [member.decode(errors="backslashreplace") for member, _ in members]
                if not cursor:
                    break

    async def shared_types(self) -> dict[str, str]:
        """The type of every list of conversations and of the queue, of those that exist.

        Raises:
            StoreError.
        """
        found = {}
        for key in (*self._shared_keys(), QUEUE):
            with redis_operation():
                kind = (await self._redis.type(key)).decode()
            if kind != "none":
                found[key] = kind
        return found

    async def engine(self) -> Engine:
        """What the server does when it is full and when it ends.

        Raises:
            StoreError.
        """
        with redis_operation():
            memory = await self._redis.info("memory")
            persistence = await self._redis.info("persistence")
        return Engine(
            maxmemory_policy=str(memory["maxmemory_policy"]),
            appends_only=bool(persistence["aof_enabled"]),
            write_status=str(persistence.get("aof_last_write_status", "ok")),
        )

    # --- how it is ---

    async def states(self, ids: Sequence[str]) -> list[StoredConversation]:
        """A picture of each conversation, all in one round trip. The ids are allowed ones.

        Raises:
            StoreError.
        """
        calls: list[_Call] = [("audit_state", self._all_keys(name), (name, TURN_IDS_KEPT + 1)) for name in ids]
        replies = await self._batch(calls)
        return [_stored(name, self._prefix(name), reply) for name, reply in zip(ids, replies, strict=True)]

    async def pages(self, wanted: Sequence[PageWanted]) -> list[RawPage]:
        """Pages of lists, all in one round trip. A page may be shorter than it could be.

        Raises:
            StoreError.
        """
        calls: list[_Call] = [
            ("audit_page", self._keys(page.conversation_id, "summary", page.part), (page.first, stop, PAGE_BYTES))
            for page in wanted
            for stop in (min(page.stop, page.first + PAGE),)
        ]
        replies = await self._batch(calls)
        return [RawPage(_text(generation), tuple(entries)) for generation, entries in replies]

    async def unwanted(self, jobs: Sequence[FoundJob]) -> list[tuple[FoundJob, bool]]:
        """The jobs no conversation waits for, each with whether the conversation is gone.

        Raises:
            StoreError.
        """
        calls: list[_Call] = [
            (
                "audit_job",
                self._keys(job.conversation_id, "history", "summary"),
                (job.conversation_id, job.generation, job.start),
            )
            for job in jobs
        ]
        replies = await self._batch(calls)
        return [(job, status == 0) for job, status in zip(jobs, replies, strict=True) if status != 1]

    # --- mending ---

    async def repair(self, kind: RepairKind, stored: StoredConversation, changes: Sequence[Change]) -> bool:
        """Mend one thing of a conversation; False if it was not as it had been found, and nothing was done.

        Raises:
            StoreError.
        """
        script, keys, arguments = self._repair_call(kind, stored, changes)
        return await self._run(script, keys, *arguments)

    async def remove_job(self, job: FoundJob) -> bool:
        """Remove a fold job no conversation waits for; False if one does, or it runs.

        Raises:
            StoreError.
        """
        keys = [*self._keys(job.conversation_id, "history", "summary"), QUEUE]
        return await self._run("repair_job", keys, job.conversation_id, job.generation, job.start)

    def _repair_call(self, kind: RepairKind, stored: StoredConversation, changes: Sequence[Change]) -> _Call:
        name = stored.id
        state = self._keys(name, "history", "summary")
        index, outbox = (f"{self._prefix(name)}{shared}" for shared in _SHARED)
        lives = self._keys(name, "summary", "lock", "history", "folds", "turns", "context", "events")
        fields = [text for change in changes for text in (change.name, change.found, change.derived)]
        seen = (stored.generation, stored.history_length, stored.folds_length)
        calls: dict[RepairKind, _Call] = {
            RepairKind.COUNTERS: ("repair_counters", [*state, *self._keys(name, "folds")], (*seen, *fields)),
            RepairKind.TURNS: ("repair_turns", [*state, *self._keys(name, "turns", "context")], ()),
            RepairKind.INDEX: ("repair_index", [*state, index], (name,)),
            RepairKind.OUTBOX: ("repair_outbox", [*state, outbox, QUEUE], (name, SWEEP_GRACE_MS)),
            RepairKind.LIFETIMES: ("repair_lifetimes", lives, (stored.fields.get("expires_at", ""), _LOCK_MS)),
            RepairKind.LEFTOVERS: ("repair_leftovers", [*state, *self._keys(name, *_REMAINS)], ()),
        }
        return calls[kind]

    # --- the wire ---

    async def _scan(self, pattern: str) -> AsyncIterator[list[str]]:
        cursor = 0
        while True:
            with redis_operation():
                cursor, keys = await self._redis.scan(cursor, match=pattern, count=_SCAN_COUNT)
            yield [key.decode(errors="backslashreplace") for key in keys]
            if not cursor:
                return

    async def _batch(self, calls: Sequence[_Call]) -> list[Any]:
        if not calls:
            return []
        with redis_operation(_BATCH_SECONDS):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for script, keys, arguments in calls:
                    await self._scripts[script](keys=keys, args=list(arguments), client=pipeline)
                return await pipeline.execute()

    async def _run(self, script: str, keys: Sequence[str], *arguments: str | int) -> bool:
        with redis_operation():
            return bool(await self._scripts[script](keys=list(keys), args=list(arguments)))

    # --- names ---

    def _found(self, key: str) -> FoundKey | None:
        """What a key is; None for those that are no conversation's and no worry."""
        if key.startswith(HEARTBEAT_PREFIX) or key in (QUEUE, *self._shared_keys()):
            return None
        match = _KEY.fullmatch(key)
        if match is None or not match[2] or match[3] not in PART_TYPES:
            return FoundKey(key)
        return FoundKey(key, match[2], match[3], is_misplaced=int(match[1]) != self._shard(match[2]))

    def _shared_keys(self) -> tuple[str, ...]:
        return tuple(f"memora:{{{shard}}}:{name}" for shard in range(self._shards) for name in _SHARED)

    def _all_keys(self, conversation_id: str) -> list[str]:
        prefix = self._prefix(conversation_id)
        return [*self._keys(conversation_id, *_PARTS), *(f"{prefix}{name}" for name in _SHARED), QUEUE]

    def _keys(self, conversation_id: str, *parts: Part) -> list[str]:
        return [f"{self._prefix(conversation_id)}{conversation_id}:{part}" for part in parts]

    def _prefix(self, conversation_id: str) -> str:
        return f"memora:{{{self._shard(conversation_id)}}}:"

    def _shard(self, conversation_id: str) -> int:
        return zlib.crc32(conversation_id.encode()) % self._shards


def _stored(name: str, prefix: str, reply: Sequence[Any]) -> StoredConversation:
    now, types, expiries, fields, history, folds, turns_length, turns, context, indexed_at, due_at, has_job = reply
    found = {part: kind.decode() for part, kind in zip(_PARTS, types, strict=True) if kind != b"none"}
    known = dict(zip(_PARTS, expiries, strict=False))
    return StoredConversation(
        id=name,
        key_prefix=prefix,
        now=int(now),
        types=found,
        expiries={part: known.get(part) for part in found},
        fields={_text(fields[at]): _text(fields[at + 1]) for at in range(0, len(fields), 2)},
        history_length=history,
        folds_length=folds,
        turns_length=turns_length,
        turns=tuple((_text(turns[at]), float(turns[at + 1])) for at in range(0, len(turns), 2)),
        context=cast("bytes | None", context),
        indexed_at=None if indexed_at is None else float(indexed_at),
        due_at=None if due_at is None else float(due_at),
        has_job=bool(has_job),
    )


def _text(raw: bytes) -> str:
    """What is no UTF-8 stays different from every text that is."""
    return raw.decode(errors="surrogateescape")
