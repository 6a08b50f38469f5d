"""The store: conversations in Redis, one script per operation.

Owns the key layout and turns every raw reply into a record on the line after it arrives. Must not decide anything: what
is sent, folded or kept is decided in `core`; the scripts only compare and write.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from importlib import resources
from types import UnionType
from typing import Any, Final

from arq.connections import ArqRedis

from memora.core.conversation import MESSAGES_PER_TURN, Conversation, Message, Summary, Usage, absent_message, check_id
from memora.core.folding import FoldWork
from memora.core.window import Context, ContextTokens
from memora.errors import (
    ConversationDamaged,
    ConversationDeleted,
    ConversationLocked,
    ConversationNotFound,
    MessageSummarized,
)
from memora.fold_queue import QUEUE
from memora.json_bytes import decode_json, encode_json
from memora.redis_connection import DEADLINE_SECONDS, redis_operation

SWEEP_GRACE_MS: Final = 5_000
"""A fold that has not happened this long after it was enqueued is looked after by the sweep."""

PAGE: Final = 500
"""Messages or audit entries read at once when all of them are wanted."""

_GONE: Final = -1
_LOCK_LOST: Final = -2
_SUMMARIZED: Final = -3

_SCRIPTS: Final = (
    *("load_context", "append_turn", "load_fold", "commit_fold", "fail_fold", "settle_fold"),
    *("delete_conversation", "sweep", "inspect", "read_messages", "read_folds", "last_context"),
    *("begin_turn", "renew_lock", "release_lock", "create_conversation", "read_events", "remove_message"),
    *("backlog", "rewind", "claim_jobs", "check_rights"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn to store.

    `turn_id` makes the call safe to repeat; `answered_in` is the generation the turn was answered in. `before` are
    whole turns that go in front of it. `lock_token` is the lock it was answered under, if any; `owner` that of a new
    conversation. The window may grow to `most_window_messages` before it falls back to `window_messages`.
    """

    turn_id: str
    answered_in: str
    user: Message
    assistant: Message
    context: Context
    window_messages: int
    input_tokens: int
    output_tokens: int
    before: tuple[Message, ...] = ()
    lock_token: str = ""
    owner: str = ""
    most_window_messages: int = 0


@dataclass(frozen=True, slots=True)
class _NewTurns:
    """What one step appends: whole turns, answered here or made elsewhere, under one id. `context` may be ""."""

    id: str
    answered_in: str
    messages: Sequence[Message]
    window_messages: int
    lock_token: str
    most_window_messages: int = 0
    owner: str = ""
    context: bytes = b""
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """The conversation right after a turn was stored; `repeated` if it had been stored before."""

    message_count: int
    summarized_message_count: int
    version: int
    pending_messages: int
    newly_summarized_messages: int
    summary_update_tokens: int
    usage: Usage
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """The lock is taken, and this is what there is to answer from; `created_at` in ms, 0 for a new conversation."""

    conversation: Conversation
    created_at: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Another turn holds the lock; it is a lease that runs out in this many seconds at the latest."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn that is in the history, with the position of its user message.

    `created_at` is its conversation's, in ms.
    """

    generation: str
    position: int
    user: Message
    assistant: Message
    created_at: int


@dataclass(frozen=True, slots=True)
class Page:
    """Messages from a position of the history on, and whose conversation it is; `created_at` is in ms."""

    message_count: int
    created_at: int
    owner: str
    metadata: str
    first: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a conversation; `data` is a JSON object with a `type` and no content."""

    id: str
    data: str


@dataclass(frozen=True, slots=True)
class Events:
    """Events after a point, oldest first, and the newest there is ("" if none); `life` is the history's."""

    life: str
    newest: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Rewound:
    """The summary is at `version` again; it was at `from_version`."""

    version: int
    from_version: int


@dataclass(frozen=True, slots=True)
class NoSuchVersion:
    """There is no version that new; `newest` is the newest there is."""

    version: int
    newest: int


