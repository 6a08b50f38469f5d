"""What single operations of the store answer and leave behind at their borders, to the number.

What holds whatever the order of operations is in `test_store_model` and `test_schedules`; what a damaged or refusing
Redis does is in `test_store`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from arq.connections import ArqRedis
from polling import eventually
from redis_view import all_keys, command, dump, places_of
from turns import MOST_MESSAGES, WINDOW_MESSAGES, append_turns, fold_result, message, turn

from memora.audit_store import PAGE_BYTES, AuditStore, FoundJob, PageWanted, RawPage
from memora.core.auditing import Change, RepairKind, StoredConversation
from memora.core.conversation import Conversation, Message, Summary, Usage
from memora.embedded_redis import EmbeddedRedis
from memora.errors import (
    ConversationDamaged,
    ConversationDeleted,
    ConversationLocked,
    ConversationNotFound,
    MemoraError,
    MessageSummarized,
)
from memora.fold_queue import QUEUE, job_id
from memora.redis_connection import close_redis, open_redis
from memora.store import (
    SWEEP_GRACE_MS,
    Appended,
    Backlog,
    BegunTurn,
    Busy,
    CommitStatus,
    Committed,
    ConversationStore,
    Fold,
    FoldSnapshot,
    NoSuchVersion,
    Rewound,
    StoredTurn,
    Swept,
    message_record,
    new_generation,
)

ID = "talk-1"
LASTING = ("history", "summary", "folds", "turns", "context", "events")
SHARED = ("conversations", "pending", "queue")
TURN_IDS_KEPT = 64
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def audits(redis: ArqRedis) -> AuditStore:
    """What an audit reads and a repair writes, over the emptied server."""
    return AuditStore(redis)


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


async def fail(
    store: ConversationStore, snapshot: FoldSnapshot, name: str, *, delay_seconds: float = 0.0, rejected: bool = False
) -> bool:
    return await store.fail_fold(
        snapshot,
        fold_id=name,
        reason="no luck",
        rejected=rejected,
        input_tokens=7,
        output_tokens=3,
        delay_seconds=delay_seconds,
    )


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


async def hints_of(store: ConversationStore, redis: ArqRedis, channel: str, *, until: str) -> list[str]:
    """What is said on a channel during turns, folds that fail, commit and lose, and a deletion."""
    hints: list[str] = []
    async with redis.pubsub() as watching:
        await watching.subscribe(channel)
        await append_turns(store, ID, range(4))
        snapshot = await snapshot_of(store)
        await fail(store, snapshot, "f1")
        await fold(store, 2)
        await store.commit_fold(snapshot, 2, fold_result(), fold_id="late", window_messages=WINDOW_MESSAGES)
        await store.delete(ID)

        async def is_told() -> bool:
            told = await watching.get_message(ignore_subscribe_messages=True)
            hints.extend([told["data"].decode()] if told else [])
            return hints[-1:] == [until]

        await eventually(is_told)
    return hints


async def sweep(store: ConversationStore, *, most: int = 100) -> Swept:
    return await store.sweep(most=most, again_seconds=5.0, lease_seconds=1.0)


async def later(redis: ArqRedis) -> None:
    """Wait until the clock of Redis has moved on, so that what comes next is newer."""
    before = await now_ms(redis)

    async def has_moved() -> bool:
        return await now_ms(redis) > before

    await eventually(has_moved)


async def now_ms(redis: ArqRedis) -> int:
    seconds, microseconds = await redis.time()
    return int(seconds) * 1_000 + int(microseconds) // 1_000


async def damage_of_loading(store: ConversationStore) -> str:
    """The key that loading complains about; "" if it does not."""
    try:
        await store.load(ID, MOST_MESSAGES)
    except ConversationDamaged as damaged:
        return damaged.key
    return ""


class TestNumbers:
    @pytest.mark.parametrize(("digits", "is_damage"), [(15, False), (16, True)])
    async def test_one_of_up_to_fifteen_digits_can_be_counted_with(
        self, store: ConversationStore, redis: ArqRedis, digits: int, is_damage: bool
    ) -> None:
        """Longer ones would lose their last digits in a script."""
        await append_turns(store, ID, range(1))
        await command(redis, "HSET", key_of("summary"), "answer_input_tokens", "9" * digits)
        assert await damage_of_loading(store) == (key_of("summary") if is_damage else "")
        if not is_damage:
            assert (await store.load(ID, 2)).usage.answer_input_tokens == 10**15 - 1

    @pytest.mark.parametrize("field", ["message_count", "summarized_message_count", "version"])
    async def test_three_of_them_must_be_there(self, store: ConversationStore, redis: ArqRedis, field: str) -> None:
        """Without one of them nobody knows where a fold stands."""
        await append_turns(store, ID, range(4))
        await command(redis, "HDEL", key_of("summary"), field)
        assert await damage_of_loading(store) == key_of("summary")

    async def test_the_others_count_from_nothing(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A counter that is not there yet, as in what an older version wrote, is zero."""
        await append_turns(store, ID, range(4))
        for counter in ("answer_input_tokens", "answer_output_tokens", "fold_input_tokens", "fold_output_tokens"):
            await command(redis, "HDEL", key_of("summary"), counter)
        await command(redis, "HDEL", key_of("summary"), "seen_summarized_message_count", "seen_fold_tokens")
        assert (await store.load(ID, 2)).usage == Usage()
        await fold(store, 2)
        appended = await append_turns(store, ID, range(4, 5))
        assert appended.usage == Usage(10, 5, 7, 3)
        assert (appended.newly_summarized_messages, appended.summary_update_tokens) == (2, 10)

    async def test_every_reader_takes_what_is_not_there_for_nothing(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """A summary hash with no more than it must have is read alike by a turn, a fold and whoever looks at it."""
        await append_turns(store, ID, range(2))
        fields = await redis.hkeys(key_of("summary"))  # type: ignore[misc]  # annotated as sync and async at once
        needed = {b"message_count", b"summarized_message_count", b"version", b"generation"}
        await command(redis, "HDEL", key_of("summary"), *(set(fields) - needed))
        conversation = await store.load(ID, MOST_MESSAGES)
        assert (conversation.summary, conversation.usage) == (Summary(), Usage())
        begun = await begin(store, "mine")
        assert begun == BegunTurn(conversation, 0)
        snapshot = await snapshot_of(store)
        assert (snapshot.summary, snapshot.failures, snapshot.rejections) == (Summary(), 0, 0)
        assert snapshot.window_messages == WINDOW_MESSAGES
        inspection = await store.inspect(ID, MOST_MESSAGES)
        assert inspection.conversation == conversation
        assert (inspection.created_at, inspection.updated_at, inspection.window_messages) == (0, 0, 0)
        assert (inspection.fold_failures, inspection.fold_conflicts) == (0, 0)
        page = await store.page(ID, 0, 2)
        assert page
        assert (page.created_at, page.owner, page.metadata) == (0, "", "")

    async def test_what_is_left_of_a_conversation_is_damage(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A single message without a summary, or a summary without generation and messages, is no new conversation."""
        await command(redis, "RPUSH", key_of("history"), "{}")
        assert await damage_of_loading(store) == key_of("summary")
        await redis.delete(key_of("history"))
        assert await damage_of_loading(store) == ""
        await command(redis, "HSET", key_of("summary"), "summary", "text")
        assert await damage_of_loading(store) == key_of("summary")

    @pytest.mark.parametrize(
        ("count", "folded", "is_damage"), [(4, 4, False), (4, 0, False), (4, 6, True), (4, 3, True), (3, 2, True)]
    )
    async def test_a_summary_covers_whole_turns_that_are_there(
        self, store: ConversationStore, redis: ArqRedis, count: int, folded: int, is_damage: bool
    ) -> None:
        """Never more than the history holds, never half a turn, and no history ends within one."""
        await append_turns(store, ID, range(2))
        await command(redis, "LTRIM", key_of("history"), 0, count - 1)
        await command(redis, "HSET", key_of("summary"), "message_count", count, "summarized_message_count", folded)
        assert await damage_of_loading(store) == (key_of("summary") if is_damage else "")


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


Operation = Callable[[ConversationStore, FoldSnapshot], Awaitable[object]]


async def append(store: ConversationStore, snapshot: FoldSnapshot) -> object:
    return await store.append(ID, turn(Conversation(ID, snapshot.generation), "next"))


async def commit(store: ConversationStore, snapshot: FoldSnapshot) -> object:
    return await store.commit_fold(snapshot, 4, fold_result(), fold_id="next", window_messages=WINDOW_MESSAGES)


OPERATIONS: dict[str, tuple[Operation, str]] = {
    "append": (append, "history summary folds turns context conversations pending queue lock events"),
    "load": (lambda store, _: store.load(ID, 2), "history summary"),
    "load_fold": (lambda store, _: store.load_fold(ID, most_messages=2, window=2), "history summary"),
    "commit_fold": (commit, "history summary folds pending queue events"),
    "fail_fold": (lambda store, snapshot: fail(store, snapshot, "next"), "history summary pending events"),
    "settle_fold": (lambda store, snapshot: store.settle_fold(ID, snapshot), "history summary"),
    "begin_turn": (lambda store, _: begin(store, "mine"), "history summary turns lock"),
    "remove_message": (
        lambda store, snapshot: store.remove_message(ID, snapshot.generation, 9, lock_token="mine"),
        "history summary pending queue lock events",
    ),
    "rewind": (lambda store, _: store.rewind(ID, 0), "history summary folds context pending queue events"),
    "create": (lambda store, _: store.create(ID, owner="", metadata={}), "history summary conversations"),
    "set_metadata": (lambda store, _: store.set_metadata(ID, owner="", metadata={}), "history summary conversations"),
    "inspect": (lambda store, _: store.inspect(ID, 2), "history summary pending"),
    "events": (lambda store, _: store.events(ID, "0-0"), "history summary events"),
    "page": (lambda store, _: store.page(ID, 0, 2), "history summary"),
    "last_context": (lambda store, _: store.last_context(ID), "history summary folds context"),
    "sweep": (
        lambda store, _: store.sweep(most=100, again_seconds=5.0, lease_seconds=1.0),
        "conversations pending queue",
    ),
    "backlog": (lambda store, _: store.backlog(most=100), "pending queue"),
}

KINDS = {
    **dict.fromkeys(("history", "folds"), "list"),
    **dict.fromkeys(("turns", *SHARED), "zset"),
    **dict.fromkeys(("context", "lock"), "string"),
    "summary": "hash",
    "events": "stream",
}


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, (_, parts) in OPERATIONS.items() for part in parts.split()]
)
async def test_a_foreign_key_is_named_before_anything_is_written(
    store: ConversationStore, redis: ArqRedis, name: str, part: str
) -> None:
    """Each operation looks at every key it reads or writes first, and changes nothing if one is of another type."""
    await append_turns(store, ID, range(6))
    await fold(store, 2)
    snapshot = await snapshot_of(store)
    await redis.zadd(key_of("pending"), {ID: 1, "gone": 1})
    await redis.zadd(key_of("conversations"), {"gone": 1})
    if name == "remove_message":
        await begin(store, "mine")
    await redis.delete(key_of(part))
    await command(redis, "SADD", key_of(part), "foreign")
    before = await dump(redis)
    with pytest.raises(ConversationDamaged, match=f"is a set, not a {KINDS[part]}") as damaged:
        await OPERATIONS[name][0](store, snapshot)
    assert damaged.value.key == key_of(part)
    assert await dump(redis) == before


class TestAppending:
    async def test_the_first_turn_begins_everything_at_zero(self, store: ConversationStore) -> None:
        """One turn, nothing folded, nothing pending; whose it is and when it began is kept."""
        first = replace(turn(Conversation(ID), 0), owner="ann")
        assert await store.append(ID, first) == Appended(2, 0, 0, 0, 0, 0, Usage(10, 5))
        inspection = await store.inspect(ID, 2)
        assert (inspection.owner, inspection.created_at) == ("ann", inspection.updated_at)
        assert (inspection.conversation.summary, inspection.window_messages) == (Summary(), WINDOW_MESSAGES)
        await append_turns(store, "nobodys", range(1))
        assert (await store.inspect("nobodys", 2)).owner == ""

    async def test_each_turn_says_what_happened_since_the_one_before(self, store: ConversationStore) -> None:
        """Messages and tokens of the folds in between, once; sent again, a turn has nothing new to say."""
        assert await append_turns(store, ID, range(5)) == Appended(10, 0, 0, 4, 0, 0, Usage(50, 25))
        await fold(store, 2)
        await fail(store, await snapshot_of(store), "f1")
        told = await append_turns(store, ID, range(5, 6))
        assert told == Appended(12, 2, 1, 4, 2, 20, Usage(60, 30, 14, 6))
        assert await append_turns(store, ID, range(6, 7)) == Appended(14, 2, 1, 6, 0, 0, Usage(70, 35, 14, 6))
        await fold(store, 6)
        again = await append_turns(store, ID, range(6, 7))
        assert again == Appended(14, 6, 2, 2, 0, 0, Usage(70, 35, 21, 9), repeated=True)
        assert await append_turns(store, ID, range(7, 8)) == Appended(16, 6, 2, 4, 4, 10, Usage(80, 40, 21, 9))

    async def test_an_import_leaves_the_last_context_alone(self, store: ConversationStore) -> None:
        """What was sent for the last answer is still that when a history is put behind it."""
        await append_turns(store, ID, range(2))
        conversation = await store.load(ID, MOST_MESSAGES)
        sent = turn(conversation, 2)
        await store.append(ID, sent)
        await begin(store, "mine")
        imported = await store.import_messages(
            ID,
            [message("user", "elsewhere"), message("assistant", "made")],
            import_id="import-1",
            generation=conversation.generation,
            window_messages=WINDOW_MESSAGES,
            lock_token="mine",
        )
        assert imported == Appended(8, 0, 0, 2, 0, 0, Usage(30, 15))
        assert await store.last_context(ID) == sent.context
        assert isinstance(await begin(store, "another"), BegunTurn)

    async def test_a_context_from_before_a_rewind_is_not_kept(self, store: ConversationStore) -> None:
        """Its summary version may be another's by now; the next turn's own is kept again."""
        await append_turns(store, ID, range(4))
        answering = await store.load(ID, MOST_MESSAGES)
        await store.rewind(ID, 0)
        await store.append(ID, turn(answering, 4))
        assert await store.last_context(ID) is None
        sent = turn(await store.load(ID, MOST_MESSAGES), 5)
        await store.append(ID, sent)
        assert await store.last_context(ID) == sent.context

    async def test_the_last_active_conversation_is_the_first_of_all(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Each turn puts its conversation in front."""
        names = ["a", "b", "c"]
        for name in (*names, "b", "a"):
            seen = await store.conversation_ids()
            await append_turns(store, name, range(len(seen), len(seen) + 1))
            await later(redis)
        assert await store.conversation_ids() == ["a", "b", "c"]

    async def test_without_pending_messages_nothing_is_asked_for(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """A full window makes no job; the turn that pushes the first one out does."""
        await append_turns(store, ID, range(3))
        assert await redis.zcard(QUEUE) == await redis.zcard(key_of("pending")) == 0
        await append_turns(store, ID, range(3, 4))
        assert await redis.zcard(QUEUE) == await redis.zcard(key_of("pending")) == 1


class TestLifetimes:
    async def test_every_key_follows_the_last_turn(self, redis: ArqRedis) -> None:
        """One expiry for all of them but the lock; none for any of them when the setting is taken away."""
        expiring, lasting = ConversationStore(redis, ttl_seconds=100), ConversationStore(redis)
        for store, is_expiring in ((lasting, False), (expiring, True), (lasting, False), (expiring, True)):
            count = await command(redis, "LLEN", key_of("history")) // 2
            await append_turns(store, ID, range(count, count + 4))
            if not count:
                await fold(store, 2)
            found = {part: await command(redis, "PEXPIRETIME", key_of(part)) for part in LASTING}
            field = await redis.hget(key_of("summary"), "expires_at")  # type: ignore[misc]  # annotated as sync and async at once
            assert set(found.values()) == ({int(field)} if is_expiring else {-1})
            assert (field is not None) == is_expiring

    async def test_a_context_follows_an_import_as_well(self, redis: ArqRedis) -> None:
        """An import writes none of its own, and the one that is there lives as long as the rest."""
        expiring, lasting = ConversationStore(redis, ttl_seconds=100), ConversationStore(redis)
        await append_turns(expiring, ID, range(1))
        for number, store in enumerate((lasting, expiring)):
            await store.import_messages(
                ID,
                [message("user", "elsewhere"), message("assistant", "made")],
                import_id=f"import-{number}",
                generation=(await store.load(ID, 2)).generation,
                window_messages=WINDOW_MESSAGES,
                lock_token="",
            )
            found = {await command(redis, "PEXPIRETIME", key_of(part)) for part in LASTING if part != "folds"}
            assert len(found) == 1
            assert (found == {-1}) == (store is lasting)

    async def test_a_conversation_without_messages_expires_too(self, redis: ArqRedis) -> None:
        """From the moment it was created on, and not later because its metadata changes."""
        store = ConversationStore(redis, ttl_seconds=100)
        created_at = await store.create(ID, owner="ann", metadata={})
        assert created_at is not None
        assert await store.set_metadata(ID, owner="ann", metadata={"topic": "cats"})
        assert await command(redis, "PEXPIRETIME", key_of("summary")) == created_at + 100_000
        assert await redis.hget(key_of("summary"), "expires_at") == b"%d" % (created_at + 100_000)  # type: ignore[misc]  # annotated as sync and async at once
        await ConversationStore(redis).create("other", owner="", metadata={})
        assert await command(redis, "PEXPIRETIME", "memora:{0}:other:summary") == -1


class TestCreating:
    async def test_it_begins_at_zero_and_once(self, store: ConversationStore) -> None:
        """No message, no summary, no cost; a second time there is one already, and nothing of it changes."""
        created_at = await store.create(ID, owner="ann", metadata={"topic": "cats"})
        inspection = await store.inspect(ID, 2)
        conversation = inspection.conversation
        assert (conversation.message_count, conversation.summary, conversation.usage) == (0, Summary(), Usage())
        assert (inspection.created_at, inspection.updated_at) == (created_at, created_at)
        assert (inspection.owner, inspection.metadata) == ("ann", '{"topic":"cats"}')
        assert await store.conversation_ids() == [ID]
        assert await store.create(ID, owner="bea", metadata={}) is None
        assert await store.inspect(ID, 2) == inspection

    async def test_metadata_is_its_owners(self, store: ConversationStore) -> None:
        """Nobody else replaces it, and where there is no conversation there is nothing to replace."""
        await store.create(ID, owner="ann", metadata={"topic": "cats"})
        assert not await store.set_metadata(ID, owner="bea", metadata={})
        assert not await store.set_metadata(ID, owner="", metadata={})
        assert not await store.set_metadata("nobody", owner="ann", metadata={})
        assert await store.set_metadata(ID, owner="ann", metadata={"topic": "dogs"})
        assert (await store.inspect(ID, 2)).metadata == '{"topic":"dogs"}'


class TestTails:
    async def test_nothing_of_what_is_summarized_is_read_again(self, store: ConversationStore) -> None:
        """With a tail shorter than asked for only the tail comes, and with none at all nothing."""
        await append_turns(store, ID, range(4))
        for end, tail in ((6, ["question 3", "answer 3"]), (8, [])):
            await fold(store, end)
            snapshot = await snapshot_of(store)
            begun = await begin(store, "mine")
            assert isinstance(begun, BegunTurn)
            for read in (
                (await store.load(ID, MOST_MESSAGES)).tail,
                begun.conversation.tail,
                snapshot.oldest,
                snapshot.newest,
                (await store.inspect(ID, MOST_MESSAGES)).conversation.tail,
            ):
                assert [m.content for m in read] == tail

    async def test_no_more_is_read_than_is_asked_for(self, store: ConversationStore) -> None:
        """The newest of the tail for an answer, its oldest for a fold, and none if none is wanted."""
        await append_turns(store, ID, range(4))
        assert [m.content for m in (await store.load(ID, 2)).tail] == ["question 3", "answer 3"]
        assert (await store.load(ID, 0)).tail == ()
        for most, window, oldest, newest in ((2, 4, 2, 4), (6, 2, 6, 2), (100, 100, 8, 8), (2, 0, 2, 0)):
            snapshot = await store.load_fold(ID, most_messages=most, window=window)
            assert snapshot is not None
            assert (len(snapshot.oldest), len(snapshot.newest)) == (oldest, newest)
            assert snapshot.oldest[0].content == "question 0"
        inspection = await store.inspect(ID, 0, 2)
        assert inspection.conversation.tail == ()
        assert [m.content for m in inspection.newest] == ["question 3", "answer 3"]
        assert [m.content for m in (await store.inspect(ID, 0, 1)).newest] == ["answer 3"]
        assert (await store.inspect(ID, 2)).newest == ()

    async def test_a_page_is_what_was_asked_for(self, store: ConversationStore) -> None:
        """From the first position up to the last, as far as there are some; beyond, and backwards, there are none."""
        await append_turns(store, ID, range(2))
        for first, stop, contents in (
            (0, 1, ["question 0"]),
            (1, 3, ["answer 0", "question 1"]),
            (3, 9, ["answer 1"]),
            (4, 9, []),
            (1, 1, []),
            (0, 0, []),
            (1, 0, []),
        ):
            page = await store.page(ID, first, stop)
            assert page
            assert ([m.content for m in page.messages], page.first, page.message_count) == (contents, first, 4)
            assert page.created_at == (await store.inspect(ID, 2)).created_at

    async def test_where_there_is_none_there_is_nothing(self, store: ConversationStore) -> None:
        """Every reader says so in its own way."""
        assert await store.load(ID, MOST_MESSAGES) == Conversation(ID)
        assert await store.load_fold(ID, most_messages=2, window=2) is None
        assert await store.page(ID, 0, 2) is None
        assert await store.events(ID, "0-0") is None
        assert await store.last_context(ID) is None
        assert await store.rewind(ID, 0) is None
        with pytest.raises(ConversationNotFound):
            await store.inspect(ID, 2)
        for pages in (store.messages(ID), store.folds(ID)):
            with pytest.raises(ConversationNotFound):
                await anext(aiter(pages))


class TestFoldsThatComeTooLate:
    async def test_a_conversation_that_is_gone_tells_nothing(self, store: ConversationStore) -> None:
        """Neither a commit nor a failure learns anything of the next life of the id."""
        await append_turns(store, ID, range(4))
        snapshot = await snapshot_of(store)
        await store.delete(ID)
        for _ in range(2):
            committed = await store.commit_fold(snapshot, 2, fold_result(), fold_id="f", window_messages=6)
            assert committed == Committed(CommitStatus.GONE, 0, 0, 0)
            assert not await fail(store, snapshot, "f")
            await append_turns(store, ID, range(6))

    @pytest.mark.parametrize("end", [0, 2, 14])
    async def test_a_fold_goes_forward_within_the_history(self, store: ConversationStore, end: int) -> None:
        """One that would reach nothing new, or what is not there, is refused and changes nothing."""
        await append_turns(store, ID, range(6))
        await fold(store, 2)
        before = await store.inspect(ID, MOST_MESSAGES)
        with pytest.raises(MemoraError, match=f"cannot reach {end} of 12"):
            await store.commit_fold(await snapshot_of(store), end, fold_result(), fold_id="f", window_messages=0)
        assert await store.inspect(ID, MOST_MESSAGES) == before
        await fold(store, 12)

    async def test_a_trail_that_does_not_lead_to_the_summary_is_not_continued(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """A fold needs exactly the entries that the summary counts."""
        await append_turns(store, ID, range(6))
        await fold(store, 2)
        await command(redis, "RPUSH", key_of("folds"), await command(redis, "LINDEX", key_of("folds"), 0))
        before = await dump(redis)
        with pytest.raises(ConversationDamaged, match=r"does not hold the 1 folds that .*:summary counts"):
            await fold(store, 4)
        assert await dump(redis) == before

    async def test_a_commit_forgets_what_failed_before(self, store: ConversationStore) -> None:
        """Failures and rejections count from the last commit on; the reason goes with them."""
        await append_turns(store, ID, range(6))
        await fail(store, await snapshot_of(store), "f1", rejected=True)
        await fail(store, await snapshot_of(store), "f2")
        snapshot = await snapshot_of(store)
        assert (snapshot.failures, snapshot.rejections) == (2, 1)
        await fold(store, 2)
        snapshot = await snapshot_of(store)
        assert (snapshot.failures, snapshot.rejections) == (0, 0)
        assert (await store.inspect(ID, 2)).last_fold_error == ""

    async def test_a_foreign_memory_of_folds_lets_none_in(self, store: ConversationStore, redis: ArqRedis) -> None:
        """What is remembered without a result that can be read counts as lost."""
        await append_turns(store, ID, range(6))
        await command(redis, "HSET", key_of("summary"), "recent_folds", "f=x")
        committed = await store.commit_fold(
            await snapshot_of(store), 2, fold_result(), fold_id="f", window_messages=WINDOW_MESSAGES
        )
        assert committed == Committed(CommitStatus.STALE, 0, 0, 6)

    async def test_one_that_failed_is_not_committed_under_the_same_name(self, store: ConversationStore) -> None:
        """Whoever was told of its failure would otherwise be told of its success as well."""
        await append_turns(store, ID, range(4))
        snapshot = await snapshot_of(store)
        await fail(store, snapshot, "f1")
        committed = await store.commit_fold(snapshot, 2, fold_result(), fold_id="f1", window_messages=WINDOW_MESSAGES)
        assert committed == Committed(CommitStatus.STALE, 0, 0, 2)


class TestFoldsRemembered:
    async def test_a_commit_that_is_repeated_answers_as_it_did(self, store: ConversationStore) -> None:
        """Won or lost, the second answer is the first one with the counts of now, and nothing is counted twice."""
        await append_turns(store, ID, range(6))
        snapshot = await snapshot_of(store)

        async def commit(name: str) -> Committed:
            return await store.commit_fold(snapshot, 4, fold_result(), fold_id=name, window_messages=WINDOW_MESSAGES)

        assert await commit("won") == await commit("won") == Committed(CommitStatus.COMMITTED, 4, 1, 2)
        assert await commit("lost") == await commit("lost") == Committed(CommitStatus.STALE, 4, 1, 2)
        await append_turns(store, ID, range(6, 7))
        assert await commit("won") == Committed(CommitStatus.COMMITTED, 4, 1, 4)
        assert await commit("lost") == Committed(CommitStatus.STALE, 4, 1, 4)
        inspection = await store.inspect(ID, 2)
        assert (inspection.conversation.usage.fold_tokens, inspection.fold_conflicts) == (20, 1)

    async def test_a_failure_that_is_repeated_is_one(self, store: ConversationStore) -> None:
        """Also when the count has moved in between: then there is nothing to try again, and never was a second try."""
        await append_turns(store, ID, range(6))
        snapshot = await snapshot_of(store)
        assert await fail(store, snapshot, "f1")
        assert await fail(store, snapshot, "f1")
        assert (await store.inspect(ID, 2)).fold_failures == 1
        await fold(store, 2)
        assert not await fail(store, snapshot, "f1")
        assert not await fail(store, snapshot, "f2")
        assert not await fail(store, snapshot, "f2")
        inspection = await store.inspect(ID, 2)
        assert (inspection.fold_failures, inspection.conversation.usage.fold_tokens) == (0, 30)

    async def test_eight_are_remembered(self, store: ConversationStore) -> None:
        """The newest ones: a ninth makes the oldest a fold that was never heard of."""
        await append_turns(store, ID, range(4))
        snapshot = await snapshot_of(store)
        for number in range(9):
            await fail(store, snapshot, f"f{number}")
        for number in range(8, 0, -1):
            await fail(store, snapshot, f"f{number}")
        assert (await store.inspect(ID, 2)).fold_failures == 9
        await fail(store, snapshot, "f0")
        assert (await store.inspect(ID, 2)).fold_failures == 10

    async def test_no_name_is_taken_for_the_end_of_another(self, store: ConversationStore) -> None:
        """A fold whose name ends like a remembered one is new."""
        await append_turns(store, ID, range(4))
        snapshot = await snapshot_of(store)
        await fail(store, snapshot, "abc")
        await fail(store, snapshot, "bc")
        assert (await store.inspect(ID, 2)).fold_failures == 2


class TestTheWindow:
    async def test_it_grows_to_its_most_and_then_falls_back(self, store: ConversationStore) -> None:
        """Between six and ten messages: five turns wait for nothing, the sixth makes three of them pending."""

        async def grows(number: int) -> tuple[int, int]:
            conversation = await store.load(ID, MOST_MESSAGES)
            appended = await store.append(ID, turn(conversation, number, most_window=10))
            return (await store.inspect(ID, 2)).window_messages, appended.pending_messages

        assert [await grows(number) for number in range(6)] == [(6, 0), (6, 0), (6, 0), (8, 0), (10, 0), (6, 6)]
        await fold(store, 6)
        assert [await grows(number) for number in range(6, 9)] == [(8, 0), (10, 0), (6, 6)]

    async def test_the_rest_of_a_commit_is_what_the_last_turn_left_out(self, store: ConversationStore) -> None:
        """A fold that found a larger window than the last turn does not leave more messages word for word."""
        await append_turns(store, ID, range(4))
        snapshot = await snapshot_of(store)
        conversation = await store.load(ID, MOST_MESSAGES)
        await store.append(ID, turn(conversation, 4, window=2))
        committed = await store.commit_fold(
            snapshot, 2, fold_result(), fold_id="f", window_messages=6, most_window_messages=10
        )
        assert committed == Committed(CommitStatus.COMMITTED, 2, 1, 6)
        assert (await store.inspect(ID, 2)).window_messages == 2

    async def test_a_fold_may_leave_a_batch_to_gather(self, store: ConversationStore) -> None:
        """What is left over within the most a window may hold waits for no fold."""
        await append_turns(store, ID, range(6))
        committed = await store.commit_fold(
            await snapshot_of(store), 2, fold_result(), fold_id="f", window_messages=6, most_window_messages=10
        )
        assert committed == Committed(CommitStatus.COMMITTED, 2, 1, 0)
        inspection = await store.inspect(ID, 2)
        assert (inspection.window_messages, inspection.fold_due_at) == (10, None)


class TestTheOutbox:
    @pytest.mark.parametrize("kind", ["job", "result"])
    async def test_a_job_that_arq_still_knows_is_not_asked_for_again(
        self, store: ConversationStore, redis: ArqRedis, kind: str
    ) -> None:
        """As arq itself, which refuses a name that waits or whose result is kept."""
        await append_turns(store, ID, range(3))
        await redis.set(f"arq:{kind}:{job_id(ID, (await store.load(ID, 2)).generation, 0)}", "kept")
        await append_turns(store, ID, range(3, 4))
        assert await redis.zcard(QUEUE) == 0
        assert await redis.zcard(key_of("pending")) == 1

    async def test_a_job_is_early_by_an_hour_and_is_kept_for_a_day(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Both counted from the moment at which it says it was enqueued: a script's clock stands still."""
        await append_turns(store, ID, range(4))
        job = job_id(ID, (await store.load(ID, 2)).generation, 0)
        enqueued_at = json.loads(await redis.get(f"arq:job:{job}"))["et"]
        assert await redis.zscore(QUEUE, job) == enqueued_at - HOUR_MS
        assert await command(redis, "PEXPIRETIME", f"arq:job:{job}") == enqueued_at + DAY_MS

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


class TestSettling:
    async def test_only_what_has_not_changed_is_taken_off_the_list(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """A turn, a fold or another life since the fold looked, and it stays for the next one to look at."""
        await append_turns(store, ID, range(4))
        seen = await snapshot_of(store)

        async def settles(snapshot: FoldSnapshot | None) -> bool:
            await redis.zadd(key_of("pending"), {ID: 1})
            settled = await store.settle_fold(ID, snapshot)
            assert (await redis.zscore(key_of("pending"), ID) is None) == settled
            return settled

        assert await settles(seen)
        await append_turns(store, ID, range(4, 5))
        assert not await settles(seen)
        assert not await settles(None)
        seen = await snapshot_of(store)
        await fold(store, 2)
        assert not await settles(seen)
        seen = await snapshot_of(store)
        await store.rewind(ID, 1)
        assert not await settles(seen)
        await store.delete(ID)
        assert await settles(seen)
        assert await settles(None)


class TestTheTrail:
    async def test_an_entry_says_how_the_fold_was_made(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Its messages, summary, model, cost and time; notes only where there are some."""
        await append_turns(store, ID, range(6))
        noted = replace(fold_result("one two"), notes=("shortened",), unfolded=(1,), duration_seconds=0.12345)
        for end, result in ((2, noted), (4, fold_result("three"))):
            await store.commit_fold(await snapshot_of(store), end, result, fold_id=f"to-{end}", window_messages=6)
        first, second = [entry async for entry in store.folds(ID)]
        assert replace(first, at=0) == Fold(1, 0, 2, "one two", "some-model", 7, 3, 0.123, 0, ("shortened",), (1,))
        assert replace(second, at=0) == Fold(2, 2, 4, "three", "some-model", 7, 3, 0.25, 0)
        names = [set(json.loads(raw)) for raw in await command(redis, "LRANGE", key_of("folds"), 0, -1)]
        assert names[0] - names[1] == {"notes", "unfolded"}

    async def test_a_failure_says_why_in_a_line(self, store: ConversationStore) -> None:
        """Up to two hundred characters, and when it is tried again to the millisecond."""
        await append_turns(store, ID, range(4))
        snapshot, spent = await snapshot_of(store), {"input_tokens": 7, "output_tokens": 3}
        assert await store.fail_fold(
            snapshot, fold_id="f", reason="x" * 300, rejected=False, delay_seconds=60.0, **spent
        )
        assert (await store.inspect(ID, 2)).last_fold_error == "x" * 200
        events = await store.events(ID, "0-0")
        assert events
        assert json.loads(events.events[-1].data)["retry_in_ms"] == 60_000


class TestTheLock:
    async def test_its_holder_alone_keeps_it_and_gives_it_back(self, store: ConversationStore, redis: ArqRedis) -> None:
        """For as long as is asked for; anybody else changes nothing, and one that ran out cannot be kept."""
        await append_turns(store, ID, range(1))
        await begin(store, "mine", lease_seconds=10.0)
        assert not await store.renew_lock(ID, "another", 100.0)
        await store.release_lock(ID, "another")
        assert 0 < await redis.pttl(key_of("lock")) <= 10_000
        assert await store.renew_lock(ID, "mine", 50.0)
        assert 40_000 < await redis.pttl(key_of("lock")) <= 50_000
        await store.release_lock(ID, "mine")
        assert not await redis.exists(key_of("lock"))
        assert not await store.renew_lock(ID, "mine", 50.0)


class TestTheBacklog:
    async def test_it_is_what_waits(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Conversations, jobs, messages, and since when; nothing at all where nothing waits."""
        assert await store.backlog(most=100) == Backlog(0, 0, 0, 0.0)
        for name, turns in (("a", 5), ("b", 4), ("c", 3)):
            await append_turns(store, name, range(turns))
        pushed_out = await command(redis, "LINDEX", "memora:{0}:a:history", 6)
        before = await now_ms(redis)
        backlog = await store.backlog(most=100)
        assert (backlog.conversations, backlog.queued_jobs, backlog.messages) == (2, 2, 4 + 2)
        waited_ms = before - json.loads(pushed_out)["at"]
        assert waited_ms <= backlog.seconds * 1_000 <= waited_ms + 1_000

    async def test_it_is_looked_into_as_far_as_is_asked_for(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Those due longest first; what cannot be read is passed over and counted as a conversation that waits."""
        for due_at, (name, turns) in enumerate((("a", 5), ("b", 4), ("c", 8), ("d", 9)), 1):
            await append_turns(store, name, range(turns))
            await redis.zadd(key_of("pending"), {name: due_at})
        assert (await store.backlog(most=2)).messages == 4 + 2
        await redis.set("memora:{0}:a:history", "foreign")
        await command(redis, "HDEL", "memora:{0}:b:summary", "message_count")
        backlog = await store.backlog(most=3)
        assert (backlog.conversations, backlog.messages) == (4, 10)
        await append_turns(store, "e", range(1))
        await redis.zadd(key_of("pending"), {"e": 0})
        assert (await store.backlog(most=4)).messages == 10

    async def test_it_begins_behind_the_summary(self, store: ConversationStore, redis: ArqRedis) -> None:
        """What is folded waits no more; the wait is that of the first message that is not, from when it was let out."""
        await append_turns(store, ID, range(7))
        await fold(store, 2)
        now = await now_ms(redis)
        for position in range(14):
            record = {**message_record(message("user", "hello")), "at": now - 100_000 * (14 - position)}
            await command(redis, "LSET", key_of("history"), position, json.dumps(record, separators=(",", ":")))
        backlog = await store.backlog(most=100)
        assert (backlog.conversations, backlog.messages) == (1, 6)
        assert 600 <= backlog.seconds < 660


class TestSweeping:
    async def test_so_many_at_a_time_the_longest_due_first(self, store: ConversationStore, redis: ArqRedis) -> None:
        """What a sweep does not get to is seen to by the next one."""
        for due_at, name in enumerate(("b", "a", "c"), 1):
            await append_turns(store, name, range(4))
            await redis.zadd(key_of("pending"), {name: due_at})
        before = await now_ms(redis)
        assert await sweep(store, most=2) == Swept(2, 0, 0)
        after = await now_ms(redis)
        listed = dict(await redis.zrange(key_of("pending"), 0, -1, withscores=True))
        assert listed.pop(b"c") == 3
        assert set(listed) == {b"a", b"b"}
        assert all(before <= due - 5_000 <= after for due in listed.values())
        assert await sweep(store, most=2) == Swept(1, 0, 0)

    async def test_after_the_clock_was_set_back_nothing_waits_for_it(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """What is due later than anything is ever put off is due now, and its job is not later than a new one."""
        now = await now_ms(redis)
        for name, due_in in (("far", 660_000), ("farther", 900_000), ("soon", 540_000)):
            await append_turns(store, name, range(4))
            await redis.zadd(key_of("pending"), {name: now + due_in})
        generation = (await store.load("far", 2)).generation
        job = job_id("far", generation, 0)
        await redis.zadd(QUEUE, {job: now + 600_000})
        assert await sweep(store, most=1) == Swept(1, 0, 0)
        assert now <= await redis.zscore(QUEUE, job) + HOUR_MS <= await now_ms(redis)
        assert await sweep(store, most=1) == Swept(1, 0, 0)
        assert await sweep(store, most=1) == Swept(0, 0, 0)
        assert await redis.zscore(key_of("pending"), "soon") == now + 540_000

    async def test_what_is_gone_is_dropped_from_both_lists(self, store: ConversationStore, redis: ArqRedis) -> None:
        """The least active conversations are looked at first, so many at a time; those that are there stay."""
        await append_turns(store, ID, range(4))
        await redis.zadd(key_of("pending"), {"gone": 1, ID: 2})
        await redis.zadd(key_of("conversations"), {"gone": 1, "lost": 2, "old": 3})
        assert await sweep(store, most=2) == Swept(2, 0, 3)
        assert await redis.zrange(key_of("pending"), 0, -1) == [ID.encode()]
        assert await redis.zrange(key_of("conversations"), 0, -1) == [b"old", ID.encode()]
        assert await sweep(store, most=2) == Swept(0, 0, 1)
        assert await store.conversation_ids() == [ID]

    async def test_a_lost_job_is_counted(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Each one that had to be enqueued again."""
        for name in ("a", "b"):
            await append_turns(store, name, range(4))
            await redis.zadd(key_of("pending"), {name: 1})
            await redis.delete("arq:job:" + job_id(name, (await store.load(name, 2)).generation, 0))
        await redis.delete(QUEUE)
        assert await sweep(store) == Swept(2, 2, 0)
        assert await redis.zcard(QUEUE) == 2

    @pytest.mark.parametrize("field", ["generation", "summarized_message_count"])
    async def test_one_without_a_state_is_only_put_off(
        self, store: ConversationStore, redis: ArqRedis, field: str
    ) -> None:
        """Nobody could name its job; the others get theirs."""
        for name in (ID, "other"):
            await append_turns(store, name, range(4))
            await redis.zadd(key_of("pending"), {name: 1})
        await command(redis, "HDEL", key_of("summary"), field)
        await redis.delete(QUEUE, *[key for key in await all_keys(redis) if key.startswith(b"arq:job:")])
        assert await sweep(store) == Swept(2, 1, 0)
        assert await sweep(store) == Swept(0, 0, 0)

    async def test_names_that_are_no_text_go_so_many_at_a_time(self, store: ConversationStore, redis: ArqRedis) -> None:
        """The front of the queue is looked at; names that are text stay, whoever put them there."""
        names = [b"\x80", b"plain", b"caf\xc3\xa9", b"\xff"]
        await redis.zadd(QUEUE, {name: score for score, name in enumerate(names)})
        await sweep(store, most=3)
        assert await redis.zrange(QUEUE, 0, -1) == [b"plain", b"\xff"]


class TestRewinding:
    async def test_to_a_version(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Summary, tokens, count and trail are those of then; failures are forgotten, and the fold starts anew."""
        await append_turns(store, ID, range(8))
        for end, text in ((2, "one"), (4, "one two"), (6, "one two three")):
            await fold(store, end, text)
        await append_turns(store, ID, range(8, 9))
        await fail(store, await snapshot_of(store), "f1", rejected=True)
        old = await store.inspect(ID, 2)
        old_job = job_id(ID, old.conversation.generation, 6)
        await redis.set(f"arq:retry:{old_job}", 1)
        before = await now_ms(redis)
        assert await store.rewind(ID, 2) == Rewound(2, 3)
        state = await store.inspect(ID, 2)
        assert state.conversation.summary == Summary("one two", 4, 2, 2)
        snapshot = await snapshot_of(store)
        assert (snapshot.failures, snapshot.rejections, state.last_fold_error) == (0, 0, "")
        assert before <= state.updated_at <= await now_ms(redis)
        assert state.fold_due_at is not None
        assert abs(state.fold_due_at - state.updated_at - SWEEP_GRACE_MS) < 1_000
        assert [entry.version async for entry in store.folds(ID)] == [1, 2]
        assert await places_of(redis, old_job) == []
        generation = f"{old.conversation.generation}.1"
        assert state.conversation.generation == generation
        assert await redis.zrange(QUEUE, 0, -1) == [job_id(ID, generation, 4).encode()]
        # The next turn says only what was folded since: the messages that wait again were told of before.
        await fold(store, 8)
        assert (await append_turns(store, ID, range(9, 10))).newly_summarized_messages == 4
        assert await store.rewind(ID, 3) == Rewound(3, 3)
        assert await store.rewind(ID, 4) == NoSuchVersion(4, 3)

    async def test_to_the_beginning(self, store: ConversationStore) -> None:
        """No summary, no tokens, no count and no trail, as before the first fold."""
        await append_turns(store, ID, range(4))
        await fold(store, 2)
        assert await store.rewind(ID, 0) == Rewound(0, 1)
        assert (await store.load(ID, 2)).summary == Summary()
        assert [entry async for entry in store.folds(ID)] == []

    async def test_with_nothing_left_to_fold_it_asks_for_nothing(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Back to a version that covers all but the window, the conversation leaves the outbox."""
        await append_turns(store, ID, range(4))
        await fold(store, 2)
        await redis.zadd(key_of("pending"), {ID: 1})
        assert await store.rewind(ID, 1) == Rewound(1, 1)
        assert await redis.zcard(key_of("pending")) == await redis.zcard(QUEUE) == 0

    async def test_without_a_window_everything_waits(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A conversation that does not say how large its window is keeps none."""
        await append_turns(store, ID, range(2))
        await command(redis, "HDEL", key_of("summary"), "window_messages")
        await store.rewind(ID, 0)
        events = await store.events(ID, "0-0")
        assert events
        assert json.loads(events.events[-1].data)["pending_messages"] == 4
        assert await redis.zcard(QUEUE) == 1

    @pytest.mark.parametrize(
        ("changes", "is_damage"),
        [
            ({}, False),
            ({"to": 8}, False),
            ({"to": 10}, True),
            ({"to": 3}, True),
            ({"to": "4"}, True),
            ({"summary": None}, True),
            ({"summary_tokens": "2"}, True),
            (None, True),
        ],
    )
    async def test_it_goes_back_only_to_an_entry_it_can_read(
        self, store: ConversationStore, redis: ArqRedis, changes: dict[str, object] | None, is_damage: bool
    ) -> None:
        """With whole turns that are there, a text and its tokens; otherwise the trail is named and nothing changes."""
        await append_turns(store, ID, range(4))
        await fold(store, 2)
        raw = await command(redis, "LINDEX", key_of("folds"), 0)
        await command(
            redis, "LSET", key_of("folds"), 0, json.dumps(None if changes is None else json.loads(raw) | changes)
        )
        before = await dump(redis)
        if is_damage:
            with pytest.raises(ConversationDamaged) as damaged:
                await store.rewind(ID, 1)
            assert damaged.value.key == key_of("folds")
            assert await dump(redis) == before
        else:
            assert await store.rewind(ID, 1) == Rewound(1, 1)

    async def test_the_text_that_was_sent_stays_with_the_context_once(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Taken from the trail when its version goes, kept through a second rewind, left alone while it is there."""
        await append_turns(store, ID, range(6))
        await fold(store, 2, "one")
        await fold(store, 4, "two")
        sent = turn(await store.load(ID, MOST_MESSAGES), 6)
        await store.append(ID, sent)
        record = await redis.get(key_of("context"))
        await store.rewind(ID, 2)
        assert await redis.get(key_of("context")) == record
        for version in (1, 0):
            await store.rewind(ID, version)
            assert json.loads(await redis.get(key_of("context"))) == json.loads(record) | {"summary": "two"}
            assert await store.last_context(ID) == sent.context


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

    async def test_a_new_conversation_is_begun_from_nothing(self, store: ConversationStore) -> None:
        """If it may be begun at all; the lock is taken, and nothing else is there yet."""
        assert await begin(store, "mine") is None
        begun = await store.begin_turn(
            ID, lock_token="mine", lease_seconds=100.0, turn_id="t", most_messages=MOST_MESSAGES, may_begin=True
        )
        assert begun == BegunTurn(Conversation(ID), 0)
        assert await store.conversation_ids() == []

    async def test_a_lock_says_how_long_it_lasts_at_most(self, store: ConversationStore, redis: ArqRedis) -> None:
        """What is left of the lease; its holder gets it again; a longer one, left by a clock set back, is cut down."""
        await append_turns(store, ID, range(1))
        assert isinstance(await begin(store, "first", lease_seconds=50.0), BegunTurn)
        assert isinstance(await begin(store, "first", lease_seconds=50.0), BegunTurn)
        busy = await begin(store, "second", lease_seconds=100.0)
        assert isinstance(busy, Busy)
        assert 40.0 < busy.seconds <= 50.0
        busy = await begin(store, "second", lease_seconds=20.0)
        assert isinstance(busy, Busy)
        assert 10.0 < busy.seconds <= 20.0
        assert 10_000 < await redis.pttl(key_of("lock")) <= 20_000

    async def test_a_fingerprint_is_that_of_the_newest_turn_alone(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Not of an earlier turn, not while another is being answered, and not where nothing was said yet."""
        assert await store.create(ID, owner="", metadata={}) is not None
        assert isinstance(await begin(store, "mine", fingerprint="f0"), BegunTurn)
        await store.release_lock(ID, "mine")
        for number in range(2):
            conversation = await store.load(ID, MOST_MESSAGES)
            marked = replace(message("user", f"question {number}"), details={"fingerprint": f"f{number}"})
            await store.append(ID, replace(turn(conversation, number), user=marked))
        found = await begin(store, "mine", fingerprint="f1")
        assert isinstance(found, StoredTurn)
        assert (found.position, found.user.content, found.assistant.content) == (2, "question 1", "answer 1")
        assert not await redis.exists(key_of("lock"))
        assert isinstance(await begin(store, "mine", fingerprint="f0"), BegunTurn)
        assert isinstance(await begin(store, "other", fingerprint="f1"), Busy)

    async def test_what_is_begun_from_is_what_is_loaded(self, store: ConversationStore) -> None:
        """Taking the lock answers with the same conversation as loading without it, usage and tail included."""
        await append_turns(store, ID, range(5))
        await fold(store, 2)
        begun = await begin(store, "mine")
        assert isinstance(begun, BegunTurn)
        assert begun.conversation == await store.load(ID, MOST_MESSAGES)
        assert begun.created_at == (await store.inspect(ID, 2)).created_at
        assert len(begun.conversation.tail) == 8


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
        await begin(store, "mine")
        assert await store.remove_message(ID, generation, 5, lock_token="mine")
        assert [m.role async for m in store.messages(ID)] == ["user", "assistant"] * 3

    async def test_its_place_and_its_reasons(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Behind the history there is none, under the summary it is too late; else the pending fold starts anew."""
        await append_turns(store, ID, range(5))
        await fold(store, 2)
        generation = (await store.load(ID, 2)).generation
        await redis.zadd(key_of("pending"), {ID: 1})
        await begin(store, "mine")
        assert not await store.remove_message(ID, generation, 10, lock_token="mine")
        with pytest.raises(MessageSummarized):
            await store.remove_message(ID, generation, 1, lock_token="mine")
        assert (await store.load(ID, 2)).generation == generation
        assert await store.remove_message(ID, generation, 2, lock_token="mine")
        assert not await redis.exists(key_of("lock"))
        assert await redis.zrange(QUEUE, 0, -1) == [job_id(ID, f"{generation}.1", 2).encode()]
        due = (await store.inspect(ID, 2)).fold_due_at
        assert due is not None
        assert abs(due - await now_ms(redis) - SWEEP_GRACE_MS) < SWEEP_GRACE_MS / 2
        await begin(store, "mine")
        assert await store.remove_message(ID, generation, 9, lock_token="mine")
        assert (await store.load(ID, 2)).generation == f"{generation}.2"

    async def test_a_message_of_another_life_is_not_taken_back(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Neither where there is no conversation any more nor where the id is used again."""
        await append_turns(store, ID, range(2))
        generation = (await store.load(ID, 2)).generation
        await store.delete(ID)
        with pytest.raises(ConversationDeleted):
            await store.remove_message(ID, generation, 1, lock_token="mine")
        await append_turns(store, ID, range(2))
        await begin(store, "mine")
        before = await dump(redis)
        with pytest.raises(ConversationDeleted):
            await store.remove_message(ID, generation, 1, lock_token="mine")
        assert await dump(redis) == before

    async def test_the_tries_of_the_former_fold_are_forgotten(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Nothing that arq knows of its job is left."""
        await append_turns(store, ID, range(4))
        generation = (await store.load(ID, 2)).generation
        await redis.set(f"arq:retry:{job_id(ID, generation, 0)}", 1)
        await begin(store, "mine")
        assert await store.remove_message(ID, generation, 1, lock_token="mine")
        assert await places_of(redis, job_id(ID, generation, 0)) == []

    async def test_with_nothing_pending_no_fold_is_asked_for(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A message of the window is taken back without a job."""
        await append_turns(store, ID, range(2))
        await begin(store, "mine")
        assert await store.remove_message(ID, (await store.load(ID, 2)).generation, 0, lock_token="mine")
        assert await redis.zcard(QUEUE) == 0
        assert await redis.zcard(key_of("pending")) == 0


class TestEvents:
    async def test_each_says_what_happened_to_the_number(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A turn, a fold that fails, one that is committed, one that lost, a message and a summary taken back."""
        before = await now_ms(redis)
        await append_turns(store, ID, range(5))
        snapshot = await snapshot_of(store)
        assert await fail(store, snapshot, "f1", delay_seconds=0.25)
        await fold(store, 2)
        lost = await store.commit_fold(snapshot, 4, fold_result(), fold_id="late", window_messages=WINDOW_MESSAGES)
        assert lost == Committed(CommitStatus.STALE, 2, 1, 2)
        await begin(store, "mine")
        await store.remove_message(ID, snapshot.generation, 5, lock_token="mine")
        assert await store.rewind(ID, 0) == Rewound(0, 1)
        events = await store.events(ID, "0-0")
        assert events
        assert events.life == snapshot.generation
        told = [json.loads(event.data) for event in events.events]
        after = await now_ms(redis)
        assert all(before <= event.pop("at") <= after for event in told)
        numbers = {"message_count": 10, "summarized_message_count": 0, "pending_messages": 4}
        assert told[4:] == [
            {"type": "turn", **numbers},
            {"type": "retry", "from": 0, "retry_in_ms": 250},
            {"type": "fold", "from": 0, "to": 2, "version": 1, "summary_tokens": 2, "pending_messages": 2},
            {"type": "conflict", "from": 0, "to": 4, "summarized_message_count": 2},
            {"type": "removed", "position": 5},
            {
                "type": "rewound",
                "version": 0,
                "from_version": 1,
                "summarized_message_count": 0,
                "pending_messages": 4,
            },
        ]

    async def test_a_hint_says_what_kind_it_was(self, store: ConversationStore, redis: ArqRedis) -> None:
        """On the channel with the name of the stream, for those who watch: no content, no number."""
        hints = await hints_of(store, redis, store.hint_channel(ID), until="deleted")
        assert hints == [*["turn"] * 4, "retry", "fold", "conflict", "deleted"]

    async def test_how_a_fold_ended_is_said_to_those_who_count(self, store: ConversationStore, redis: ArqRedis) -> None:
        """On one channel of the shard, and nothing else: who counts folds is not told of each turn."""
        assert await hints_of(store, redis, "memora:{0}:folds", until="conflict") == ["retry", "fold", "conflict"]

    async def test_they_can_be_read_from_any_point_in_pieces(self, store: ConversationStore) -> None:
        """So many at once, those after a point only; from no point on, only which is the newest."""
        await append_turns(store, ID, range(4))
        everything = await store.events(ID, "0-0")
        assert everything
        assert len(everything.events) == 4
        assert everything.newest == everything.events[-1].id
        some = await store.events(ID, everything.events[0].id, most=2)
        assert some
        assert some.events == everything.events[1:3]
        assert await store.events(ID, "") == replace(everything, events=())
        assert await store.events("nobody", "") is None

    async def test_one_that_was_evicted_comes_back_with_the_expiry_of_the_others(self, redis: ArqRedis) -> None:
        """Whatever happens next to a conversation that expires, its events expire with it."""
        store = ConversationStore(redis, ttl_seconds=100)
        await append_turns(store, ID, range(5))
        snapshot = await snapshot_of(store)

        async def lose() -> None:
            committed = await store.commit_fold(snapshot, 4, fold_result(), fold_id="late", window_messages=6)
            assert committed.status is CommitStatus.STALE

        async def take_back() -> None:
            await begin(store, "mine")
            assert await store.remove_message(ID, snapshot.generation, 5, lock_token="mine")

        expires_at = await command(redis, "PEXPIRETIME", key_of("history"))
        for happens in (
            lambda: fail(store, snapshot, "f1"),
            lambda: fold(store, 2),
            lose,
            take_back,
            lambda: store.rewind(ID, 0),
        ):
            await redis.delete(key_of("events"))
            await happens()
            assert await command(redis, "PEXPIRETIME", key_of("events")) == expires_at


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

    @pytest.mark.parametrize("damage", [["generation"], ["summarized_message_count"]])
    async def test_a_state_that_names_no_job_takes_its_job_along(
        self, store: ConversationStore, redis: ArqRedis, damage: list[str]
    ) -> None:
        """With or without a history beside it, the queue is searched for it."""
        for is_without_history in (False, True):
            await append_turns(store, ID, range(4))
            await command(redis, "HDEL", key_of("summary"), *damage)
            if is_without_history:
                await redis.delete(key_of("history"))
            assert await store.delete(ID)
            assert await all_keys(redis) == []

    async def test_a_lock_and_whatever_arq_knows_of_the_job_goes_along(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Also of one that is running and of one that is no longer in the queue."""
        await append_turns(store, ID, range(4))
        await begin(store, "mine")
        job = job_id(ID, (await store.load(ID, 2)).generation, 0)
        for prefix in ("arq:retry:", "arq:in-progress:", "arq:result:"):
            await redis.set(prefix + job, 1)
        await redis.delete(QUEUE)
        assert await store.delete(ID)
        assert await all_keys(redis) == []

    @pytest.mark.parametrize("part", ["conversations", "pending"])
    async def test_a_single_mention_is_something_to_delete(
        self, store: ConversationStore, redis: ArqRedis, part: str
    ) -> None:
        """An id that is only listed; a foreign list is not this conversation's matter."""
        await redis.zadd(key_of(part), {ID: 1})
        assert await store.delete(ID)
        assert not await store.delete(ID)
        await command(redis, "SADD", key_of(part), "foreign")
        assert not await store.delete(ID)

    async def test_what_was_never_there(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Nothing to delete, nothing deleted: a job in the queue that only begins alike is not looked for."""
        await redis.zadd(QUEUE, {job_id(ID, "g", 0): 1})
        assert not await store.delete(ID)
        assert await redis.zcard(QUEUE) == 1
        assert await store.load(ID, 2) == Conversation(ID)


def stored_job(generation: str, start: int) -> FoundJob:
    """A fold job of the conversation as the audit finds it."""
    return FoundJob(f"arq:job:{job_id(ID, generation, start)}", ID, generation, str(start))


async def state_of(audits: AuditStore) -> StoredConversation:
    [stored] = await audits.states([ID])
    return stored


async def put_foreign(redis: ArqRedis, part: str) -> None:
    """A key of another type in the place of this one."""
    await redis.delete(key_of(part))
    await command(redis, "SADD", key_of(part), "foreign")


class TestWhatAnAuditReads:
    async def test_a_state_is_everything_as_it_is_stored(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Types, expiries and lengths of all its keys, its places in the lists, and the fields themselves."""
        await append_turns(store, ID, range(5))
        await fold(store, 2)
        await begin(store, "mine")
        before = await now_ms(redis)
        stored = await state_of(audits)
        assert before <= stored.now <= await now_ms(redis)
        assert stored.types == {part: KINDS[part] for part in (*LASTING, "lock")}
        assert stored.expiries == {part: await command(redis, "PEXPIRETIME", key_of(part)) for part in stored.types}
        assert (stored.history_length, stored.folds_length, stored.turns_length) == (10, 1, 5)
        assert stored.turns == tuple((f"turn-{number}", 2.0 * number + 2) for number in range(5))
        assert stored.fields["summarized_message_count"] == "2"
        assert stored.context == await redis.get(key_of("context"))
        assert stored.indexed_at == await redis.zscore(key_of("conversations"), ID)
        assert stored.due_at == await redis.zscore(key_of("pending"), ID)

    async def test_where_there_is_none_there_is_nothing(self, audits: AuditStore) -> None:
        """No type, no length, no place, no job."""
        stored = await state_of(audits)
        assert stored == StoredConversation(ID, "memora:{0}:", stored.now, {})

    async def test_a_foreign_key_is_only_named(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Of a key of another type there is nothing but the type; a foreign list holds no place."""
        await append_turns(store, ID, range(4))
        for part in KINDS:
            await put_foreign(redis, part)
        stored = await state_of(audits)
        kinds = stored.types
        assert kinds == dict.fromkeys((*LASTING, "lock"), "set")
        assert stored == StoredConversation(ID, "memora:{0}:", stored.now, kinds, dict.fromkeys(kinds, -1))

    async def test_so_many_of_the_turn_ids_are_looked_at(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """One more than are ever kept, the newest; all of them are counted."""
        await append_turns(store, ID, range(1))
        await redis.zadd(key_of("turns"), {f"x{number}": 10 + number for number in range(TURN_IDS_KEPT + 2)})
        stored = await state_of(audits)
        assert stored.turns_length == TURN_IDS_KEPT + 3
        assert stored.turns == tuple((f"x{number}", 10.0 + number) for number in range(1, TURN_IDS_KEPT + 2))

    async def test_a_job_is_there_wherever_arq_has_it(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """In the queue, by its own key, or running; a state that names none has none."""
        await append_turns(store, ID, range(4))
        job = job_id(ID, (await store.load(ID, 2)).generation, 0)
        assert (await state_of(audits)).has_job
        await redis.delete(QUEUE)
        assert (await state_of(audits)).has_job
        await redis.delete(f"arq:job:{job}")
        assert not (await state_of(audits)).has_job
        await redis.set(f"arq:in-progress:{job}", 1)
        assert (await state_of(audits)).has_job
        await redis.delete(f"arq:in-progress:{job}")
        await redis.zadd(QUEUE, {job: 1})
        assert (await state_of(audits)).has_job
        for field in ("generation", "summarized_message_count"):
            found = await command(redis, "HGET", key_of("summary"), field)
            await command(redis, "HDEL", key_of("summary"), field)
            assert not (await state_of(audits)).has_job
            await command(redis, "HSET", key_of("summary"), field, found)

    async def test_a_page_is_what_was_asked_for(self, audits: AuditStore, redis: ArqRedis) -> None:
        """From the first entry up to the last, as far as there are some, with the generation if there is one."""
        entries = [b"%d" % number for number in range(120)]
        await command(redis, "RPUSH", key_of("history"), *entries)
        ends = ((0, 51), (10, 115), (110, 300), (120, 130), (5, 5), (0, 0))
        pages = await audits.pages([PageWanted(ID, "history", first, stop) for first, stop in ends])
        assert pages == [RawPage("", tuple(entries[first:stop])) for first, stop in ends]
        await command(redis, "HSET", key_of("summary"), "generation", "g")
        assert await audits.pages([PageWanted(ID, "history", 0, 1)]) == [RawPage("g", (b"0",))]
        await put_foreign(redis, "history")
        await put_foreign(redis, "summary")
        assert await audits.pages([PageWanted(ID, "history", 0, 1)]) == [RawPage("", ())]

    @pytest.mark.parametrize(("missing", "entries"), [(0, 50), (1, 60)])
    async def test_a_large_page_ends_early(
        self, audits: AuditStore, redis: ArqRedis, missing: int, entries: int
    ) -> None:
        """After the fifty entries that make it large, to the byte."""
        size = PAGE_BYTES // 50
        rest = PAGE_BYTES - 49 * size - missing
        await command(redis, "RPUSH", key_of("folds"), "x" * rest, *("x" * size for _ in range(59)))
        [page] = await audits.pages([PageWanted(ID, "folds", 0, 60)])
        assert len(page.entries) == entries

    async def test_a_job_is_unwanted_when_its_conversation_says_so(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Another generation or another count; one that is gone itself is nobody's worry."""
        await append_turns(store, ID, range(4))
        generation = (await store.load(ID, 2)).generation
        wanted, early, late = (stored_job(*of) for of in ((generation, 0), (generation, 2), ("before", 0)))
        assert await audits.unwanted([wanted, early, late]) == []
        for job in (early, late):
            await redis.set(job.key, "{}")
        assert await audits.unwanted([wanted, early, late]) == [(early, False), (late, False)]
        await redis.delete(key_of("history"), key_of("summary"))
        assert await audits.unwanted([wanted, early, late]) == [(wanted, True), (early, True), (late, True)]
        await redis.delete(wanted.key)
        assert await audits.unwanted([wanted]) == []
        assert await store.create(ID, owner="", metadata={})
        assert await audits.unwanted([early]) == [(early, False)]

    @pytest.mark.parametrize(
        "words",
        [
            ("HDEL", key_of("summary"), "generation"),
            ("HDEL", key_of("summary"), "summarized_message_count"),
            ("DEL", key_of("summary")),
        ],
    )
    async def test_what_is_damaged_says_nothing_about_its_jobs(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis, words: tuple[str, ...]
    ) -> None:
        """Without a state that can be read no job is unwanted, and none is removed."""
        await append_turns(store, ID, range(4))
        job = stored_job("before", 0)
        await redis.set(job.key, "{}")
        await command(redis, *words)
        for _ in range(2):
            before = await dump(redis)
            assert await audits.unwanted([job]) == []
            assert not await audits.remove_job(job)
            assert await dump(redis) == before
            await put_foreign(redis, "summary")


async def repair(audits: AuditStore, kind: RepairKind, *changes: Change) -> bool:
    """Mend what is as it is found now."""
    return await audits.repair(kind, await state_of(audits), changes)


async def assert_left_alone(audits: AuditStore, redis: ArqRedis, kind: RepairKind, *changes: Change) -> None:
    before = await dump(redis)
    assert not await repair(audits, kind, *changes)
    assert await dump(redis) == before


class TestRepairs:
    @pytest.mark.parametrize(
        ("kind", "part"),
        [
            *((RepairKind.COUNTERS, part) for part in ("history", "summary", "folds")),
            *((RepairKind.TURNS, part) for part in ("history", "summary", "turns", "context")),
            *((RepairKind.OUTBOX, part) for part in ("history", "summary", "pending", "queue")),
            *((RepairKind.INDEX, "conversations"), (RepairKind.LIFETIMES, "summary")),
        ],
    )
    async def test_a_foreign_key_is_left_alone(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis, kind: RepairKind, part: str
    ) -> None:
        """Nothing is mended beside it, although there is something to mend."""
        await append_turns(store, ID, range(4))
        await redis.zadd(key_of("turns"), {"not there": 100})
        await redis.zrem(key_of("pending"), ID)
        await redis.set(key_of("lock"), "for ever")
        await put_foreign(redis, part)
        await assert_left_alone(audits, redis, kind)

    @pytest.mark.parametrize(
        "words",
        [
            ("HSET", key_of("summary"), "generation", "another"),
            ("RPUSH", key_of("history"), "another"),
            ("RPUSH", key_of("folds"), "another"),
            ("HSET", key_of("summary"), "version", 6),
            ("HSET", key_of("summary"), "odd", 1),
        ],
    )
    async def test_counters_that_moved_meanwhile_are_left_alone(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis, words: tuple[object, ...]
    ) -> None:
        """Whatever of what was read is different now, not one field is written."""
        await append_turns(store, ID, range(4))
        await command(redis, "HSET", key_of("summary"), "version", 5)
        changes = [Change("message_count", "8", "6"), Change("version", "5", "0"), Change("odd", "", "3")]
        stored = await state_of(audits)
        await command(redis, *words)
        before = await dump(redis)
        assert not await audits.repair(RepairKind.COUNTERS, stored, changes)
        assert await dump(redis) == before

    async def test_counters_are_put_right_together(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Each of them, also one that was not there, and nothing else."""
        await append_turns(store, ID, range(4))
        await command(redis, "HSET", key_of("summary"), "version", 5)
        before = (await state_of(audits)).fields
        changes = [Change("message_count", "8", "6"), Change("version", "5", "0"), Change("odd", "", "3")]
        assert await repair(audits, RepairKind.COUNTERS, *changes)
        assert (await state_of(audits)).fields == {**before, "message_count": "6", "version": "0", "odd": "3"}

    async def test_turns_that_are_not_there_are_forgotten(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Beyond the last message only: the newest turn and its context stay."""
        await append_turns(store, ID, range(4))
        await assert_left_alone(audits, redis, RepairKind.TURNS)
        before = await dump(redis)
        await redis.zadd(key_of("turns"), {"not there": 9})
        assert await repair(audits, RepairKind.TURNS)
        assert await dump(redis) == before

    @pytest.mark.parametrize(
        ("record", "is_forgotten"),
        [('{"position":6}', False), ('{"position":7}', True), ("{}", False), ("6", False), ("nonsense", False)],
    )
    async def test_a_context_whose_messages_are_not_there_is_forgotten(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis, record: str, is_forgotten: bool
    ) -> None:
        """It needs two of them; one that names none, or that nobody can read, is left."""
        await append_turns(store, ID, range(4))
        await redis.set(key_of("context"), record)
        if is_forgotten:
            assert await repair(audits, RepairKind.TURNS)
            assert not await redis.exists(key_of("context"))
            await assert_left_alone(audits, redis, RepairKind.TURNS)
        else:
            await assert_left_alone(audits, redis, RepairKind.TURNS)

    async def test_the_list_holds_what_is_there(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """By its last activity, or by now where that cannot be read; what is gone is taken off once."""
        await append_turns(store, ID, range(1))
        await redis.zadd(key_of("conversations"), {ID: 5})
        await assert_left_alone(audits, redis, RepairKind.INDEX)
        active = (await store.inspect(ID, 2)).updated_at

        async def is_listed_at() -> float:
            await redis.delete(key_of("conversations"))
            assert await repair(audits, RepairKind.INDEX)
            return float(await redis.zscore(key_of("conversations"), ID) or 0)

        await command(redis, "HSET", key_of("summary"), "updated_at", active - 1_000)
        assert await is_listed_at() == active - 1_000
        for words in (
            ("HSET", key_of("summary"), "updated_at", "lately"),
            ("HDEL", key_of("summary"), "updated_at"),
            ("DEL", key_of("summary")),
            ("SADD", key_of("summary"), "foreign"),
            ("DEL", key_of("history")),
        ):
            await command(redis, *words)
            before = await now_ms(redis)
            assert before <= await is_listed_at() <= await now_ms(redis)
        await redis.delete(key_of("summary"))
        assert await repair(audits, RepairKind.INDEX)
        assert await store.conversation_ids() == []
        await assert_left_alone(audits, redis, RepairKind.INDEX)

    async def test_what_waits_is_listed_and_asked_for(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """A full window is nothing that waits; one turn more is; what is listed for nothing is asked for as well."""
        for turns, is_listed in ((3, False), (3, True), (4, False)):
            await append_turns(store, ID, range(turns))
            if is_listed:
                await redis.zadd(key_of("pending"), {ID: 1})
            else:
                await redis.delete(key_of("pending"))
            job = job_id(ID, (await store.load(ID, 2)).generation, 0)
            await redis.delete(QUEUE, f"arq:job:{job}")
            if turns == 3 and not is_listed:
                await assert_left_alone(audits, redis, RepairKind.OUTBOX)
                continue
            before = await now_ms(redis)
            assert await repair(audits, RepairKind.OUTBOX)
            due = await redis.zscore(key_of("pending"), ID)
            assert due is not None
            assert before <= due - SWEEP_GRACE_MS <= await now_ms(redis)
            assert await redis.zrange(QUEUE, 0, -1) == [job.encode()]

    async def test_only_what_is_gone_is_taken_out_of_the_outbox(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Half a conversation is not gone; one without messages is none that is gone either."""
        await append_turns(store, ID, range(4))
        await redis.delete(key_of("summary"))
        await assert_left_alone(audits, redis, RepairKind.OUTBOX)
        await redis.delete(key_of("history"))
        assert await repair(audits, RepairKind.OUTBOX)
        assert not await redis.exists(key_of("pending"))
        await assert_left_alone(audits, redis, RepairKind.OUTBOX)
        await store.create(ID, owner="", metadata={})
        await assert_left_alone(audits, redis, RepairKind.OUTBOX)
        await redis.zadd(key_of("pending"), {ID: 1})
        assert await repair(audits, RepairKind.OUTBOX)
        assert (await redis.zscore(key_of("pending"), ID) or 0) > 1

    async def test_all_keys_live_as_long_as_the_conversation_says(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """For ever or up to a moment; a lock lives as it does, but never for more than a minute once it has none."""
        await append_turns(store, ID, range(4))
        await fold(store, 2)
        moment = await now_ms(redis) + DAY_MS
        for says in (-1, moment):
            for part in LASTING:
                await command(redis, "PEXPIREAT", key_of(part), moment + DAY_MS)
            await redis.set(key_of("lock"), "mine", px=300_000)
            if says == moment:
                await command(redis, "HSET", key_of("summary"), "expires_at", moment)
            assert await repair(audits, RepairKind.LIFETIMES)
            assert {await command(redis, "PEXPIRETIME", key_of(part)) for part in LASTING} == {says}
            assert 200_000 < await redis.pttl(key_of("lock")) <= 300_000
            await redis.set(key_of("lock"), "for ever")
            assert await repair(audits, RepairKind.LIFETIMES)
            assert 0 < await redis.pttl(key_of("lock")) <= 60_000

    @pytest.mark.parametrize("says", [1, "soon"])
    async def test_what_is_over_is_not_deleted(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis, says: object
    ) -> None:
        """Only a lock that would have stayed gets an end."""
        await append_turns(store, ID, range(4))
        await command(redis, "HSET", key_of("summary"), "expires_at", says)
        await assert_left_alone(audits, redis, RepairKind.LIFETIMES)
        await redis.set(key_of("lock"), "for ever")
        before = await dump(redis)
        assert await repair(audits, RepairKind.LIFETIMES)
        after = await dump(redis)
        assert {key for key in before if before[key] != after.get(key)} == {key_of("lock").encode()}
        assert 0 < await redis.pttl(key_of("lock")) <= 60_000

    async def test_a_lifetime_that_changed_meanwhile_is_left_alone(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Another turn has set it, and all keys with it."""
        await append_turns(store, ID, range(4))
        stored = await state_of(audits)
        await append_turns(ConversationStore(redis, ttl_seconds=100), ID, range(4, 5))
        before = await dump(redis)
        assert not await audits.repair(RepairKind.LIFETIMES, stored, ())
        assert await dump(redis) == before

    async def test_leftovers_are_those_of_a_conversation_that_is_gone(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """With a history or a summary beside them they are none."""
        await append_turns(store, ID, range(4))
        await redis.delete(key_of("summary"))
        await assert_left_alone(audits, redis, RepairKind.LEFTOVERS)
        await redis.delete(key_of("history"))
        await command(redis, "HSET", key_of("summary"), "generation", "g")
        await assert_left_alone(audits, redis, RepairKind.LEFTOVERS)
        await redis.delete(key_of("summary"))
        assert await repair(audits, RepairKind.LEFTOVERS)
        assert not [key for key in await all_keys(redis) if f":{ID}:".encode() in key and key.startswith(b"memora")]
        await assert_left_alone(audits, redis, RepairKind.LEFTOVERS)

    async def test_a_job_goes_with_all_that_arq_knows_of_it(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """One of another generation, of another count, of a conversation that is gone; also only its tries."""
        await append_turns(store, ID, range(4))
        healthy = await dump(redis)
        generation = (await store.load(ID, 2)).generation
        for job in (stored_job(generation, 2), stored_job("before", 0)):
            name = job.key.removeprefix("arq:job:")
            await redis.zadd(QUEUE, {name: 1})
            await redis.set(job.key, "{}")
            await redis.set(f"arq:retry:{name}", 1)
            assert await audits.remove_job(job)
            assert await dump(redis) == healthy
            await redis.set(f"arq:retry:{name}", 1)
            assert await audits.remove_job(job)
            assert not await audits.remove_job(job)
        await redis.delete(key_of("history"), key_of("summary"))
        assert await audits.remove_job(stored_job(generation, 0))
        assert await all_keys(redis) == [key for key in sorted(healthy) if key not in gone_with(generation)]

    async def test_a_job_that_is_wanted_or_runs_is_not_removed(
        self, store: ConversationStore, audits: AuditStore, redis: ArqRedis
    ) -> None:
        """Also that of a conversation without messages; nor any while the queue is another's key."""
        await append_turns(store, ID, range(4))
        wanted = stored_job((await store.load(ID, 2)).generation, 0)
        running = stored_job("before", 0)
        await redis.set(running.key, "{}")
        await redis.set(running.key.replace(":job:", ":in-progress:"), 1)
        for job in (wanted, running):
            before = await dump(redis)
            assert not await audits.remove_job(job)
            assert await dump(redis) == before
        await redis.flushall()
        await store.create(ID, owner="", metadata={})
        wanted = stored_job((await store.load(ID, 2)).generation, 0)
        await redis.set(wanted.key, "{}")
        assert not await audits.remove_job(wanted)
        await put_foreign(redis, "queue")
        await redis.set(running.key, "{}")
        before = await dump(redis)
        assert not await audits.remove_job(running)
        assert await dump(redis) == before


def gone_with(generation: str) -> set[bytes]:
    """What a conversation loses with its history and its summary, and with its only job."""
    job = f"arq:job:{job_id(ID, generation, 0)}"
    return {key.encode() for key in (key_of("history"), key_of("summary"), job, QUEUE)}


DAMAGED_READERS: dict[str, tuple[Callable[[ConversationStore], Awaitable[object]], int]] = {
    "page": (lambda store: store.page(ID, 0, 10), 3),
    "begin_turn": (lambda store: begin(store, "mine", "turn-4"), 9),
    "load_fold": (lambda store: store.load_fold(ID, most_messages=2, window=2), 8),
    "inspect": (lambda store: store.inspect(ID, 0, 2), 8),
    "last_context: question": (lambda store: store.last_context(ID), 8),
    "last_context: tail": (lambda store: store.last_context(ID), 7),
}


@pytest.mark.parametrize("name", DAMAGED_READERS)
async def test_a_message_that_cannot_be_read_is_damage_of_the_history(
    store: ConversationStore, redis: ArqRedis, name: str
) -> None:
    """Whoever meets it names the history, not the summary; no JSON or no message, it is all the same."""
    read, position = DAMAGED_READERS[name]
    await append_turns(store, ID, range(5))
    assert await read(store)
    for record in ("nonsense", "[]", "{}"):
        await command(redis, "LSET", key_of("history"), position, record)
        with pytest.raises(ConversationDamaged) as damaged:
            await read(store)
        assert damaged.value.key == key_of("history")


class TestUnits:
    async def test_a_long_lease_is_exact(self, store: ConversationStore, redis: ArqRedis) -> None:
        """A lock, a claim and what is left of them: to the second in eleven days."""
        lease = 1_000_000.0
        await append_turns(store, ID, range(1))
        await begin(store, "mine", lease_seconds=lease)
        busy = await begin(store, "another", lease_seconds=lease)
        assert isinstance(busy, Busy)
        assert lease - 60 < busy.seconds <= lease
        await redis.zadd(QUEUE, {"job": 5})
        assert await store.claim_jobs(["job"], most=1, now_ms=5, lease_seconds=lease) == [("job", 5)]
        assert lease - 60 < await redis.pttl("arq:in-progress:job") / 1_000 <= lease

    async def test_the_backlog_of_all_shards_has_one_queue(self, redis: ArqRedis) -> None:
        """Conversations and messages add up over the shards; the jobs are counted once, whosever they are."""
        store = ConversationStore(redis, shards=4)
        for name in ("talk-0", "talk-1", "talk-2"):
            await append_turns(store, name, range(4))
        await redis.zadd(QUEUE, {f"another-{number}": number for number in range(4)})
        backlog = await store.backlog(most=100)
        assert (backlog.conversations, backlog.queued_jobs, backlog.messages) == (3, 7, 6)


class TestRecords:
    @pytest.mark.parametrize(
        "wrong",
        [
            *({"role": "system"}, {"content": None}, {"tokens": "many"}, {"at": "noon"}, {"phase": 3}),
            *({"incomplete": True}, {"vocabulary": 1}, {"absent": 1}, {"details": []}),
        ],
    )
    async def test_a_field_of_another_type_is_damage(
        self, store: ConversationStore, redis: ArqRedis, wrong: dict[str, object]
    ) -> None:
        """One of them is enough, whichever it is; with all of them right, or left out, the message is read."""
        await append_turns(store, ID, range(1))
        right = {"role": "user", "content": "", "tokens": 0, "absent": True, "details": {"a": 1}, "phase": "x", "at": 5}
        await command(redis, "LSET", key_of("history"), 0, json.dumps(right))
        page = await store.page(ID, 0, 1)
        assert page
        assert page.messages == (Message("user", "", 0, 5, "x", absent=True, details={"a": 1}),)
        await command(redis, "LSET", key_of("history"), 0, json.dumps({"role": "user", "content": "x", "tokens": 1}))
        page = await store.page(ID, 0, 1)
        assert page
        assert page.messages == (Message("user", "x", 1, 0),)
        await command(redis, "LSET", key_of("history"), 0, json.dumps(right | wrong))
        with pytest.raises(ConversationDamaged):
            await store.page(ID, 0, 1)

    async def test_a_text_is_stored_as_it_is(self, store: ConversationStore, redis: ArqRedis) -> None:
        """Whatever the language, it takes no more room than its UTF-8."""
        await store.append(ID, replace(turn(Conversation(ID), 0), user=message("user", "我有貓")))
        assert "我有貓".encode() in await command(redis, "LINDEX", key_of("history"), 0)

    def test_a_record_holds_what_there_is(self) -> None:
        """Nothing of what a message does not need, everything else."""
        assert message_record(Message("user", "x", 1)) == {"role": "user", "content": "x", "tokens": 1}
        assert message_record(Message("assistant", "x", 1, 5, "p", "i", "v", absent=True, details={"a": 1})) == {
            "role": "assistant",
            "content": "x",
            "tokens": 1,
            "at": 5,
            "phase": "p",
            "incomplete": "i",
            "vocabulary": "v",
            "absent": True,
            "details": {"a": 1},
        }

    def test_a_life_has_a_name_of_sixteen_digits(self) -> None:
        """Another one each time."""
        names = {new_generation() for _ in range(100)}
        assert len(names) == 100
        assert {len(bytes.fromhex(name)) for name in names} == {8}


class TestTooLate:
    async def test_a_turn_of_another_life_or_under_another_lock_is_not_stored(
        self, store: ConversationStore, redis: ArqRedis
    ) -> None:
        """Each is told why, and nothing changes."""
        await append_turns(store, ID, range(1))
        conversation = await store.load(ID, MOST_MESSAGES)
        await begin(store, "another")
        before = await dump(redis)
        with pytest.raises(ConversationLocked):
            await store.append(ID, replace(turn(conversation, 1), lock_token="mine"))
        with pytest.raises(ConversationDeleted):
            await store.append(ID, turn(replace(conversation, generation="before"), 1))
        assert await dump(redis) == before


ALL_KEYS = ("~memora:*", "~arq:*")


class TestRights:
    @pytest.mark.parametrize(
        ("rules", "missing"),
        [
            ((*ALL_KEYS, "+@all"), ""),
            ((*ALL_KEYS, "+@all", "-hset"), "HSET memora:{0}:-:summary"),
            ((*ALL_KEYS, "+@all", "-hgetall"), "HGETALL memora:{0}:-:summary"),
            ((*ALL_KEYS, "+@all", "-rpush"), "RPUSH memora:{0}:-:history"),
            ((*ALL_KEYS, "+@all", "-lrange"), "LRANGE memora:{0}:-:history"),
            ((*ALL_KEYS, "+@all", "-zadd"), "ZADD memora:{0}:pending"),
            ((*ALL_KEYS, "+@all", "-xadd"), "XADD memora:{0}:-:events"),
            ((*ALL_KEYS, "+@all", "-unlink"), "UNLINK memora:{0}:-:history"),
            ((*ALL_KEYS, "+@all", "-set"), "SET memora:{0}:-:lock"),
            ((*ALL_KEYS, "+@all", "-psetex"), "PSETEX arq:job:-"),
            ((*ALL_KEYS, "+@all", "-get"), "GET arq:job:-"),
            ((*ALL_KEYS, "+@all", "-del"), "DEL arq:job:-"),
            ((*ALL_KEYS, "+@all", "-incr"), "INCR arq:retry:-"),
            (("~memora:*", "+@all"), "PSETEX arq:job:-"),
            (("~memora:*", "~arq:job:*", "+@all"), "PSETEX arq:in-progress:-"),
            (("~memora:*", "~arq:job:*", "~arq:in-progress:*", "+@all"), "INCR arq:retry:-"),
            (("~memora:*", "~arq:job:*", "~arq:in-progress:*", "~arq:retry:*", "+@all"), "PSETEX arq:result:-"),
        ],
    )
    async def test_the_first_that_is_missing_is_named(
        self, redis: ArqRedis, redis_server: EmbeddedRedis, rules: tuple[str, ...], missing: str
    ) -> None:
        """Command and key, as they are written in a rule; nothing is written to find out."""
        await command(redis, "ACL", "SETUSER", "guest", "reset", "on", ">right", "&*", *rules)
        client = open_redis(redis_server.url.replace("unix://", "unix://guest:right@"))
        try:
            assert await ConversationStore(client).missing_right() == missing
            assert await all_keys(redis) == []
        finally:
            await close_redis(client)
            await command(redis, "ACL", "DELUSER", "guest")
