"""The store over a real Redis: what it writes, what it costs, and what it does when Redis or a record is not right.

What holds whatever the order of operations is in `test_store_model`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from arq.connections import ArqRedis
from arq.jobs import deserialize_job_raw
from polling import eventually
from redis_view import all_keys, command, dump, places_of, traffic
from turns import BUDGET, MOST_MESSAGES, WINDOW_MESSAGES, append_turns, fold_result, message, turn

from memora.core.conversation import Conversation, Summary
from memora.core.window import select_context
from memora.errors import (
    ConversationDamaged,
    ConversationDeleted,
    ConversationNotFound,
    InvalidId,
    StoreRefused,
)
from memora.fold_queue import FOLD_JOB, QUEUE, deserialize_job, job_id
from memora.store import CommitStatus, ConversationStore, FoldSnapshot

ID = "talk-1"
PARTS = ("history", "summary", "folds", "turns", "context")
SHARED = ("conversations", "pending", "queue")
HOUR_MS = 3_600_000
DAY_MS = 86_400_000

Operation = Callable[[ConversationStore], Awaitable[object]]


def key_of(part: str, shard: int = 0) -> str:
    prefix = f"memora:{{{shard}}}:"
    return prefix + (part if part in SHARED else f"{ID}:{part}")


async def snapshot_of(store: ConversationStore, conversation_id: str = ID) -> FoldSnapshot:
    snapshot = await store.load_fold(conversation_id, most_messages=MOST_MESSAGES, window=WINDOW_MESSAGES)
    assert snapshot is not None
    return snapshot


async def fold(store: ConversationStore, end: int, *, text: str = "a summary", name: str = "") -> CommitStatus:
    committed = await store.commit_fold(
        await snapshot_of(store), end, fold_result(text), fold_id=name or f"to-{end}", window_messages=WINDOW_MESSAGES
    )
    return committed.status


async def fail(store: ConversationStore, snapshot: FoldSnapshot, *, delay_seconds: float = 0.0) -> bool:
    return await store.fail_fold(
        snapshot,
        fold_id="failed",
        reason="no luck",
        rejected=True,
        input_tokens=7,
        output_tokens=3,
        delay_seconds=delay_seconds,
    )


async def sweep(store: ConversationStore, *, again_seconds: float = 5.0) -> tuple[int, int, int]:
    swept = await store.sweep(most=100, again_seconds=again_seconds, lease_seconds=1.0)
    return swept.due, swept.enqueued, swept.dropped


async def read_all(store: ConversationStore) -> None:
    """Every operation that only reads."""
    await store.load(ID, MOST_MESSAGES)
    await store.load_fold(ID, most_messages=MOST_MESSAGES, window=WINDOW_MESSAGES)
    await store.inspect(ID, MOST_MESSAGES)
    assert [m async for m in store.messages(ID)]
    assert [f async for f in store.folds(ID)]
    await store.last_context(ID)
    await store.conversation_ids()


@pytest.fixture
async def filled(store: ConversationStore) -> ConversationStore:
    """Five turns, of which one is folded and one is pending; the last was answered with the summary of the first."""
    await append_turns(store, ID, range(1, 5))
    assert await fold(store, 2) is CommitStatus.COMMITTED
    await append_turns(store, ID, range(5, 6))
    return store


class TestTheJob:
    async def test_it_is_what_arq_itself_would_write(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Both of arq's keys equal those of `enqueue_job`, but for the hour by which the score is early."""
        await append_turns(store, ID, range(1, 5))
        generation = (await store.load(ID, 2)).generation
        name = job_id(ID, generation, 0)
        ours = await job_keys(redis, name)
        await redis.flushall()
        assert await redis.enqueue_job(FOLD_JOB, ID, generation, 0, _job_id=name) is not None
        arqs = await job_keys(redis, name)

        assert ours.keys == arqs.keys & ours.keys
        assert [key for key in arqs.keys if key not in ours.keys] == []
        assert {**ours.payload, "et": 0} == {**arqs.payload, "et": 0}
        assert abs(ours.payload["et"] - arqs.payload["et"]) < 10_000
        assert abs(ours.ttl_ms - arqs.ttl_ms) < 10_000
        assert abs(arqs.ttl_ms - DAY_MS) < 10_000
        assert abs(arqs.score - ours.score - HOUR_MS) < 10_000
        name, arguments, named, attempt, _ = deserialize_job_raw(ours.raw, deserializer=deserialize_job)
        assert (name, list(arguments), named, attempt or None) == (FOLD_JOB, [ID, generation, 0], {}, None)

    async def test_it_is_written_once_while_it_waits(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Further turns do not touch a job that is queued; a commit replaces it by the one for the new count."""
        await append_turns(store, ID, range(1, 5))
        first = await redis.zrange(QUEUE, 0, -1, withscores=True)
        await append_turns(store, ID, range(5, 8))
        assert await redis.zrange(QUEUE, 0, -1, withscores=True) == first
        await fold(store, 2)
        generation = (await store.load(ID, 2)).generation
        assert await redis.zrange(QUEUE, 0, -1) == [job_id(ID, generation, 2).encode()]
        assert [key for key in await all_keys(redis) if key.startswith(b"arq:")] == [
            f"arq:job:{job_id(ID, generation, 2)}".encode()
        ]

    async def test_a_commit_takes_the_job_and_its_tries_away(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A worker that dies right after a commit leaves no key that names the conversation for a day."""
        await append_turns(store, ID, range(1, 5))
        name = job_id(ID, (await store.load(ID, 2)).generation, 0)
        await command(redis, "SET", f"arq:retry:{name}", 1, "EX", 88_400)
        await fold(store, 2)
        assert await places_of(redis, name) == []


class TestClaims:
    async def test_each_job_is_taken_once_in_the_order_asked_for(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """What one worker has taken the next does not get; each claim is a lease from the start."""
        await redis.zadd(QUEUE, {"first": 5, "second": 7, "third": 9})
        asked = ["third", "first", "nowhere", "second"]
        assert await claim(store, asked, most=2) == [("third", 9), ("first", 5)]
        assert await claim(store, asked, most=2) == [("second", 7)]
        assert await claim(store, asked, most=2) == []
        for name in ("first", "second", "third"):
            assert 0 < await redis.pttl(f"arq:in-progress:{name}") <= 700
        assert not await redis.exists("arq:in-progress:nowhere")

    async def test_a_job_is_due_by_the_clock_of_the_worker(self, store: ConversationStore, redis: ArqRedis) -> None:
        """At its score, not a moment before; what is not due stays unclaimed."""
        await redis.zadd(QUEUE, {"delayed": 1_000})
        assert await claim(store, ["delayed"], now_ms=999) == []
        assert not await redis.exists("arq:in-progress:delayed")
        assert await claim(store, ["delayed"], now_ms=1_000) == [("delayed", 1_000)]

    async def test_a_queue_that_is_none_is_named(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Somebody else's key in its place is an error that names it, and nothing is claimed."""
        await command(redis, "SET", QUEUE, "foreign")
        with pytest.raises(ConversationDamaged, match=re.escape(QUEUE)):
            await claim(store, ["first"])
        assert await all_keys(redis) == [QUEUE.encode()]


async def claim(
    store: ConversationStore, names: Sequence[str], *, most: int = 10, now_ms: int = 10_000
) -> list[tuple[str, int]]:
    return await store.claim_jobs(names, most=most, now_ms=now_ms, lease_seconds=0.7)


class Job:
    """The two keys of a job as they are in Redis."""

    def __init__(self, keys: set[bytes], raw: bytes, ttl_ms: int, score: float) -> None:
        self.keys, self.raw, self.ttl_ms, self.score = keys, raw, ttl_ms, score
        self.payload = json.loads(raw)


async def job_keys(redis: ArqRedis, name: str) -> Job:
    key = f"arq:job:{name}"
    keys = {key for key in await all_keys(redis) if b"arq:" in key or key == QUEUE.encode()}
    score = await redis.zscore(QUEUE, name)
    return Job(keys, await redis.get(key), await redis.pttl(key), float(score))


class TestCost:
    async def test_loading_and_appending_are_one_round_trip_each(
        self, filled: ConversationStore, redis: ArqRedis
    ) -> None:
        """A turn costs one command before the model call and one after it."""
        conversation = await filled.load(ID, MOST_MESSAGES)
        async with traffic(redis) as seen:
            await filled.load(ID, MOST_MESSAGES)
        assert [sent.split()[0] for sent in seen.sent] == ["EVALSHA"]
        async with traffic(redis) as seen:
            await filled.append(ID, turn(conversation, 6))
        assert [sent.split()[0] for sent in seen.sent] == ["EVALSHA"]

    async def test_nothing_before_the_summarized_count_is_read(
        self, filled: ConversationStore, redis: ArqRedis
    ) -> None:
        """Of ten messages with two folded, a load asks for the last eight and a fold starts at position two."""
        async with traffic(redis) as seen:
            conversation = await filled.load(ID, MOST_MESSAGES)
        assert [read for read in seen.inside if read.startswith("LRANGE")] == [f"LRANGE {key_of('history')} -8 -1"]
        assert conversation.tail[0].content == "question 2"
        async with traffic(redis) as seen:
            await snapshot_of(filled)
        assert [read for read in seen.inside if read.startswith("LRANGE")] == [
            f"LRANGE {key_of('history')} 2 9",
            f"LRANGE {key_of('history')} -6 -1",
        ]

    async def test_a_long_history_costs_what_a_short_one_does(self, store: ConversationStore, redis: ArqRedis) -> None:
        """At 100,000 messages a load and an append send the same commands and bytes as at 20."""
        costs = []
        for messages in (20, 100_000):
            await seed(redis, messages)
            conversation = await store.load(ID, MOST_MESSAGES)
            assert len(conversation.tail) == 10
            async with traffic(redis) as seen:
                sent_before = await net_output(redis)
                conversation = await store.load(ID, MOST_MESSAGES)
                await store.append(ID, turn(conversation, "x"))
                sent = await net_output(redis) - sent_before
            costs.append((len(seen.sent), len(seen.inside), sent))
        short, long = costs
        assert long[:2] == short[:2]
        assert long[2] == pytest.approx(short[2], rel=0.05)


async def net_output(redis: ArqRedis) -> int:
    return int((await redis.info("stats"))["total_net_output_bytes"])


async def seed(redis: ArqRedis, messages: int, *, generation: str = "g") -> None:
    """A conversation of so many messages of equal length, folded up to the last ten."""
    await redis.flushall()
    records = [
        json.dumps({"role": ("user", "assistant")[n % 2], "content": f"message {n:06}", "tokens": 3, "at": 1})
        for n in range(messages)
    ]
    for start in range(0, messages, 10_000):
        await command(redis, "RPUSH", key_of("history"), *records[start : start + 10_000])
    numbers = {"message_count": messages, "summarized_message_count": messages - 10, "version": 1}
    usage = {"answer_input_tokens": 1, "answer_output_tokens": 1, "fold_input_tokens": 1, "fold_output_tokens": 1}
    fields = {"generation": generation, "summary": "s", "summary_tokens": 1, **numbers, **usage}
    await command(redis, "HSET", key_of("summary"), *(item for pair in fields.items() for item in pair))


class TestTimeToLive:
    async def test_all_keys_share_one_expiry_and_are_refreshed_together(self, redis: ArqRedis) -> None:
        """Each turn moves the expiry of every key, the audit trail's too, to the same millisecond."""
        store = ConversationStore(redis, ttl_seconds=100)
        await append_turns(store, ID, range(1, 5))
        await fold(store, 2)
        first = await expiries(redis)
        assert len(first) == 1
        assert abs(first.pop() - await now_ms(redis) - 100_000) < 5_000
        before = await now_ms(redis)

        async def later() -> bool:
            return await now_ms(redis) > before

        await eventually(later)
        await append_turns(store, ID, range(5, 6))
        assert len(second := await expiries(redis)) == 1
        assert second.pop() >= before + 100_000

    async def test_they_expire_together_and_the_sweep_forgets_the_id(self, redis: ArqRedis) -> None:
        """When its time is over nothing is left of a conversation, and the next sweep takes it off the lists."""
        store = ConversationStore(redis, ttl_seconds=1)
        await append_turns(store, ID, range(1, 5))
        assert await store.conversation_ids() == [ID]

        async def expired() -> bool:
            return not [key for key in await all_keys(redis) if f":{ID}:".encode() in key and b"arq:" not in key]

        await eventually(expired)
        with pytest.raises(ConversationNotFound):
            await store.inspect(ID, MOST_MESSAGES)
        await command(redis, "ZADD", key_of("pending"), 1, ID)
        assert await sweep(store) == (1, 0, 2)
        assert await store.conversation_ids() == []
        assert await redis.zcard(key_of("pending")) == 0

    async def test_switched_off_later_the_next_turn_keeps_everything(self, redis: ArqRedis) -> None:
        """A conversation that was to expire stays when the setting is taken away."""
        await append_turns(ConversationStore(redis, ttl_seconds=100), ID, range(1, 5))
        plain = ConversationStore(redis)
        await append_turns(plain, ID, range(5, 6))
        assert await expiries(redis) == {-1}
        assert not await command(redis, "HEXISTS", key_of("summary"), "expires_at")
        await fold(plain, 2)
        assert await expiries(redis) == {-1}


async def expiries(redis: ArqRedis) -> set[int]:
    found = [await command(redis, "PEXPIRETIME", key_of(part)) for part in PARTS]
    return {expiry for expiry in found if expiry != -2}


async def now_ms(redis: ArqRedis) -> int:
    seconds, microseconds = await redis.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


@asynccontextmanager
async def full(redis: ArqRedis) -> AsyncIterator[None]:
    await redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await redis.config_set("maxmemory", 0)


@asynccontextmanager
async def read_only(redis: ArqRedis) -> AsyncIterator[None]:
    await command(redis, "REPLICAOF", "127.0.0.1", 1)
    try:
        yield
    finally:
        await command(redis, "REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def without_replicas(redis: ArqRedis) -> AsyncIterator[None]:
    await redis.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        await redis.config_set("min-replicas-to-write", 0)


class TestRedisThatRefuses:
    @pytest.mark.parametrize("trouble", [full, read_only, without_replicas])
    async def test_nothing_is_half_written_and_it_heals(
        self,
        filled: ConversationStore,
        redis: ArqRedis,
        trouble: Callable[[ArqRedis], object],
    ) -> None:
        """Full, read-only or without its replicas: reads go on, writes are refused whole, and later it all works."""
        conversation = await filled.load(ID, MOST_MESSAGES)
        snapshot = await snapshot_of(filled)
        before = await dump(redis)
        async with trouble(redis):  # type: ignore[attr-defined]  # each of them is a context manager
            await read_all(filled)
            with pytest.raises(StoreRefused) as refused:
                await filled.append(ID, turn(conversation, 6))
            assert refused.value.retryable
            assert refused.value.code == "storage_unavailable"
            with pytest.raises(StoreRefused):
                await filled.append("new-talk", turn(Conversation("new-talk"), 1))
            with pytest.raises(StoreRefused):
                await filled.commit_fold(snapshot, 4, fold_result(), fold_id="x", window_messages=WINDOW_MESSAGES)
            with pytest.raises(StoreRefused):
                await fail(filled, snapshot)
            assert await dump(redis) == before
        assert (await filled.append(ID, turn(conversation, 6))).message_count == 12
        assert await fold(filled, 4) is CommitStatus.COMMITTED

    async def test_a_full_redis_still_deletes(self, filled: ConversationStore, redis: ArqRedis) -> None:
        """Deleting is what makes room."""
        async with full(redis):
            assert await filled.delete(ID)
        assert await all_keys(redis) == []

    async def test_a_flushed_script_cache_goes_unnoticed(self, filled: ConversationStore, redis: ArqRedis) -> None:
        """After SCRIPT FLUSH, or a restart, every operation works at the first try."""
        await command(redis, "SCRIPT", "FLUSH")
        await append_turns(filled, ID, range(6, 7))
        await command(redis, "SCRIPT", "FLUSH")
        assert await fold(filled, 4) is CommitStatus.COMMITTED
        await command(redis, "SCRIPT", "FLUSH")
        await read_all(filled)


READERS: dict[str, Operation] = {
    "load": lambda store: store.load(ID, MOST_MESSAGES),
    "load_fold": snapshot_of,
    "inspect": lambda store: store.inspect(ID, MOST_MESSAGES),
    "messages": lambda store: _all(store.messages(ID)),
    "folds": lambda store: _all(store.folds(ID)),
    "last_context": lambda store: store.last_context(ID),
}


async def _all(items: AsyncIterator[object]) -> list[object]:
    return [item async for item in items]


async def damage_met(operation: Operation, store: ConversationStore) -> str:
    """The key that an operation complains about; "" if it did not."""
    try:
        await operation(store)
    except ConversationDamaged as damaged:
        return damaged.key if damaged.key in str(damaged) and not damaged.retryable else f"not in {damaged}"
    return ""


class TestDamage:
    @pytest.mark.parametrize("part", [*PARTS, *SHARED])
    async def test_a_key_of_the_wrong_kind_is_named_and_nothing_changes(
        self, filled: ConversationStore, redis: ArqRedis, part: str
    ) -> None:
        """A turn is refused with the name of the key, before anything was written."""
        conversation = await filled.load(ID, MOST_MESSAGES)
        await redis.delete(key_of(part))
        await command(redis, "SADD", key_of(part), "foreign")
        before = await dump(redis)
        assert await damage_met(lambda store: store.append(ID, turn(conversation, 6)), filled) == key_of(part)
        for operation in READERS.values():
            assert await damage_met(operation, filled) in ("", key_of(part))
        assert await dump(redis) == before

    @pytest.mark.parametrize(
        ("part", "name"),
        [
            *((part, name) for part in ("history", "summary") for name in READERS),
            *(("folds", name) for name in ("folds", "last_context")),
        ],
    )
    async def test_readers_never_answer_from_a_key_of_the_wrong_kind(
        self, filled: ConversationStore, redis: ArqRedis, part: str, name: str
    ) -> None:
        """Whatever reads the key says so, and never takes it for empty."""
        await redis.delete(key_of(part))
        await command(redis, "SET", key_of(part), "foreign")
        assert await damage_met(READERS[name], filled) == key_of(part)

    @pytest.mark.parametrize(
        ("part", "record"),
        [
            ("history", '{"role":"user","content":"cut of'),
            ("history", "[]"),
            ("history", "17"),
            ("history", "\udcff\udcfe"),
            ("history", '{"role":"system","content":"x","tokens":1}'),
            ("history", '{"role":"user","content":["x"],"tokens":1}'),
            ("history", '{"role":"user","content":"x"}'),
            ("history", '{"role":"user","content":"x","tokens":1,"at":"noon"}'),
            ("history", '{"role":"user","content":"x","tokens":1,"phase":7}'),
            ("history", "[" * 5_000),
            ("folds", '{"version":1,"from":0'),
            ("folds", '{"version":1}'),
            ("folds", "null"),
            ("folds", '{"version":"one","from":0,"to":2,"summary":"s","model":"m","input_tokens":1,"output_tokens":1,'
             '"duration_seconds":0,"at":1}'),
            ("folds", '{"version":1,"from":0,"to":2,"summary":null,"model":"m","input_tokens":1,"output_tokens":1,'
             '"duration_seconds":0,"at":1}'),
            ("folds", '{"version":1,"from":0,"to":2,"summary":"s","model":"m","input_tokens":1,"output_tokens":1,'
             '"duration_seconds":0,"at":1,"notes":null}'),
            ("context", "{"),
            ("context", "[]"),
            ("context", '{"summary_version":1,"tail_start":2,"tail_messages":8,"position":8}'),
            ("context", '{"summary_version":"1","tail_start":"2","tail_messages":"x","position":"8"}'),
            ("context", '{"summary_version":"1","tail_start":"2","tail_messages":"8","position":"8"}'),
            ("context", '{"summary_version":1,"tail_start":2,"tail_messages":8,"position":99}'),
        ],
    )  # fmt: skip
    async def test_a_truncated_or_foreign_record_is_named_and_left_alone(
        self, filled: ConversationStore, redis: ArqRedis, part: str, record: str
    ) -> None:
        """A record that is not ours raises with the key's name wherever it is read; nothing mends it silently."""
        raw = record.encode(errors="surrogateescape")
        if part == "context":
            await command(redis, "SET", key_of(part), raw)
        else:
            await command(redis, "LSET", key_of(part), -1, raw)
        before = await dump(redis)
        found = {name: await damage_met(operation, filled) for name, operation in READERS.items()}
        readers = {"history": {"load", "load_fold", "inspect", "messages"}, "folds": {"folds"}, "context": set()}
        assert {name for name, key in found.items() if key == key_of(part)} >= readers[part]
        assert set(found.values()) <= {"", key_of(part)}
        if part != "history":
            assert found["last_context"] == key_of(part)
        assert await dump(redis) == before

    @pytest.mark.parametrize(
        "field",
        [
            *("message_count", "summarized_message_count", "version"),
            *("answer_input_tokens", "answer_output_tokens", "fold_input_tokens", "fold_output_tokens"),
        ],
    )
    @pytest.mark.parametrize("value", ["x", "1.5", "nan", "1e3", "99999999999999999999999", ""])
    async def test_a_broken_number_stops_the_turn_before_the_first_write(
        self, filled: ConversationStore, redis: ArqRedis, field: str, value: str
    ) -> None:
        """A counter that cannot be counted on must not leave half a turn: scripts do not roll back."""
        conversation, snapshot = await filled.load(ID, MOST_MESSAGES), await snapshot_of(filled)
        await command(redis, "HSET", key_of("summary"), field, value)
        before = await dump(redis)
        for operation in (
            lambda store: store.append(ID, turn(conversation, 6)),
            lambda store: store.commit_fold(snapshot, 4, fold_result(), fold_id="x", window_messages=WINDOW_MESSAGES),
            lambda store: fail(store, snapshot),
            *READERS.values(),
        ):
            assert await damage_met(operation, filled) == key_of("summary")
        assert await dump(redis) == before
        assert await filled.delete(ID)

    @pytest.mark.parametrize("field", ["created_at", "updated_at", "summary_tokens", "fold_failures", "fold_conflicts"])
    async def test_a_broken_number_is_met_as_damage_by_whoever_reads_it(
        self, filled: ConversationStore, redis: ArqRedis, field: str
    ) -> None:
        """Looking at a conversation with a foreign field names the key, and is no crash."""
        await command(redis, "HSET", key_of("summary"), field, "soon")
        assert await damage_met(READERS["inspect"], filled) == key_of("summary")

    async def test_a_summary_that_is_not_text_is_damage(self, filled: ConversationStore, redis: ArqRedis) -> None:
        """Bytes that are not UTF-8 are never sent to a model, nor a crash."""
        await command(redis, "HSET", key_of("summary"), "summary", b"caf\xe9")
        for name in ("load", "load_fold", "inspect"):
            assert await damage_met(READERS[name], filled) == key_of("summary")

    @pytest.mark.parametrize("gone", ["history", "summary", "folds"])
    async def test_half_a_conversation_is_never_answered_from(
        self, filled: ConversationStore, redis: ArqRedis, gone: str
    ) -> None:
        """A key that Redis evicted is missed, and what is left stays as it is until somebody decides."""
        conversation, snapshot = await filled.load(ID, MOST_MESSAGES), await snapshot_of(filled)
        await redis.delete(key_of(gone))
        before = await dump(redis)
        key = key_of("history" if gone == "history" else gone)
        assert await damage_met(
            lambda store: store.commit_fold(snapshot, 4, fold_result(), fold_id="x", window_messages=6), filled
        ) in (key, key_of("summary"))
        if gone != "folds":
            for operation in (*READERS.values(), lambda store: store.append(ID, turn(conversation, 6))):
                assert await damage_met(operation, filled) in (key, key_of("summary"))
        assert await dump(redis) == before

    async def test_a_trimmed_history_is_never_answered_from(self, filled: ConversationStore, redis: ArqRedis) -> None:
        """Messages that somebody took away are missed."""
        await command(redis, "LTRIM", key_of("history"), 0, -2)
        for operation in READERS.values():
            assert await damage_met(operation, filled) == key_of("history")

    async def test_half_a_turn_is_damage(self, filled: ConversationStore, redis: ArqRedis) -> None:
        """A count inside a turn would make a context that starts with an answer to nothing."""
        await command(redis, "HSET", key_of("summary"), "summarized_message_count", 3)
        for operation in READERS.values():
            assert await damage_met(operation, filled) == key_of("summary")

    @pytest.mark.parametrize("part", [*PARTS, *SHARED])
    async def test_what_is_damaged_can_be_deleted(self, filled: ConversationStore, redis: ArqRedis, part: str) -> None:
        """Deleting works whatever a key holds, and leaves nothing but the foreign list it cannot read."""
        await redis.delete(key_of(part))
        await command(redis, "SADD", key_of(part), "foreign")
        assert await filled.delete(ID)
        left = [key for key in await all_keys(redis) if key != key_of(part).encode()]
        assert left == [] if part != "queue" else [key for key in left if b":job:" not in key] == []
        if part not in SHARED:
            assert await all_keys(redis) == []
            await append_turns(filled, ID, range(1, 2))


class TestReading:
    async def test_it_changes_nothing(self, filled: ConversationStore, redis: ArqRedis) -> None:
        """After every reading operation each key is byte for byte what it was, expiry included."""
        before = await dump(redis)
        await read_all(filled)
        assert await dump(redis) == before

    async def test_a_second_store_attaches_and_changes_nothing(
        self, filled: ConversationStore, redis: ArqRedis
    ) -> None:
        """A restart is a new store over a filled Redis."""
        before = await dump(redis)
        again = ConversationStore(redis)
        assert (await again.load(ID, MOST_MESSAGES)) == await filled.load(ID, MOST_MESSAGES)
        assert await dump(redis) == before

    async def test_created_at_is_set_once(self, filled: ConversationStore) -> None:
        """Further turns and folds leave the beginning of a conversation alone."""
        first = (await filled.inspect(ID, 2)).created_at
        await append_turns(filled, ID, range(6, 8))
        await fold(filled, 4)
        after = await filled.inspect(ID, 2)
        assert after.created_at == first
        assert after.updated_at >= first

    async def test_the_history_pages_through_everything(self, store: ConversationStore, redis: ArqRedis) -> None:
        """More than one page of messages and of folds comes back whole and in order."""
        await seed(redis, 1_200)
        record = {"summary": "s", "model": "m", "input_tokens": 1, "output_tokens": 1, "duration_seconds": 0.1, "at": 1}
        trail = [json.dumps({"version": n, "from": 2 * n - 2, "to": 2 * n, **record}) for n in range(1, 596)]
        await command(redis, "RPUSH", key_of("folds"), *trail)
        assert [m.content async for m in store.messages(ID)] == [f"message {n:06}" for n in range(1_200)]
        assert [(f.start, f.end) async for f in store.folds(ID)] == [(n, n + 2) for n in range(0, 1_190, 2)]

    async def test_a_deletion_between_two_pages_is_said(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A reader half-way through never gets the rest of a later life of the id."""
        await seed(redis, 1_200)
        reading = store.messages(ID)
        assert (await anext(reading)).content == "message 000000"
        await seed(redis, 1_200, generation="another")
        with pytest.raises(ConversationDeleted):
            await _all(reading)


class TestIds:
    @pytest.mark.parametrize(
        "bad",
        [
            *("", " ", "a b", "*", "?", "a:b", "{x}", "{0}:a", "a\n", "\r\nDEL x", "../a", "%00", "a\x00", "é", "日本"),
            *("x" * 129, "x" * 5_000, "a.b", "\ud800", "١"),
        ],
    )
    async def test_other_ids_never_reach_redis(self, store: ConversationStore, redis: ArqRedis, bad: str) -> None:
        """An id outside the form is refused before a single command is sent."""
        fine = await snapshot_of_new(store)
        async with traffic(redis) as seen:
            for operation in (
                lambda: store.load(bad, 2),
                lambda: store.append(bad, turn(Conversation(bad), 1)),
                lambda: store.load_fold(bad, most_messages=2, window=2),
                lambda: store.settle_fold(bad, None),
                lambda: store.inspect(bad, 2),
                lambda: store.delete(bad),
                lambda: store.last_context(bad),
                lambda: _all(store.messages(bad)),
                lambda: _all(store.folds(bad)),
                lambda: store.commit_fold(
                    replace(fine, conversation_id=bad), 2, fold_result(), fold_id="x", window_messages=0
                ),
                lambda: fail(store, replace(fine, conversation_id=bad)),
            ):
                with pytest.raises(InvalidId):
                    await operation()
        assert seen.sent == []

    @pytest.mark.parametrize("good", ["a", "x" * 128, "-", "_", "A-Z_09", "history", "0"])
    async def test_every_id_of_the_form_works(self, store: ConversationStore, good: str) -> None:
        """Also one that looks like a key's part or an option."""
        await append_turns(store, good, range(1, 2))
        assert [m.content async for m in store.messages(good)] == ["question 1", "answer 1"]


async def snapshot_of_new(store: ConversationStore) -> FoldSnapshot:
    await append_turns(store, ID, range(1, 2))
    return await snapshot_of(store)


class TestLastContext:
    async def test_it_is_what_was_sent(self, filled: ConversationStore) -> None:
        """Summary, tail and message come back as they went out, after further folds too."""
        conversation = await filled.load(ID, MOST_MESSAGES)
        sent = turn(conversation, 6)
        await filled.append(ID, sent)
        assert (await filled.last_context(ID)) == sent.context
        await fold(filled, 4, text="another summary")
        await fold(filled, 6, text="yet another")
        assert (await filled.last_context(ID)) == sent.context

    async def test_a_shortened_summary_comes_back_as_short_as_it_was_sent(self, store: ConversationStore) -> None:
        """The record holds how much of the summary went out."""
        await append_turns(store, ID, range(1, 5))
        await fold(store, 2, text="The user lives in Taipei. " * 40)
        conversation = await store.load(ID, MOST_MESSAGES)
        tight = replace(BUDGET, max_input_tokens=150)
        sent = replace(turn(conversation, 5), context=select_context(conversation, "Be brief.", "question 5", tight))
        assert 0 < len(sent.context.summary) < len(conversation.summary.text)
        await store.append(ID, sent)
        assert (await store.last_context(ID)) == sent.context

    async def test_a_summary_that_had_to_be_left_out_is_not_made_up(self, store: ConversationStore) -> None:
        """With no room for any of the summary, the context says that none was sent."""
        await append_turns(store, ID, range(1, 5))
        await fold(store, 2, text="The user lives in Taipei. " * 40)
        conversation = await store.load(ID, MOST_MESSAGES)
        tight = replace(BUDGET, max_input_tokens=64)
        sent = replace(turn(conversation, 5), context=select_context(conversation, "Be brief.", "question 5", tight))
        assert sent.context.summary == ""
        await store.append(ID, sent)
        context = await store.last_context(ID)
        assert context is not None
        assert context.request == sent.context.request
        assert context.gap_messages == sent.context.gap_messages

    async def test_a_turn_stored_in_between_does_not_slip_in(self, filled: ConversationStore) -> None:
        """Two turns answered at the same time: each context is what its own request was."""
        conversation = await filled.load(ID, MOST_MESSAGES)
        first, second = turn(conversation, 6), turn(conversation, 7)
        await filled.append(ID, first)
        await filled.append(ID, second)
        context = await filled.last_context(ID)
        assert context is not None
        assert context.request == second.context.request
        assert "question 6" not in str(context.request)

    async def test_a_conversation_without_one_has_none(self, store: ConversationStore) -> None:
        """No such conversation: None, no error."""
        assert await store.last_context(ID) is None


class TestDeletion:
    async def test_no_key_and_no_id_is_left_anywhere(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Every key and every value is searched, the queue's included, and the search is proven not to be blind."""
        await append_turns(store, ID, range(1, 5))
        await fold(store, 2, text="MARKER is in the summary")
        conversation = await store.load(ID, MOST_MESSAGES)
        marked = replace(turn(conversation, 5), user=message("user", "MARKER here"))
        await store.append(ID, marked)
        name = job_id(ID, conversation.generation, 2)
        for prefix in ("arq:retry:", "arq:in-progress:", "arq:result:"):
            await command(redis, "SET", prefix + name, 1, "EX", 100)
        await append_turns(store, "other", range(1, 5))
        before_other = await places_of(redis, "other")

        assert len(await places_of(redis, ID)) >= len(PARTS) + 7
        assert await places_of(redis, "MARKER") == [
            f"value of {key_of(part)}" for part in ("folds", "history", "summary")
        ]
        assert await store.delete(ID)
        assert await places_of(redis, ID) == []
        assert await places_of(redis, "MARKER") == []
        assert await places_of(redis, conversation.generation) == []
        assert await places_of(redis, "other") == before_other
        assert not await store.delete(ID)

    async def test_a_turn_that_was_being_answered_is_not_stored(self, filled: ConversationStore) -> None:
        """Neither into nothing nor into the next life of the id."""
        answering = await filled.load(ID, MOST_MESSAGES)
        await filled.delete(ID)
        with pytest.raises(ConversationDeleted):
            await filled.append(ID, turn(answering, 6))
        await append_turns(filled, ID, range(1, 2))
        with pytest.raises(ConversationDeleted):
            await filled.append(ID, turn(answering, 6))
        assert [m.content async for m in filled.messages(ID)] == ["question 1", "answer 1"]

    async def test_a_fold_of_the_former_life_does_not_land(self, filled: ConversationStore, redis: ArqRedis) -> None:
        """Zero equals zero: the count alone would let it in, the generation does not."""
        await filled.delete(ID)
        await append_turns(filled, ID, range(1, 5))
        dead = await snapshot_of(filled)
        await filled.delete(ID)
        await append_turns(filled, ID, range(11, 15))
        before = await dump(redis)
        committed = await filled.commit_fold(dead, 2, fold_result("dead"), fold_id="d", window_messages=6)
        assert committed.status is CommitStatus.GONE
        assert not await fail(filled, dead)
        assert await dump(redis) == before


class TestFoldRecords:
    async def test_two_folds_from_one_snapshot_commit_once(self, store: ConversationStore) -> None:
        """The loser changes nothing but what it cost, and the conflict is counted."""
        await append_turns(store, ID, range(1, 6))
        snapshot = await snapshot_of(store)
        results = await asyncio.gather(
            *(
                store.commit_fold(snapshot, 4, fold_result(f"by {n}"), fold_id=f"f{n}", window_messages=6)
                for n in range(5)
            )
        )
        assert sorted(result.status.value for result in results) == [0, 0, 0, 0, 1]
        inspection = await store.inspect(ID, 2)
        assert inspection.conversation.summary.version == 1
        assert inspection.conversation.usage.fold_tokens == 5 * 10
        assert inspection.fold_conflicts == 4
        assert len([f async for f in store.folds(ID)]) == 1

    async def test_a_failure_is_recorded_and_a_commit_forgets_it(self, store: ConversationStore) -> None:
        """Reason, count and next try can be seen; summary and count stay as they were."""
        await append_turns(store, ID, range(1, 5))
        snapshot = await snapshot_of(store)
        assert await fail(store, snapshot, delay_seconds=60)
        failed = await store.inspect(ID, 2)
        assert (failed.fold_failures, failed.last_fold_error) == (1, "no luck")
        assert failed.conversation.summary == Summary()
        assert failed.conversation.usage.fold_tokens == 10
        assert failed.fold_due_at is not None
        assert abs(failed.fold_due_at - failed.updated_at - 60_000) < 5_000
        assert (await snapshot_of(store)).rejections == 1
        await fold(store, 2)
        healed = await store.inspect(ID, 2)
        assert (healed.fold_failures, healed.last_fold_error, healed.fold_due_at) == (0, "", None)

    async def test_more_pending_work_is_asked_for_under_the_new_count(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """A commit that leaves something over enqueues the next fold in the same step."""
        await append_turns(store, ID, range(1, 7))
        assert await fold(store, 2) is CommitStatus.COMMITTED
        generation = (await store.load(ID, 2)).generation
        assert await redis.zrange(QUEUE, 0, -1) == [job_id(ID, generation, 2).encode()]
        assert await fold(store, 6) is CommitStatus.COMMITTED
        assert await redis.zrange(QUEUE, 0, -1) == []
        assert await redis.zrange(key_of("pending"), 0, -1) == []


class TestSweep:
    async def test_a_lost_job_is_enqueued_again(self, store: ConversationStore, redis: ArqRedis) -> None:
        """The outbox survives the queue: what is overdue gets its job back, what is not is left alone."""
        await append_turns(store, ID, range(1, 5))
        name = job_id(ID, (await store.load(ID, 2)).generation, 0)
        await redis.delete(QUEUE, f"arq:job:{name}")
        assert await sweep(store) == (0, 0, 0)
        await command(redis, "ZADD", key_of("pending"), 1, ID)
        assert await sweep(store) == (1, 1, 0)
        assert await redis.zrange(QUEUE, 0, -1) == [name.encode()]
        assert await redis.pttl(f"arq:job:{name}") > 0
        # It is not looked at again before its time.
        assert await sweep(store) == (0, 0, 0)

    async def test_a_waiting_job_is_not_doubled(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A job that is there, however late, keeps its place."""
        await append_turns(store, ID, range(1, 5))
        before = await redis.zrange(QUEUE, 0, -1, withscores=True)
        await command(redis, "ZADD", key_of("pending"), 1, ID)
        assert await sweep(store) == (1, 0, 0)
        assert await redis.zrange(QUEUE, 0, -1, withscores=True) == before

    async def test_the_claim_of_a_dead_worker_is_cut_to_a_lease(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """A claim with arq's long timeout is shortened; one under a lease is not touched."""
        await append_turns(store, ID, range(1, 5))
        claim = "arq:in-progress:" + job_id(ID, (await store.load(ID, 2)).generation, 0)
        await command(redis, "SET", claim, 1, "PX", 490_000)
        await command(redis, "ZADD", key_of("pending"), 1, ID)
        await sweep(store)
        assert 0 < await redis.pttl(claim) <= 1_000
        await command(redis, "SET", claim, 1, "PX", 700)
        await command(redis, "ZADD", key_of("pending"), 1, ID)
        await sweep(store)
        assert 0 < await redis.pttl(claim) <= 700

    async def test_a_damaged_conversation_does_not_stop_it(self, store: ConversationStore, redis: ArqRedis) -> None:
        """The others are seen to, and the damaged one stays as it is."""
        for name in ("a-1", "a-2", "a-3"):
            await append_turns(store, name, range(1, 5))
            await command(redis, "ZADD", key_of("pending"), 1, name)
        await redis.delete(QUEUE, *[key for key in await all_keys(redis) if key.startswith(b"arq:job:")])
        await command(redis, "SET", "memora:{0}:a-2:summary", "foreign")
        assert await sweep(store) == (3, 2, 0)
        assert await redis.get("memora:{0}:a-2:summary") == b"foreign"

    async def test_a_name_that_is_no_text_is_taken_off_the_queue(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Arq decodes every name in its queue, and one it cannot decode would stop every worker for good."""
        await append_turns(store, ID, range(1, 5))
        await command(redis, "ZADD", QUEUE, 1, b"\xff\xfe")
        await sweep(store)
        assert [name.decode()[:5] for name in await redis.zrange(QUEUE, 0, -1)] == ["fold:"]


class TestShards:
    async def test_conversations_of_different_shards_live_side_by_side(self, redis: ArqRedis) -> None:
        """Ids, sweeps, folds and deletions reach every shard; a conversation's keys are all in its own."""
        store = ConversationStore(redis, shards=8)
        ids = [f"talk-{n}" for n in range(12)]
        for name in ids:
            await append_turns(store, name, range(1, 5))
        prefixes = {key.split(b"}")[0] for key in await all_keys(redis) if key.endswith(b":history")}
        assert len(prefixes) > 3
        assert sorted(await store.conversation_ids()) == sorted(ids)
        for prefix in prefixes:
            for name in await redis.zrange(prefix + b"}:pending", 0, -1):
                await command(redis, "ZADD", prefix + b"}:pending", 1, name)
        await redis.delete(QUEUE, *[key for key in await all_keys(redis) if key.startswith(b"arq:job:")])
        assert await sweep(store) == (12, 12, 0)
        assert await redis.zcard(QUEUE) == 12
        for name in ids:
            snapshot = await snapshot_of(store, name)
            committed = await store.commit_fold(snapshot, 2, fold_result(), fold_id="f", window_messages=6)
            assert committed.status is CommitStatus.COMMITTED
            assert (await anext(store.messages(name))).content == "question 1"
            assert await store.delete(name)
        assert await all_keys(redis) == []
