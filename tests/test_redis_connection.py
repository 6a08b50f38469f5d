"""The connection to Redis: bounded when the server is away, frozen or cut off, and never deaf to a cancellation."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from arq.connections import ArqRedis
from polling import eventually
from redis_view import command
from talk import ID, folds_of, history_of, look, say, say_all
from tcp_proxy import TcpProxy
from turns import append_turns

from memora.bootstrap import Memora, open_memora
from memora.embedded_redis import EmbeddedRedis
from memora.errors import SettingsError, StoreError, StoreRefused, StoreUnavailable
from memora.fold import Folded
from memora.redis_connection import MAX_CONNECTIONS, close_redis, open_redis, redis_errors
from memora.settings import Settings
from memora.storage import open_storage
from memora.store import ConversationStore


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[ArqRedis]:
    client = open_redis(url)
    try:
        yield client
    finally:
        await close_redis(client)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that a test may stop and kill."""
    with EmbeddedRedis(tmp_path / "own") as server:
        yield server


@pytest.fixture
async def proxy(redis_server: EmbeddedRedis, redis: ArqRedis) -> AsyncIterator[TcpProxy]:  # noqa: ARG001  # empties it
    """A network between the test and the emptied server."""
    async with TcpProxy(redis_server.url) as running:
        yield running


@pytest.fixture
async def memora(settings: Settings, proxy: TcpProxy) -> AsyncIterator[Memora]:
    """Memora behind that network, its scripts already known to the server."""
    away = Settings.model_validate({**settings.model_dump(), "redis_url": proxy.url})
    async with open_memora(away) as opened:
        await say_all(opened, [f"I have {n} cats." for n in range(5)], "warm")
        assert isinstance(await opened.folds.fold("warm"), Folded)
        yield opened


async def process_of(redis: ArqRedis) -> int:
    return int((await redis.info("server"))["process_id"])


class TestThePool:
    async def test_whoever_has_waited_longest_comes_next(self, redis: ArqRedis) -> None:
        """A newcomer does not get ahead of those who wait, as it would in redis-py's own pool."""
        pool, order = redis.connection_pool, list[str]()
        held = [await pool.get_connection() for _ in range(MAX_CONNECTIONS)]

        async def use(name: str) -> None:
            connection = await pool.get_connection()
            order.append(name)
            await pool.release(connection)

        async with asyncio.TaskGroup() as tasks:
            for name in "abcde":
                tasks.create_task(use(name))
                await asyncio.sleep(0)
            await pool.release(held.pop())
            await use("newcomer")
        assert order == [*"abcde", "newcomer"]
        for connection in held:
            await pool.release(connection)

    async def test_what_is_cancelled_while_it_waits_or_holds_leaves_no_hole(self, redis: ArqRedis) -> None:
        """After many cancellations at every step all connections can be had at once."""

        async def read() -> None:
            await redis.get("key")

        for steps in range(200):
            task = asyncio.create_task(read())
            for _ in range(steps % 20):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        pool = redis.connection_pool
        for connection in [await pool.get_connection() for _ in range(MAX_CONNECTIONS)]:
            await pool.release(connection)

    async def test_a_full_pool_is_waited_for_a_bounded_time(self, redis: ArqRedis) -> None:
        """Whoever gets no connection hears of it as of a Redis that does not answer."""
        pool = redis.connection_pool
        held = [await pool.get_connection() for _ in range(MAX_CONNECTIONS)]
        vars(pool)["timeout"] = 0.05  # the real one takes seconds
        with pytest.raises(StoreUnavailable), redis_errors():
            await redis.ping()
        for connection in held:
            await pool.release(connection)
        assert await redis.ping()


