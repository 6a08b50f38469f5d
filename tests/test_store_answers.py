"""What single operations of the store answer and leave behind at their borders, to the number.

What holds whatever the order of operations is in `test_store_model` and `test_schedules`; what a damaged or refusing
Redis does is in `test_store`.
"""

from __future__ import annotations

import pytest
from arq.connections import ArqRedis
from redis_view import all_keys, command, dump
from turns import MOST_MESSAGES, WINDOW_MESSAGES, append_turns, fold_result, turn

from memora.core.conversation import Conversation
from memora.errors import ConversationDamaged, ConversationLocked
from memora.fold_queue import QUEUE, job_id
from memora.store import (
    SWEEP_GRACE_MS,
    BegunTurn,
    Busy,
    CommitStatus,
    ConversationStore,
    FoldSnapshot,
    StoredTurn,
)

ID = "talk-1"
SHARED = ("conversations", "pending", "queue")
TURN_IDS_KEPT = 64


def key_of(part: str) -> str:
    return f"memora:{{0}}:{part}" if part in SHARED else f"memora:{{0}}:{ID}:{part}"


async def snapshot_of(store: ConversationStore) -> FoldSnapshot:
    snapshot = await store.load_fold(ID, most_messages=MOST_MESSAGES, window=WINDOW_MESSAGES)
    assert snapshot is not None
    return snapshot


async def fold(store: ConversationStore, end: int, text: str = "a summary") -> None:
    committed = await store.commit_fold(
        await snapshot_of(store), end, fold_result(text), fold_id=f"to-{end}", window_messages=WINDOW_MESSAGES
    )
    assert committed.status is CommitStatus.COMMITTED


async def begin(
    store: ConversationStore, token: str, turn_id: str = "new", *, lease_seconds: float = 100.0, fingerprint: str = ""
) -> BegunTurn | Busy | StoredTurn | None:
    return await store.begin_turn(
        ID,
        lock_token=token,
        lease_seconds=lease_seconds,
        turn_id=turn_id,
        fingerprint=fingerprint,
        most_messages=MOST_MESSAGES,
    )


async def now_ms(redis: ArqRedis) -> int:
    seconds, microseconds = await redis.time()
    return int(seconds) * 1_000 + int(microseconds) // 1_000


class TestTurnsRemembered:
    async def test_the_oldest_turn_ids_go_first(self, store: ConversationStore, redis: ArqRedis) -> None:
        """The newest sixty-four turns are safe to send again; those before them are forgotten, oldest first."""
        turns = TURN_IDS_KEPT + 3
        await append_turns(store, ID, range(turns))
        remembered = await redis.zrange(key_of("turns"), 0, -1)
        assert remembered == [f"turn-{number}".encode() for number in range(turns - TURN_IDS_KEPT, turns)]
        conversation = await store.load(ID, MOST_MESSAGES)
        repeated = await store.append(ID, turn(conversation, turns - TURN_IDS_KEPT))
        assert (repeated.repeated, repeated.message_count) == (True, 2 * turns)


class TestTheOutbox:
    async def test_after_a_turn_and_after_a_commit_the_sweep_gives_the_fold_its_time(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """A fold is overdue only when its grace is over, counted from when it was enqueued."""
        await append_turns(store, ID, range(6))
        for end in (0, 2):
            if end:
                await redis.zadd(key_of("pending"), {ID: 1})
                await fold(store, end)
            due = (await store.inspect(ID, 2)).fold_due_at
            assert due is not None
            assert abs(due - await now_ms(redis) - SWEEP_GRACE_MS) < SWEEP_GRACE_MS / 2

    @pytest.mark.parametrize("part", SHARED)
    async def test_a_damaged_list_is_named_by_the_sweep_before_it_writes(
        self, store: ConversationStore, redis: ArqRedis, part: str
    ) -> None:
        """With one of its lists foreign, the sweep changes nothing in the others."""
        await append_turns(store, ID, range(4))
        await redis.zadd(key_of("pending"), {ID: 1, "gone": 1})
        await redis.zadd(key_of("conversations"), {"gone": 1})
        await redis.delete(key_of(part))
        await command(redis, "SADD", key_of(part), "foreign")
        before = await dump(redis)
        with pytest.raises(ConversationDamaged) as damaged:
            await store.sweep(most=100, again_seconds=5.0, lease_seconds=1.0)
        assert damaged.value.key == key_of(part)
        assert await dump(redis) == before


class TestBeginning:
    async def test_a_conversation_that_does_not_say_when_it_began(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Without `created_at` the answer is 0 everywhere, and the turn goes on."""
        await append_turns(store, ID, range(2))
        await command(redis, "HDEL", key_of("summary"), "created_at")
        stored = await begin(store, "mine", "turn-1")
        assert isinstance(stored, StoredTurn)
        assert (stored.position, stored.user.content, stored.created_at) == (2, "question 1", 0)
        begun = await begin(store, "mine")
        assert isinstance(begun, BegunTurn)
        assert begun.created_at == 0
        page = await store.page(ID, 0, 2)
        assert page
        assert page.created_at == 0
        assert await store.set_metadata(ID, owner="", metadata={})


class TestTakingBack:
    async def test_sent_again_it_finds_what_it_did(self, store: ConversationStore) -> None:
        """After a lost reply the same removal answers as before; for what it did not do, the lock is another's."""
        await append_turns(store, ID, range(3))
        await begin(store, "mine")
        generation = (await store.load(ID, 2)).generation
        assert await store.remove_message(ID, generation, 2, lock_token="mine")
        assert await store.remove_message(ID, generation, 2, lock_token="mine")
        for position in (1, 3, 6):
            with pytest.raises(ConversationLocked):
                await store.remove_message(ID, generation, position, lock_token="mine")
        assert [m.absent async for m in store.messages(ID)] == [False, False, True, False, False, False]


class TestDeletion:
    @pytest.mark.parametrize("gone", ["history", "summary"])
    async def test_half_a_conversation_takes_its_job_along(
        self, store: ConversationStore, redis: ArqRedis, gone: str
    ) -> None:
        """Also when the state that names the job is gone; the jobs of others stay."""
        await append_turns(store, "other", range(4))
        others = await all_keys(redis)
        await append_turns(store, ID, range(4))
        await redis.delete(key_of(gone))
        assert await store.delete(ID)
        assert await all_keys(redis) == others
        generation = (await store.load("other", 2)).generation
        assert await redis.zrange(QUEUE, 0, -1) == [job_id("other", generation, 0).encode()]

    async def test_what_was_never_there(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Nothing to delete, nothing deleted: a job in the queue that only begins alike is not looked for."""
        await redis.zadd(QUEUE, {job_id(ID, "g", 0): 1})
        assert not await store.delete(ID)
        assert await redis.zcard(QUEUE) == 1
        assert await store.load(ID, 2) == Conversation(ID)