@dataclass(frozen=True, slots=True)
class FoldSnapshot:
    """What a fold starts from.

    `oldest` and `newest` are the ends of the tail, and overlap when it is short. `window_messages` is the window as
    the last turn had it.
    """

    conversation_id: str
    generation: str
    message_count: int
    summary: Summary
    oldest: tuple[Message, ...]
    newest: tuple[Message, ...]
    failures: int
    rejections: int
    window_messages: int

    @property
    def unsummarized_messages(self) -> int:
        """How many messages the summary does not cover."""
        return self.message_count - self.summary.summarized_message_count

    def work(self, window_messages: int) -> FoldWork:
        """The part that has left a window of this size."""
        pending = self.unsummarized_messages - window_messages
        return FoldWork(
            conversation_id=self.conversation_id,
            generation=self.generation,
            summary=self.summary,
            messages=self.oldest[: max(pending, 0)],
            failures=self.failures,
            rejections=self.rejections,
        )


@dataclass(frozen=True, slots=True)
class FoldResult:
    """What one fold came to: the new summary, and how it was made."""

    text: str
    tokens: int
    model: str
    input_tokens: int
    output_tokens: int
    duration_seconds: float
    notes: tuple[str, ...] = ()
    unfolded: tuple[int, ...] = ()


class CommitStatus(Enum):
    """What became of a commit. STALE: another fold was first, or what it was to read has changed. GONE: deleted."""

    COMMITTED = 1
    STALE = 0
    GONE = -1


@dataclass(frozen=True, slots=True)
class Committed:
    """The conversation right after a commit was tried."""

    status: CommitStatus
    summarized_message_count: int
    version: int
    pending_messages: int