class TestCancellation:
    async def test_it_always_takes(self, redis: ArqRedis) -> None:
        """Whatever the moment, one cancellation ends a task that talks to Redis; redis-py alone loses some of them."""
        lost = 0
        for steps in range(400):
            task = asyncio.create_task(talk_for_ever(redis))
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=1)
            lost += not done
            while not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=0.1)
        assert lost == 0

    async def test_the_connections_are_fit_for_use_afterwards(self, redis: ArqRedis) -> None:
        """A cancelled command leaves no reply behind for the next one to take for its own."""
        for steps in range(100):
            task = asyncio.create_task(talk_for_ever(redis))
            for _ in range(steps % 10):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert await redis.echo(f"reply {steps}") == f"reply {steps}".encode()


async def talk_for_ever(redis: ArqRedis) -> None:
    while True:
        await redis.echo("x" * 100)


class TestServerThatIsAway:
    @pytest.mark.parametrize("url", ["redis://127.0.0.1:9", "unix:///nowhere/redis.sock", "redis://host.invalid:6379"])
    async def test_nobody_there_is_said_within_seconds(self, settings: Settings, url: str) -> None:
        """Opening the storage says that Redis does not answer, and which variable to look at."""
        away = Settings.model_validate({**settings.model_dump(), "redis_url": url})
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="MEMORA_REDIS_URL"):
            async with open_storage(away):
                pass
        assert time.monotonic() - started < 5

    async def test_a_frozen_server_is_given_up_on_and_taken_back(self, own_server: EmbeddedRedis) -> None:
        """A server that holds its connections and says nothing costs a bounded time; when it wakes, all goes on."""
        async with client_of(own_server.url + "?socket_timeout=0.1&socket_connect_timeout=0.1") as client:
            store = ConversationStore(client, deadline_seconds=1.0)
            await append_turns(store, ID, range(1, 3))
            pid = await process_of(client)
            os.kill(pid, signal.SIGSTOP)
            try:
                started = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    await store.load(ID, 10)
                assert time.monotonic() - started < 2
            finally:
                os.kill(pid, signal.SIGCONT)
            assert (await store.load(ID, 10)).message_count == 4

    async def test_a_pause_shorter_than_the_timeout_goes_unnoticed(
        self, settings: Settings, own_server: EmbeddedRedis
    ) -> None:
        """Half a second of silence in the middle of a turn delays the turn and nothing else."""
        here = Settings.model_validate({**settings.model_dump(), "redis_url": own_server.url})
        async with open_memora(here) as memora, anyio.create_task_group() as tasks:
            await say(memora, "I live in Taipei.")
            pid = await process_of(memora.storage.redis)
            os.kill(pid, signal.SIGSTOP)

            async def wake() -> None:
                await anyio.sleep(0.5)
                os.kill(pid, signal.SIGCONT)

            tasks.start_soon(wake)
            assert "Taipei" in (await say(memora, "Where do I live?")).text
            assert len(await history_of(memora)) == 4

    async def test_what_was_acknowledged_survives_a_kill_and_a_restart(
        self, settings: Settings, own_server: EmbeddedRedis
    ) -> None:
        """The same client goes on with the server that comes after, and every stored turn is there."""
        here = Settings.model_validate({**settings.model_dump(), "redis_url": own_server.url})
        async with open_memora(here) as memora:
            await command(memora.storage.redis, "CONFIG", "SET", "appendfsync", "always")
            await say_all(memora, ["I live in Taipei.", "I have 2 cats."])
            os.kill(await process_of(memora.storage.redis), signal.SIGKILL)
            with pytest.raises(StoreUnavailable):
                await say(memora, "Where do I live?")
            await anyio.to_thread.run_sync(own_server.stop)
            await anyio.to_thread.run_sync(own_server.start)
            assert "Taipei" in (await say(memora, "Where do I live?")).text
            assert [m.content for m in await history_of(memora)][::2] == [
                "I live in Taipei.",
                "I have 2 cats.",
                "Where do I live?",
            ]

    async def test_killed_connections_cost_nothing(self, settings: Settings, redis: ArqRedis) -> None:
        """CLIENT KILL of everybody between and during turns: every turn is stored, whole and once."""
        async with open_memora(settings) as memora:
            for number in range(10):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(say, memora, f"I have {number} cats.")
                    with redis_errors():
                        await command(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            contents = [m.content for m in await history_of(memora)][::2]
            assert contents == [f"I have {number} cats." for number in range(10)]


class TestLostReplies:
    async def test_a_turn_whose_reply_is_lost_is_stored_once(self, memora: Memora, proxy: TcpProxy) -> None:
        """The script has run, its reply never arrives, the client sends it again: one turn, and its right figures."""
        for lost in range(1, 4):
            proxy.lose_reply_to(b":turns", times=lost)
            result = await say(memora, f"I have {lost} cats.")
            assert result.stats.stored_messages == 2 * lost
        assert proxy.lost_replies == 6
        conversation = (await look(memora)).conversation
        assert conversation.message_count == len(await history_of(memora)) == 6
        answers = (await history_of(memora))[1::2]
        assert conversation.usage.answer_output_tokens == sum(answer.tokens for answer in answers)

    async def test_a_load_whose_reply_is_lost_is_repeated(self, memora: Memora, proxy: TcpProxy) -> None:
        """Reading twice does no harm."""
        await say(memora, "I live in Taipei.")
        proxy.lose_reply_to(b":summary", times=2)
        assert "Taipei" in (await say(memora, "Where do I live?")).text

    async def test_a_commit_whose_reply_is_lost_counts_once(self, memora: Memora, proxy: TcpProxy) -> None:
        """One fold, its tokens once, no conflict with itself, and the caller hears that it was committed."""
        await say_all(memora, [f"I have {n} cats." for n in range(5)])
        proxy.lose_reply_to(b'"duration_seconds"')
        outcome = await memora.folds.fold(ID)
        assert proxy.lost_replies == 1
        assert isinstance(outcome, Folded)
        inspection = await look(memora)
        (fold,) = await folds_of(memora)
        assert inspection.fold_conflicts == 0
        assert inspection.conversation.usage.fold_tokens == fold.input_tokens + fold.output_tokens
        assert inspection.conversation.summary.version == 1

    async def test_a_failure_whose_reply_is_lost_counts_once(self, memora: Memora, proxy: TcpProxy) -> None:
        """Tokens and tries of a fold that failed are not doubled either."""
        await say_all(memora, [f"I have {n} cats." for n in range(5)])
        snapshot = await memora.store.load_fold(ID, most_messages=10, window=6)
        assert snapshot
        proxy.lose_reply_to(b"no luck")
        assert await memora.store.fail_fold(
            snapshot, fold_id="f", reason="no luck", rejected=True, input_tokens=7, output_tokens=3, delay_seconds=0
        )
        inspection = await look(memora)
        assert (proxy.lost_replies, inspection.fold_failures) == (1, 1)
        assert inspection.conversation.usage.fold_tokens == 10

    async def test_a_short_partition_in_the_middle_of_a_turn_heals(self, memora: Memora, proxy: TcpProxy) -> None:
        """The network is silent for a while when the turn is to be stored; then it is stored, once."""

        async def emit(_: str) -> None:
            proxy.partition()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(memora.chat.reply, ID, "I live in Taipei.", emit)

            async def the_turn_waits() -> bool:
                return b":turns" in proxy.held_back

            await eventually(the_turn_waits)
            proxy.heal()
        assert len(await history_of(memora)) == 2


class TestRefusals:
    async def test_a_wrong_password_is_said_and_not_shown(self, redis: ArqRedis, redis_server: EmbeddedRedis) -> None:
        """The error names the variable and not the password."""
        await command(redis, "ACL", "SETUSER", "guest", "on", ">right", "~*", "+@all")
        try:
            url = redis_server.url.replace("unix://", "unix://guest:wrong-pass@")
            async with client_of(url) as client:
                with pytest.raises(StoreRefused, match="MEMORA_REDIS_URL") as raised:
                    await ConversationStore(client).load(ID, 10)
            assert "wrong-pass" not in str(raised.value)
        finally:
            await command(redis, "ACL", "DELUSER", "guest")

    async def test_a_user_who_may_not_run_scripts_is_told_what_is_missing(
        self, redis: ArqRedis, redis_server: EmbeddedRedis
    ) -> None:
        """The ACL is named, so that it can be mended."""
        await command(redis, "ACL", "SETUSER", "guest", "on", ">right", "~other:*", "+@read")
        try:
            async with client_of(redis_server.url.replace("unix://", "unix://guest:right@")) as client:
                with pytest.raises(StoreRefused, match="ACL"):
                    await ConversationStore(client).load(ID, 10)
        finally:
            await command(redis, "ACL", "DELUSER", "guest")

    async def test_a_user_without_the_dangerous_commands_is_enough(
        self, settings: Settings, redis: ArqRedis, redis_server: EmbeddedRedis
    ) -> None:
        """Chat, fold, worker, sweep, inspection and deletion need nothing of @admin or @dangerous but INFO."""
        rules = ("on", ">right", "~*", "+@all", "-@admin", "-@dangerous", "+info")
        await command(redis, "ACL", "SETUSER", "guest", *rules)
        try:
            url = redis_server.url.replace("unix://", "unix://guest:right@")
            limited = Settings.model_validate({**settings.model_dump(), "redis_url": url})
            async with open_memora(limited) as memora, anyio.create_task_group() as tasks:
                worker = memora.worker()
                tasks.start_soon(worker.run)
                await say_all(memora, [f"I have {n} cats." for n in range(5)])

                async def folded() -> bool:
                    return (await look(memora)).conversation.summary.summarized_message_count == 4

                await eventually(folded)
                assert await memora.storage.workers() == 1
                await memora.storage.health(time.time())
                worker.stop()
            async with open_memora(limited) as memora:
                assert await memora.store.delete(ID)
        finally:
            await command(redis, "ACL", "DELUSER", "guest")


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "redis://host:port",
            "redis://:se/cret@host:6379",
            "redis://host:99999",
            "redis://host:1?no_such_option=1",
            "redis://host:1?max_connections=many",
            "redis://[::1",
            "rediss://host:1?ssl_cert_reqs=bogus",
        ],
    )
    def test_one_that_cannot_be_read_is_a_wrong_setting(self, url: str) -> None:
        """It is refused before anything is opened, and no part of it, which may hold a password, is repeated."""
        with pytest.raises(SettingsError) as raised:
            open_redis(url)
        assert "cret" not in str(raised.value)
        assert "'se'" not in str(raised.value)

    def test_options_of_the_url_win(self) -> None:
        """Whoever writes a limit into the URL means it."""
        client = open_redis("redis://host:1?max_connections=5&timeout=3&socket_timeout=0.5")
        assert client.connection_pool.max_connections == 5
        assert vars(client.connection_pool)["timeout"] == 3
        assert client.connection_pool.connection_kwargs["socket_timeout"] == 0.5

    async def test_more_tasks_than_connections_wait_their_turn(self, redis_server: EmbeddedRedis) -> None:
        """A thousand at once share thirty-two connections, and none of them fails."""
        async with client_of(redis_server.url) as client:
            replies = await asyncio.gather(*(client.echo(f"{n}") for n in range(1_000)))
        assert replies == [b"%d" % n for n in range(1_000)]

    async def test_an_unknown_error_of_redis_keeps_its_words(self, redis: ArqRedis) -> None:
        """What has no explanation of ours is passed on, as our error."""
        with pytest.raises(StoreError, match="unknown command"), redis_errors():
            await command(redis, "NO-SUCH-COMMAND")
