"""Hostile hands and bad days of Redis: a fail-over, tight rules, a clock set back, keys that are gone, a false server.

Each has an outcome that users can rely on. What a foreign key, a full Redis or a hostile job does to one operation is
in test_store.py and test_worker.py.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote, unquote

import anyio
import anyio.to_thread
import openai
import pytest
from arq.connections import ArqRedis
from command_line import CommandLine
from polling import eventually
from redis_view import all_keys, command, dump
from serving import ask, serve
from talk import ID, caught_up, changed, count_of, folds_of, history_of, look, say, say_all, worker_beside
from tcp_proxy import TcpProxy
from turns import MOST_MESSAGES, WINDOW_MESSAGES, append_turns, fold_result, message, turn

from memora.bootstrap import Memora, open_memora
from memora.conversations import ConversationService
from memora.core.conversation import Conversation
from memora.embedded_redis import EmbeddedRedis
from memora.errors import StoreRefused
from memora.fold_queue import QUEUE
from memora.redis_connection import close_redis, open_redis
from memora.settings import Settings
from memora.storage import open_storage
from memora.store import BegunTurn, Busy, CommitStatus, ConversationStore, FoldSnapshot

CATS = ["I live in Taipei.", *(f"I have {number} cats." for number in range(2, 6))]
PENDING = "memora:{0}:pending"
HOUR_MS = 3_600_000


async def snapshot_of(store: ConversationStore) -> FoldSnapshot:
    snapshot = await store.load_fold(ID, most_messages=MOST_MESSAGES, window=WINDOW_MESSAGES)
    assert snapshot
    return snapshot


# --- A fail-over


class Pair:
    """A primary and its replica, a network between them, and the address that clients use."""

    def __init__(self, primary: EmbeddedRedis, replica: EmbeddedRedis, link: TcpProxy, address: TcpProxy) -> None:
        self.link = link
        self.address = address
        self._primary = primary
        self._replica = replica

    async def join(self) -> None:
        """Make the second server a replica of the first, and wait until it has everything."""
        async with client_of(self._replica.url) as replica:
            host, port = self.link.url.removeprefix("redis://").split(":")
            await command(replica, "REPLICAOF", host, port)
            await eventually(self.is_in_step)

    async def is_in_step(self) -> bool:
        """Whether the replica has all that the primary has."""
        async with client_of(self._primary.url) as primary, client_of(self._replica.url) as replica:
            leads, follows = await primary.info("replication"), await replica.info("replication")
        in_step = leads["master_repl_offset"] == follows.get("slave_repl_offset")
        return bool(in_step and follows.get("master_link_status") == "up")

    def point_to_replica(self) -> None:
        """Clients come to the replica from now on."""
        self.address.retarget(self._replica.url)

    async def promote(self) -> None:
        """The replica becomes the primary."""
        async with client_of(self._replica.url) as replica:
            await command(replica, "REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[ArqRedis]:
    client = open_redis(url)
    try:
        yield client
    finally:
        await close_redis(client)


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[tuple[EmbeddedRedis, EmbeddedRedis]]:
    with EmbeddedRedis(tmp_path / "one") as one, EmbeddedRedis(tmp_path / "two") as two:
        yield one, two


@pytest.fixture
async def pair(two_servers: tuple[EmbeddedRedis, EmbeddedRedis]) -> AsyncIterator[Pair]:
    """The two of them, in step."""
    primary, replica = two_servers
    async with TcpProxy(primary.url) as link, TcpProxy(primary.url) as address:
        joined = Pair(primary, replica, link, address)
        await joined.join()
        yield joined


@pytest.fixture
async def memora(settings: Settings, pair: Pair) -> AsyncIterator[Memora]:
    """Memora on the pair."""
    async with open_memora(changed(settings, redis_url=pair.address.url)) as opened:
        yield opened


class TestFailOver:
    async def test_to_a_replica_in_step_everything_goes_on(self, memora: Memora, pair: Pair) -> None:
        """No turn is lost, and the same worker folds on."""
        async with worker_beside(memora):
            await say_all(memora, CATS)
            await caught_up(memora, ID)
            await eventually(pair.is_in_step)
            await pair.promote()
            pair.point_to_replica()
            await say_all(memora, CATS)
            await caught_up(memora, ID, seconds=20)
        assert [item.content for item in await history_of(memora)][::2] == CATS * 2
        assert await count_of(memora) == 14
        await assert_the_folds_tile(memora)

    async def test_to_a_lagging_one_the_newest_is_lost_and_the_rest_is_whole(self, memora: Memora, pair: Pair) -> None:
        """What the replica had not got is gone, turns and folds alike; what it has is one consistent conversation."""
        await say_all(memora, CATS)
        await eventually(pair.is_in_step)
        pair.link.partition()
        await memora.folds.fold(ID)
        await say_all(memora, ["I moved to Tainan.", "I have a dog."])
        loaded = await memora.store.load(ID, MOST_MESSAGES)
        snapshot = await snapshot_of(memora.store)
        assert (loaded.message_count, snapshot.summary.summarized_message_count) == (14, 4)
        await pair.promote()
        pair.point_to_replica()
        assert [item.content for item in await history_of(memora)][::2] == CATS
        assert await count_of(memora) == 0
        # What was begun before meets the state there is: the turn is appended whole, the fold loses its race.
        assert (await memora.store.append(ID, turn(loaded, "later"))).message_count == 12
        committed = await memora.store.commit_fold(
            snapshot, 6, fold_result(), fold_id="f", window_messages=WINDOW_MESSAGES
        )
        assert committed.status is CommitStatus.STALE
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert await count_of(memora) == 6
        await assert_the_folds_tile(memora)

    async def test_before_the_promotion_writes_are_refused_and_reads_go_on(self, memora: Memora, pair: Pair) -> None:
        """A replica says which of the two it is; nothing is stored, and after the promotion the same turn is."""
        await say_all(memora, CATS)
        await eventually(pair.is_in_step)
        pair.point_to_replica()
        with pytest.raises(StoreRefused, match="read-only replica"):
            await say(memora, "Where do I live?")
        assert len(await history_of(memora)) == 10
        await pair.promote()
        assert "Taipei" in (await say(memora, "Where do I live?")).text
        assert len(await history_of(memora)) == 12


async def assert_the_folds_tile(memora: Memora) -> None:
    folds = await folds_of(memora)
    assert [fold.start for fold in folds] == [0, *(fold.end for fold in folds)][: len(folds)]
    assert [fold.version for fold in folds] == list(range(1, len(folds) + 1))
    assert folds[-1].end == await count_of(memora)
    assert folds[-1].summary == (await look(memora)).conversation.summary.text


# --- Writes that Redis refuses


@pytest.mark.parametrize("trouble", ["full", "read-only"])
async def test_every_other_write_is_refused_whole_too(store: ConversationStore, redis: ArqRedis, trouble: str) -> None:
    """Locks, new conversations, imports, metadata and removals: refused as retryable, and not a byte has changed."""
    await append_turns(store, ID, range(1, 6))
    assert isinstance(await begin(store, "mine"), BegunTurn)
    generation = (await store.load(ID, MOST_MESSAGES)).generation
    pair = [message("user", "question"), message("assistant", "answer")]
    writes: list[Callable[[], Awaitable[object]]] = [
        lambda: store.create("new-talk", owner="", metadata={}),
        lambda: store.set_metadata(ID, owner="", metadata={"topic": "cats"}),
        lambda: store.import_messages(
            ID, pair, import_id="i", generation=generation, window_messages=WINDOW_MESSAGES, lock_token="mine"
        ),
        lambda: begin(store, "mine"),
        lambda: store.remove_message(ID, generation, 8, lock_token="mine"),
    ]
    before = await dump(redis)
    await (redis.config_set("maxmemory", 1) if trouble == "full" else command(redis, "REPLICAOF", "127.0.0.1", 1))
    try:
        for write in writes:
            with pytest.raises(StoreRefused) as refused:
                await write()
            assert refused.value.retryable
        assert await dump(redis) == before
    finally:
        await (redis.config_set("maxmemory", 0) if trouble == "full" else command(redis, "REPLICAOF", "NO", "ONE"))
    for write in writes:
        assert await write()


async def begin(store: ConversationStore, token: str, lease_seconds: float = 20) -> object:
    return await store.begin_turn(
        ID, lock_token=token, lease_seconds=lease_seconds, turn_id="new", most_messages=MOST_MESSAGES, may_begin=True
    )


async def test_a_read_only_redis_is_a_503_that_heals(settings: Settings, redis: ArqRedis) -> None:
    """The client hears `storage_unavailable`, what is stored can be read, and later the turn goes through."""
    async with serve(settings) as serving, serving.client(max_retries=0) as client:
        conversation = (await client.conversations.create()).id
        await ask(client, CATS[0], conversation)
        await command(redis, "REPLICAOF", "127.0.0.1", 1)
        try:
            with pytest.raises(openai.InternalServerError) as refused:
                await ask(client, CATS[1], conversation)
            assert (refused.value.status_code, refused.value.code) == (503, "storage_unavailable")
            assert len((await client.conversations.items.list(conversation)).data) == 2
        finally:
            await command(redis, "REPLICAOF", "NO", "ONE")
        await ask(client, CATS[1], conversation)
        assert len(await serving.turns(conversation)) == 2


# --- Rules of access


@asynccontextmanager
async def user_with(redis: ArqRedis, server: EmbeddedRedis, *rules: str) -> AsyncIterator[str]:
    """A user with these rules; the URL to come as that user."""
    await command(redis, "ACL", "SETUSER", "guest", "reset", "on", ">secret-pass", *rules)
    try:
        yield server.url.replace("unix://", "unix://guest:secret-pass@")
    finally:
        await command(redis, "ACL", "DELUSER", "guest")


COMMANDS = ("+@all", "-@admin", "-@dangerous", "+info")


async def test_the_keys_and_channels_of_memora_and_arq_are_enough(
    settings: Settings, redis: ArqRedis, redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """A user confined to `memora:*` and `arq:*` chats, folds, removes and deletes; its password is in no log."""
    caplog.set_level(logging.DEBUG)
    async with user_with(redis, redis_server, "~memora:*", "~arq:*", "&memora:*", *COMMANDS) as url:
        async with open_memora(changed(settings, redis_url=url)) as memora:
            async with worker_beside(memora):
                await say_all(memora, CATS)
                await caught_up(memora, ID)
            assert await count_of(memora) == 4
            service = ConversationService(memora.settings, memora.store, memora.chat)
            conversation = await service.create("", {}, [message("user", "Hello")])
            assert await service.remove_message(conversation, "", 0, wait_seconds=1)
            await service.delete(conversation, "")
            assert await memora.store.delete(ID)
        assert await all_keys(redis) == []
    assert "secret-pass" not in caplog.text


@pytest.mark.parametrize("arq", [(), ("%R~arq:*",)], ids=["not at all", "not to write"])
async def test_without_the_keys_of_arq_nothing_is_half_written(
    store: ConversationStore, redis: ArqRedis, redis_server: EmbeddedRedis, arq: tuple[str, ...]
) -> None:
    """That is found out about before the first write: a turn that is refused is not in the history."""
    await append_turns(store, ID, range(1, 6))
    conversation, snapshot = await store.load(ID, MOST_MESSAGES), await snapshot_of(store)
    await begin(store, "mine")
    before = await dump(redis)
    rules = ("~memora:*", "&memora:*", *COMMANDS, *arq)
    async with user_with(redis, redis_server, *rules) as url, client_of(url) as client:
        confined = ConversationStore(client)
        writes: list[Callable[[], Awaitable[object]]] = [
            lambda: confined.append(ID, turn(conversation, 6)),
            lambda: confined.append("new-talk", turn(Conversation("new-talk"), 1)),
            lambda: confined.commit_fold(snapshot, 4, fold_result(), fold_id="f", window_messages=WINDOW_MESSAGES),
            lambda: confined.remove_message(ID, conversation.generation, 8, lock_token="mine"),
            lambda: confined.delete(ID),
        ]
        for write in writes:
            with pytest.raises(StoreRefused, match=r"arq:\*"):
                await write()
        assert await confined.load(ID, MOST_MESSAGES) == conversation
    assert await dump(redis) == before


@pytest.mark.parametrize(
    ("rules", "forbidden"),
    [
        (("~memora:*", "~arq:*"), ""),
        (("~memora:*", "%R~arq:*"), "PSETEX arq:job:-"),
        (("~memora:*", "%W~arq:*"), "GET arq:job:-"),
        (("~memora:*",), "PSETEX arq:job:-"),
        (("%R~memora:*", "~arq:*"), "HSET memora:{0}:-:summary"),
        (("~memora:*", "~arq:*", "-rpush"), "RPUSH memora:{0}:-:history"),
    ],
)
async def test_a_right_that_is_missing_is_named_before_it_is_missed(
    settings: Settings, redis: ArqRedis, redis_server: EmbeddedRedis, rules: tuple[str, ...], forbidden: str
) -> None:
    """Redis is asked, without a write, for what turns, folds and arq need."""
    async with (
        user_with(redis, redis_server, *COMMANDS, "&memora:*", *rules) as url,
        open_storage(changed(settings, redis_url=url)) as storage,
    ):
        assert (await storage.health(time.time())).forbids == forbidden
    assert await all_keys(redis) == []


async def test_the_doctor_says_how_to_give_a_right(
    redis: ArqRedis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """One line with what is forbidden and the remedy, and without the password."""
    async with user_with(redis, redis_server, *COMMANDS, "&memora:*", "~memora:*", "%R~arq:*") as url:
        doctor = CommandLine(tmp_path).using(MEMORA_REDIS_URL=url, MEMORA_OFFLINE="1")
        ran = await anyio.to_thread.run_sync(doctor.run, "doctor", "--json")
    (check,) = [check for check in ran.json["checks"] if check["check"] == "rights"]
    assert (ran.code, check["status"]) == (1, "problem")
    assert "PSETEX arq:job:-" in check["message"]
    assert "ACL SETUSER" in check["message"]
    assert "secret-pass" not in ran.out + ran.err


# --- A clock that is set back


async def test_a_fold_does_not_wait_until_the_clock_has_come_round(settings: Settings, redis: ArqRedis) -> None:
    """What was put off and enqueued two hours ahead of the clock there is now is folded at once."""
    async with open_memora(settings) as memora:
        await say_all(memora, CATS)
        now = int((await redis.time())[0]) * 1_000
        await redis.zadd(PENDING, {ID: now + 2 * HOUR_MS})
        ((job, _),) = await redis.zrange(QUEUE, 0, -1, withscores=True)
        await redis.zadd(QUEUE, {job: now + HOUR_MS})
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert await count_of(memora) == 4


async def test_a_back_off_is_not_mistaken_for_a_clock_set_back(store: ConversationStore, redis: ArqRedis) -> None:
    """The longest wait that a provider may ask for is waited for."""
    await append_turns(store, ID, range(1, 6))
    now = int((await redis.time())[0]) * 1_000
    await redis.zadd(PENDING, {ID: now + 300_000})
    assert (await store.sweep(most=10, again_seconds=5, lease_seconds=1)).due == 0


async def test_a_lock_is_not_held_until_the_clock_has_come_round(store: ConversationStore, redis: ArqRedis) -> None:
    """The lease of a holder that died before the clock was set back is cut down to a lease."""
    assert isinstance(await begin(store, "dead"), BegunTurn)
    await command(redis, "PEXPIRE", f"memora:{{0}}:{ID}:lock", 2 * HOUR_MS)
    busy = await begin(store, "mine")
    assert isinstance(busy, Busy)
    assert 19 < busy.seconds <= 20


# --- Keys that are gone


async def test_an_outbox_and_a_queue_that_were_evicted_come_back_with_the_next_turn(
    settings: Settings, redis: ArqRedis
) -> None:
    """Nothing that waits is forgotten for good, and the idempotency of older turns is all that is lost."""
    async with open_memora(settings) as memora:
        await say_all(memora, CATS)
        jobs = [key for key in await all_keys(redis) if key.startswith(b"arq:")]
        parts = [f"memora:{{0}}:{ID}:{part}" for part in ("turns", "context", "events")]
        await redis.delete(PENDING, QUEUE, "memora:{0}:conversations", *parts, *jobs)
        async with worker_beside(memora):
            await say(memora, "I have a dog.")
            await caught_up(memora, ID)
        assert await count_of(memora) == 6
        assert await memora.store.conversation_ids() == [ID]
        assert await memora.store.delete(ID)
        assert await all_keys(redis) == []


# --- Replies that are lost


async def test_a_removal_whose_reply_is_lost_has_happened(redis_server: EmbeddedRedis, redis: ArqRedis) -> None:  # noqa: ARG001  # empties it
    """Sent again by the client, it is not told that the conversation is gone."""
    async with TcpProxy(redis_server.url) as proxy, client_of(proxy.url) as client:
        store = ConversationStore(client)
        await append_turns(store, ID, range(1, 3))
        generation = (await store.load(ID, MOST_MESSAGES)).generation
        await begin(store, "mine")
        proxy.lose_reply_to(b'"absent"', times=2)
        assert await store.remove_message(ID, generation, 2, lock_token="mine")
        assert proxy.lost_replies == 2
        contents = [item.content async for item in store.messages(ID)]
        assert contents == ["question 1", "answer 1", "", "answer 2"]
        removals = [event async for event in _events(store)]
        assert removals.count("removed") == 1


async def _events(store: ConversationStore) -> AsyncIterator[str]:
    events = await store.events(ID, "0-1")
    assert events
    for event in events.events:
        yield event.data.split('"')[3]


# --- A server that is not the one it should be


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that is its own authority, and another authority."""
    openssl = shutil.which("openssl")
    if not openssl:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "stranger"):
        subprocess.run(
            [
                *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"), "-days", "2"),
                *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
            timeout=30,
        )
    return folder


@asynccontextmanager
async def over_tls(server: EmbeddedRedis, certificates: Path) -> AsyncIterator[tuple[str, list[bytes]]]:
    """The server behind TLS, as a URL; and everything that reached it, decrypted."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    arrived: list[bytes] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[bytes] | None) -> None:
        while data := await reader.read(65_536):
            if seen is not None:
                seen.append(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_unix_connection(unquote(server.url.removeprefix("unix://")))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(carry, reader, upstream[1], arrived)
            tasks.start_soon(carry, upstream[0], writer, None)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    async with listening:
        yield f"rediss://127.0.0.1:{listening.sockets[0].getsockname()[1]}", arrived


@pytest.mark.usefixtures("redis")
class TestTls:
    async def test_the_right_authority_is_all_it_takes(
        self, settings: Settings, redis_server: EmbeddedRedis, certificates: Path
    ) -> None:
        """`rediss://` with the authority in the URL works like any other."""
        async with over_tls(redis_server, certificates) as (url, arrived):
            trusting = f"{url}?ssl_ca_certs={quote(str(certificates / 'server.pem'))}"
            async with open_memora(changed(settings, redis_url=trusting)) as memora:
                assert "Taipei" in (await say_all(memora, [CATS[0], "Where do I live?"]))[1].text
            assert b"Taipei" in b"".join(arrived)

    @pytest.mark.parametrize("authority", ["stranger.pem", ""])
    async def test_another_authority_refuses_to_start(
        self, settings: Settings, redis_server: EmbeddedRedis, certificates: Path, authority: str
    ) -> None:
        """Said in one line that names the certificate; not a byte is sent, neither over TLS nor in plain."""
        async with over_tls(redis_server, certificates) as (url, arrived):
            doubting = f"{url}?ssl_ca_certs={quote(str(certificates / authority))}" if authority else url
            with pytest.raises(StoreRefused, match="certificate"):
                async with open_storage(changed(settings, redis_url=doubting)):
                    pass
        assert arrived == []