@dataclass(frozen=True, slots=True)
class Fold:
    """One entry of the audit trail: messages `[start, end)` went into `summary`."""

    version: int
    start: int
    end: int
    summary: str
    model: str
    input_tokens: int
    output_tokens: int
    duration_seconds: float
    at: int
    notes: tuple[str, ...] = ()
    unfolded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspection:
    """One consistent picture of a conversation. Times are milliseconds since the epoch.

    `window_messages` is the window as the last turn had it; `newest` are as many messages as were asked for, summarized
    or not.
    """

    conversation: Conversation
    created_at: int
    updated_at: int
    window_messages: int
    fold_due_at: int | None
    fold_failures: int
    fold_conflicts: int
    last_fold_error: str
    owner: str = ""
    metadata: str = ""
    newest: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and did."""

    due: int
    enqueued: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """How far the folds are behind.

    `messages` and `seconds` (how long the first of them has been waiting) are of the conversations that were looked
    into, which are all, unless very many wait.
    """

    conversations: int
    queued_jobs: int
    messages: int
    seconds: float


class ConversationStore:
    """Conversations in one Redis. Safe to share between tasks; holds no state of any conversation."""

    def __init__(
        self,
        redis: ArqRedis,
        *,
        shards: int = 1,
        ttl_seconds: int | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._redis = redis
        self._deadline_seconds = deadline_seconds
        self._shards = shards
        self._ttl_ms = (ttl_seconds or 0) * 1_000
        self._scripts = {name: redis.register_script(script_source(name)) for name in _SCRIPTS}

    async def load(self, conversation_id: str, most_messages: int) -> Conversation:
        """Load what one answer needs: one round trip, never reading before the summarized count.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary")
        reply = await self._run("load_context", keys, most_messages)
        return _conversation(conversation_id, reply, keys) if reply else Conversation(conversation_id)

    async def append(self, conversation_id: str, turn: Turn) -> Appended:
        """Store one whole turn; repeated with the same turn id it changes nothing.

        Raises:
            ConversationDeleted: the conversation it was answered in is gone; nothing was stored.
            ConversationLocked: its lock ran out and is another's by now; nothing was stored.
            InvalidId, StoreError.
        """
        return await self._append(
            conversation_id,
            _NewTurns(
                id=turn.turn_id,
                answered_in=turn.answered_in,
                messages=(*turn.before, turn.user, turn.assistant),
                window_messages=turn.window_messages,
                most_window_messages=turn.most_window_messages,
                lock_token=turn.lock_token,
                owner=turn.owner,
                context=_context_json(turn.context),
                input_tokens=turn.input_tokens,
                output_tokens=turn.output_tokens,
            ),
        )

    async def import_messages(
        self,
        conversation_id: str,
        messages: Sequence[Message],
        *,
        import_id: str,
        generation: str,
        window_messages: int,
        lock_token: str,
    ) -> Appended:
        """Append whole turns that were made elsewhere; repeated with the same import id it changes nothing.

        Raises:
            ConversationDeleted, ConversationLocked, InvalidId, StoreError: as `append`.
        """
        return await self._append(
            conversation_id,
            _NewTurns(
                id=import_id,
                answered_in=generation,
                messages=messages,
                window_messages=window_messages,
                lock_token=lock_token,
            ),
        )

    async def begin_turn(
        self,
        conversation_id: str,
        *,
        lock_token: str,
        lease_seconds: float,
        turn_id: str,
        fingerprint: str = "",
        most_messages: int,
        owner: str = "",
        may_begin: bool = False,
    ) -> BegunTurn | Busy | StoredTurn | None:
        """Take the lock for one turn and load what it needs; one round trip.

        A turn of this id is found instead, if it is there already; with a `fingerprint`, the newest turn also counts as
        this one if its request had the same. None if there is no such conversation of this owner.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary", "turns", "lock")
        status, *reply = await self._run(
            "begin_turn",
            keys,
            *(lock_token, int(lease_seconds * 1_000), turn_id, fingerprint, most_messages, owner, int(may_begin)),
        )
        match status:
            case 0:
                return Busy(reply[0] / 1_000)
            case 1:
                return BegunTurn(_conversation(conversation_id, reply[:-1], keys), reply[-1])
            case 2:
                user, assistant = _messages(reply[2:4], keys[0])
                return StoredTurn(reply[0].decode(), reply[1], user, assistant, reply[4])
        return None

    async def renew_lock(self, conversation_id: str, lock_token: str, lease_seconds: float) -> bool:
        """Keep a lock; False if it is another's by now.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "lock")
        return bool(await self._run("renew_lock", keys, lock_token, int(lease_seconds * 1_000)))

    async def release_lock(self, conversation_id: str, lock_token: str) -> None:
        """Give a lock back; nothing happens if it is another's by now.

        Raises:
            InvalidId, StoreError.
        """
        await self._run("release_lock", self._keys(conversation_id, "lock"), lock_token)

    async def remove_message(self, conversation_id: str, generation: str, position: int, *, lock_token: str) -> bool:
        """Take back a message that is not summarized, and the lock with it; False if there is none at this position.

        Raises:
            MessageSummarized: the summary stands for it already.
            ConversationDeleted, ConversationLocked, InvalidId, StoreError: as `append`.
        """
        keys = self._keys(conversation_id, "history", "summary")
        keys += [*self._shared_keys(conversation_id, "pending"), QUEUE, *self._keys(conversation_id, "lock", "events")]
        absent = absent_message("assistant" if position % MESSAGES_PER_TURN else "user")
        status = await self._run(
            "remove_message",
            keys,
            *(conversation_id, generation, position, lock_token, _message_json(absent), SWEEP_GRACE_MS),
        )
        if status == _GONE:
            raise ConversationDeleted(f"conversation {conversation_id} was deleted meanwhile")
        if status == _LOCK_LOST:
            raise ConversationLocked(f"another turn of conversation {conversation_id} was let in: try again")
        if status == _SUMMARIZED:
            what = "is part of the summary by now: it can only be deleted together with its conversation"
            raise MessageSummarized(f"message {position} of conversation {conversation_id} {what}")
        return bool(status)

    async def page(self, conversation_id: str, first: int, stop: int) -> Page | None:
        """The messages `[first, stop)` as far as there are some; None if there is no such conversation.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary")
        reply = await self._run("read_messages", keys, first, stop)
        if not reply:
            return None
        _, count, raw, created_at, owner, metadata = reply
        return Page(count, created_at, owner.decode(), _text(metadata, keys[1]), first, _messages(raw, keys[0]))

    async def create(self, conversation_id: str, *, owner: str, metadata: dict[str, str]) -> int | None:
        """Begin a conversation without messages; when, in ms, or None if there is one of this id already.

        Raises:
            InvalidId, StoreError.
        """
        status, *created = await self._create(conversation_id, owner, metadata, must_exist=False)
        return int(created[0]) if status == 1 else None

    async def set_metadata(self, conversation_id: str, *, owner: str, metadata: dict[str, str]) -> bool:
        """Replace a conversation's metadata; False if there is no such conversation of this owner.

        Raises:
            InvalidId, StoreError.
        """
        return bool((await self._create(conversation_id, owner, metadata, must_exist=True))[0] == 1)

    async def events(self, conversation_id: str, after: str, most: int = PAGE) -> Events | None:
        """What happened after an event ("" for nothing, only the newest id); None if there is no such conversation.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary", "events")
        reply = await self._run("read_events", keys, after, most)
        if not reply:
            return None
        life, newest, found = reply
        return Events(life.decode(), newest.decode(), tuple(Event(i.decode(), d.decode()) for i, d in found))

    async def rewind(self, conversation_id: str, version: int, *, owner: str = "") -> Rewound | NoSuchVersion | None:
        """Take the summary back to an earlier version, 0 for none; what came after it is pending again.

        Folds that are under way can no longer commit; turns that are under way are stored all the same. None if there
        is no such conversation of this owner.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary", "folds", "context")
        keys += [*self._shared_keys(conversation_id, "pending"), QUEUE, *self._keys(conversation_id, "events")]
        status, *before = await self._run("rewind", keys, conversation_id, owner, version, SWEEP_GRACE_MS)
        if status < 0:
            return None
        return Rewound(version, before[0]) if status else NoSuchVersion(version, before[0])

    async def load_fold(self, conversation_id: str, *, most_messages: int, window: int) -> FoldSnapshot | None:
        """Load what a fold starts from; None if there is no such conversation.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary")
        reply = await self._run("load_fold", keys, most_messages, window)
        if not reply:
            return None
        generation, count, folded, version, summary, tokens, failures, rejections, last_window, oldest, newest = reply
        return FoldSnapshot(
            conversation_id=conversation_id,
            generation=generation.decode(),
            message_count=count,
            summary=Summary(_text(summary, keys[1]), folded, version, tokens),
            oldest=_messages(oldest, keys[0]),
            newest=_messages(newest, keys[0]),
            failures=failures,
            rejections=rejections,
            window_messages=last_window,
        )

    async def commit_fold(
        self,
        snapshot: FoldSnapshot,
        end: int,
        result: FoldResult,
        *,
        fold_id: str,
        window_messages: int,
        most_window_messages: int = 0,
    ) -> Committed:
        """Make a fold of `[snapshot's count, end)` real, if generation and count are still the snapshot's.

        Raises:
            StoreError.
        """
        conversation_id, start = snapshot.conversation_id, snapshot.summary.summarized_message_count
        entry = {
            "version": snapshot.summary.version + 1,
            "from": start,
            "to": end,
            "summary": result.text,
            "summary_tokens": result.tokens,
            "model": result.model,
            "input_tokens": result.input_tokens,
            "output_tokens": result.output_tokens,
            "duration_seconds": round(result.duration_seconds, 3),
        }
        if result.notes:
            entry["notes"] = list(result.notes)
        if result.unfolded:
            entry["unfolded"] = list(result.unfolded)
        keys = self._keys(conversation_id, "history", "summary", "folds")
        reply = await self._run(
            "commit_fold",
            [*keys, *self._shared_keys(conversation_id, "pending"), QUEUE, *self._keys(conversation_id, "events")],
            *(conversation_id, snapshot.generation, start, end, fold_id, result.text, result.tokens),
            *(encode_json(entry), result.input_tokens, result.output_tokens, window_messages, SWEEP_GRACE_MS),
            *(self._results_channel(conversation_id), most_window_messages),
        )
        return Committed(CommitStatus(reply[0]), *reply[1:])

    async def fail_fold(
        self,
        snapshot: FoldSnapshot,
        *,
        fold_id: str,
        reason: str,
        rejected: bool,
        input_tokens: int,
        output_tokens: int,
        delay_seconds: float,
    ) -> bool:
        """Record a fold that came to nothing: what it cost, why, and when to try again.

        False if there is nothing to try again: generation or count have moved, or the conversation is gone.

        Raises:
            StoreError.
        """
        conversation_id = snapshot.conversation_id
        keys = self._keys(conversation_id, "history", "summary")
        status = await self._run(
            "fail_fold",
            [*keys, *self._shared_keys(conversation_id, "pending"), *self._keys(conversation_id, "events")],
            *(conversation_id, snapshot.generation, snapshot.summary.summarized_message_count, fold_id),
            *(int(rejected), reason[:200], input_tokens, output_tokens, int(delay_seconds * 1_000)),
            self._results_channel(conversation_id),
        )
        return int(status) == 1

    async def settle_fold(self, conversation_id: str, snapshot: FoldSnapshot | None) -> bool:
        """Take a conversation with nothing pending out of the outbox; False if it changed meanwhile.

        Raises:
            InvalidId, StoreError.
        """
        seen = ("", 0, 0)
        if snapshot:
            seen = (snapshot.generation, snapshot.message_count, snapshot.summary.summarized_message_count)
        keys = self._keys(conversation_id, "history", "summary")
        shared = self._shared_keys(conversation_id, "pending")
        return bool(await self._run("settle_fold", [*keys, *shared], conversation_id, *seen))

    async def delete(self, conversation_id: str) -> bool:
        """Leave nothing of a conversation behind; False if there was nothing.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary", "folds", "turns", "context")
        shared = self._shared_keys(conversation_id, "conversations", "pending")
        keys += [*shared, QUEUE, *self._keys(conversation_id, "lock", "events")]
        return bool(await self._run("delete_conversation", keys, conversation_id))

    async def sweep(self, *, most: int, again_seconds: float, lease_seconds: float) -> Swept:
        """See to the conversations whose fold is due, in every shard.

        Raises:
            StoreError.
        """
        totals = [0, 0, 0]
        for shard in range(self._shards):
            prefix = _prefix(shard)
            found = await self._run(
                "sweep",
                [f"{prefix}pending", f"{prefix}conversations", QUEUE],
                *(most, int(again_seconds * 1_000), int(lease_seconds * 1_000), prefix, ":summary"),
            )
            totals = [total + count for total, count in zip(totals, found, strict=True)]
        return Swept(*totals)

    async def claim_jobs(
        self, job_ids: Sequence[str], *, most: int, now_ms: int, lease_seconds: float
    ) -> list[tuple[str, int]]:
        """Claim at most so many of these fold jobs that are due and that nobody has, each by a lease.

        Returns the ids of those that were claimed with their scores.

        Raises:
            StoreError.
        """
        found = await self._run("claim_jobs", [QUEUE], most, now_ms, int(lease_seconds * 1_000), *job_ids)
        return [(job_id.decode(), int(score)) for job_id, score in zip(found[::2], found[1::2], strict=True)]

    async def backlog(self, *, most: int) -> Backlog:
        """How far the folds are behind, looking into so many conversations of each shard.

        Raises:
            StoreError.
        """
        conversations, queued, messages, longest_ms = 0, 0, 0, 0
        for shard in range(self._shards):
            prefix = _prefix(shard)
            found = await self._run("backlog", [f"{prefix}pending", QUEUE], most, prefix)
            conversations, queued, messages = conversations + found[0], found[1], messages + found[2]
            longest_ms = max(longest_ms, int(found[3]))
        return Backlog(conversations, queued, messages, longest_ms / 1_000)

    async def inspect(self, conversation_id: str, most_messages: int, most_newest: int = 0) -> Inspection:
        """One consistent picture of a conversation, with so many messages of its tail and of its history.

        Raises:
            ConversationNotFound, InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary")
        shared = self._shared_keys(conversation_id, "pending")
        reply = await self._run("inspect", [*keys, *shared], conversation_id, most_messages, most_newest)
        if not reply:
            raise _not_found(conversation_id)
        fields = _pairs(reply[0], keys[1])
        inspection = _inspection(conversation_id, fields, reply[1], _messages(reply[2], keys[0]), keys[1])
        return replace(inspection, newest=_messages(reply[3], keys[0]))

    async def messages(self, conversation_id: str) -> AsyncIterator[Message]:
        """Every message of the history, oldest first, in pages.

        Raises:
            ConversationNotFound, InvalidId, StoreError. ConversationDeleted: it was deleted between two pages.
        """
        keys = self._keys(conversation_id, "history", "summary")
        async for raw in self._pages("read_messages", keys, conversation_id):
            for message in _messages(raw, keys[0]):
                yield message

    async def folds(self, conversation_id: str) -> AsyncIterator[Fold]:
        """The audit trail, oldest first, in pages. Raises what `messages` raises."""
        keys = self._keys(conversation_id, "history", "summary", "folds")
        async for raw in self._pages("read_folds", keys, conversation_id):
            for entry in raw:
                yield _fold(entry, keys[2])

    async def last_context(self, conversation_id: str) -> Context | None:
        """What was sent for the last answer; None if there is no such conversation or the record is gone.

        Raises:
            InvalidId, StoreError.
        """
        keys = self._keys(conversation_id, "history", "summary", "folds", "context")
        reply = await self._run("last_context", keys)
        if not reply:
            return None
        record, entry, tail, message = reply
        if not message:
            raise ConversationDamaged(keys[3], "names a message that is not in the history")
        sent = _object(record, keys[3])
        summary = _fold(entry, keys[2]).summary if entry else str(sent.get("summary", ""))
        question = _message(_object(message, keys[0]), keys[0]).content
        return _context(sent, summary, _messages(tail, keys[0]), question, keys[3])

    async def conversation_ids(self) -> list[str]:
        """Ids of all conversations, the last active first.

        Raises:
            StoreError.
        """
        scored: list[tuple[bytes, float]] = []
        for shard in range(self._shards):
            with redis_operation(self._deadline_seconds):
                scored += await self._redis.zrange(f"{_prefix(shard)}conversations", 0, -1, withscores=True)
        return [member.decode() for member, _ in sorted(scored, key=lambda item: -item[1])]

    async def _append(self, conversation_id: str, new: _NewTurns) -> Appended:
        keys = self._keys(conversation_id, "history", "summary", "folds", "turns", "context")
        keys += [*self._shared_keys(conversation_id, "conversations", "pending"), QUEUE]
        reply = await self._run(
            "append_turn",
            [*keys, *self._keys(conversation_id, "lock", "events")],
            *(conversation_id, new.id, new.answered_in, new_generation(), self._ttl_ms),
            *(new.window_messages, SWEEP_GRACE_MS, new.input_tokens, new.output_tokens, new.context),
            *(new.lock_token, new.owner, new.most_window_messages),
            *(_message_json(message) for message in new.messages),
        )
        if reply[0] == _GONE:
            what = "was deleted while this turn was being answered; the turn was not stored"
            raise ConversationDeleted(f"conversation {conversation_id} {what}")
        if reply[0] == _LOCK_LOST:
            what = "took so long to be answered that the next turn was let in; it was not stored, send it again"
            raise ConversationLocked(f"a turn of conversation {conversation_id} {what}")
        status, count, folded, version, pending, newly, spent, *usage = reply
        return Appended(count, folded, version, pending, newly, spent, Usage(*usage), repeated=not status)

    async def _create(
        self, conversation_id: str, owner: str, metadata: dict[str, str], *, must_exist: bool
    ) -> list[int]:
        keys = self._keys(conversation_id, "history", "summary")
        shared = self._shared_keys(conversation_id, "conversations")
        arguments = (conversation_id, new_generation(), owner, encode_json(metadata), self._ttl_ms, int(must_exist))
        found: list[int] = await self._run("create_conversation", [*keys, *shared], *arguments)
        return found

    async def _pages(self, script: str, keys: Sequence[str], conversation_id: str) -> AsyncIterator[list[bytes]]:
        first, generation = 0, None
        while True:
            reply = await self._run(script, keys, first, first + PAGE)
            if not reply and generation is None:
                raise _not_found(conversation_id)
            if not reply or (generation is not None and reply[0] != generation):
                raise ConversationDeleted(f"conversation {conversation_id} was deleted while it was being read")
            generation = reply[0]
            if not reply[2]:
                return
            yield reply[2]
            first += len(reply[2])

    async def missing_right(self) -> str:
        """The first thing that the Redis user may not do and Memora has to, as "COMMAND key"; "" if all is allowed.

        Raises:
            StoreError: it may not even run scripts, among others.
        """
        return str((await self._run("check_rights", [])).decode())

    async def _run(self, script: str, keys: Sequence[str], *arguments: str | int | bytes) -> Any:
        with redis_operation(self._deadline_seconds):
            return await self._scripts[script](keys=list(keys), args=list(arguments))

    def _keys(self, conversation_id: str, *parts: str) -> list[str]:
        prefix = _prefix(self._shard(check_id(conversation_id)))
        return [f"{prefix}{conversation_id}:{part}" for part in parts]

    def _shared_keys(self, conversation_id: str, *names: str) -> list[str]:
        return [f"{_prefix(self._shard(conversation_id))}{name}" for name in names]

    def hint_channel(self, conversation_id: str) -> str:
        """Where it is said of what kind it was whenever something happens to a conversation: its stream's name.

        Raises:
            InvalidId.
        """
        return self._keys(conversation_id, "events")[0]

    def _results_channel(self, conversation_id: str) -> str:
        """Where it is said how each fold of a shard ended."""
        return f"{_prefix(self._shard(conversation_id))}folds"

    def _shard(self, conversation_id: str) -> int:
        return zlib.crc32(conversation_id.encode()) % self._shards


def new_generation() -> str:
    """A nonce that names one life of a conversation id."""
    return secrets.token_hex(8)


def message_record(message: Message) -> dict[str, Any]:
    """A message as it is stored and exported, without what it does not need."""
    optional: dict[str, Any] = {
        "phase": message.phase,
        "incomplete": message.incomplete,
        "vocabulary": message.vocabulary,
        "absent": message.absent or None,
        "details": None if message.details is None else dict(message.details),
    }
    record: dict[str, Any] = {"role": message.role, "content": message.content, "tokens": message.tokens}
    record |= {name: value for name, value in optional.items() if value is not None}
    return record | ({"at": message.at} if message.at else {})


@cache
def script_source(script: str) -> str:
    """A script, with what all of them share in front."""
    folder = resources.files("memora") / "lua"
    return "".join((folder / f"{name}.lua").read_text("utf-8") for name in ("_prelude", script))


def _prefix(shard: int) -> str:
    return f"memora:{{{shard}}}:"


def _not_found(conversation_id: str) -> ConversationNotFound:
    return ConversationNotFound(f"there is no conversation {conversation_id}: `memora inspect` lists those there are")


def _conversation(conversation_id: str, reply: Sequence[Any], keys: Sequence[str]) -> Conversation:
    generation, count, folded, version, summary, tokens, *usage, tail = reply
    return Conversation(
        id=conversation_id,
        generation=generation.decode(),
        message_count=count,
        summary=Summary(_text(summary, keys[1]), folded, version, tokens),
        tail=_messages(tail, keys[0]),
        usage=Usage(*usage),
    )


def _message_json(message: Message) -> bytes:
    return encode_json(message_record(message))


def _text(raw: bytes, key: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ConversationDamaged(key, "holds a text that is not UTF-8") from None


def _object(raw: bytes, key: str) -> dict[str, Any]:
    try:
        record = decode_json(raw)
    except (ValueError, RecursionError):
        raise ConversationDamaged(key, "holds a record that is not JSON") from None
    if not isinstance(record, dict):
        raise ConversationDamaged(key, "holds a record that is not a JSON object")
    return record


def _messages(raw: Sequence[bytes], key: str) -> tuple[Message, ...]:
    return tuple(_message(_object(item, key), key) for item in raw)


def _message(record: dict[str, Any], key: str) -> Message:
    role, content, tokens = record.get("role"), record.get("content"), record.get("tokens")
    if role not in ("user", "assistant") or not isinstance(content, str) or not isinstance(tokens, int):
        raise ConversationDamaged(key, "holds a record without role, content or tokens")
    at, *optional = record.get("at", 0), *(record.get(name) for name in ("phase", "incomplete", "vocabulary"))
    if not isinstance(at, int) or not all(isinstance(value, str | None) for value in optional):
        raise ConversationDamaged(key, "holds a record whose at, phase, incomplete or vocabulary cannot be read")
    absent, details = record.get("absent", False), record.get("details")
    if not isinstance(absent, bool) or not isinstance(details, dict | None):
        raise ConversationDamaged(key, "holds a record whose absent or details cannot be read")
    phase, incomplete, vocabulary = optional
    return Message(role, content, tokens, at, phase, incomplete, vocabulary, absent, details)


def _fold(raw: bytes, key: str) -> Fold:
    record = {"notes": [], "unfolded": [], **_object(raw, key)}
    for name, kind in _FOLD_FIELDS.items():
        if not isinstance(record.get(name), kind):
            raise ConversationDamaged(key, f"holds an entry without a usable {name}")
    return Fold(
        version=record["version"],
        start=record["from"],
        end=record["to"],
        summary=record["summary"],
        model=record["model"],
        input_tokens=record["input_tokens"],
        output_tokens=record["output_tokens"],
        duration_seconds=record["duration_seconds"],
        at=record["at"],
        notes=tuple(record["notes"]),
        unfolded=tuple(record["unfolded"]),
    )


_FOLD_FIELDS: Final[dict[str, type | UnionType]] = {
    **dict.fromkeys(("version", "from", "to", "input_tokens", "output_tokens", "at"), int),
    **dict.fromkeys(("summary", "model"), str),
    **dict.fromkeys(("notes", "unfolded"), list),
    "duration_seconds": int | float,
}


def _pairs(flat: Sequence[bytes], key: str) -> dict[str, str]:
    return {_text(flat[i], key): _text(flat[i + 1], key) for i in range(0, len(flat), 2)}


def _inspection(
    conversation_id: str, fields: dict[str, str], due: bytes, tail: tuple[Message, ...], key: str
) -> Inspection:
    def number(name: str) -> int:
        try:
            return int(fields.get(name) or 0)
        except ValueError:
            raise ConversationDamaged(key, f"has no number in {name}") from None

    conversation = Conversation(
        id=conversation_id,
        generation=fields["generation"],
        message_count=number("message_count"),
        summary=Summary(
            fields.get("summary", ""), number("summarized_message_count"), number("version"), number("summary_tokens")
        ),
        tail=tail,
        usage=Usage(
            number("answer_input_tokens"),
            number("answer_output_tokens"),
            number("fold_input_tokens"),
            number("fold_output_tokens"),
        ),
    )
    return Inspection(
        conversation=conversation,
        created_at=number("created_at"),
        updated_at=number("updated_at"),
        window_messages=number("window_messages"),
        fold_due_at=int(float(due)) if due else None,
        fold_failures=number("fold_failures"),
        fold_conflicts=number("fold_conflicts"),
        last_fold_error=fields.get("last_fold_error", ""),
        owner=fields.get("owner", ""),
        metadata=fields.get("metadata", ""),
    )


def _context_json(context: Context) -> bytes:
    """What was sent, by reference: the summary is in the audit trail, the messages are in the history."""
    return encode_json(
        {
            "instructions": context.instructions,
            "summary_version": context.summary_version if context.summary else 0,
            "summary_chars": len(context.summary),
            "summary_in_instructions": context.summary_in_instructions,
            "tail_start": context.tail_start,
            "tail_messages": len(context.tail),
            "gap_messages": context.gap_messages,
            "tokens": {
                "instructions": context.tokens.instructions,
                "summary": context.tokens.summary,
                "tail": context.tokens.tail,
                "message": context.tokens.message,
            },
            "counted_input_tokens": context.counted_input_tokens,
        }
    )


def _context(record: dict[str, Any], summary: str, tail: tuple[Message, ...], message: str, key: str) -> Context:
    try:
        return Context(
            instructions=record["instructions"],
            summary=summary[: record["summary_chars"]],
            summary_version=record["summary_version"],
            tail=tail,
            message=message,
            tail_start=record["tail_start"],
            gap_messages=record["gap_messages"],
            tokens=ContextTokens(**record["tokens"]),
            counted_input_tokens=record["counted_input_tokens"],
            summary_in_instructions=record["summary_in_instructions"],
        )
    except (KeyError, TypeError) as missing:
        raise ConversationDamaged(key, f"lacks {missing}") from None
