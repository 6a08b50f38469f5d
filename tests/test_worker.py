"""The fold worker inside this process: real arq over a real Redis, its outbox, its leases and what it survives."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from arq.connections import ArqRedis
from polling import eventually
from redis_view import all_keys, command
from talk import (
    ID,
    caught_up,
    changed,
    count_of,
    fold_documents,
    folds_of,
    history_of,
    look,
    model_waits,
    say,
    say_all,
    state_of,
    worker_beside,
)
from word_for_word import check_folds

from memora.bootstrap import Memora, open_memora
from memora.core.conversation import Message, Summary
from memora.core.folding import FoldWork, plan_fold
from memora.embedded_redis import EmbeddedRedis
from memora.fold import Folded, FoldOutcome, NothingToFold, Postponed
from memora.fold_queue import QUEUE, job_id
from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.worker import arq_options

CATS = [f"I have {n} cats in Taipei." for n in range(5)]
PENDING = "memora:{0}:pending"
QUICK = {"retry-after-ms": "10"}


@pytest.fixture(autouse=True)
def _emptied(redis: ArqRedis) -> None:
    """Every test begins with an empty server."""


async def job_of(memora: Memora, conversation_id: str = ID) -> str:
    conversation = (await look(memora, conversation_id)).conversation
    return job_id(conversation_id, conversation.generation, conversation.summary.summarized_message_count)


async def make_due(memora: Memora, conversation_id: str = ID) -> None:
    """What waiting for the due time would do."""
    await command(memora.storage.redis, "ZADD", PENDING, 1, conversation_id)


class TestWakeUps:
    async def test_what_arrives_during_a_fold_is_folded_without_another_message(
        self, memora: Memora, offline: OfflineModel
    ) -> None:
        """Traffic stops while a fold runs, and the lag still reaches zero."""
        async with worker_beside(memora):
            hold = offline.hold("summary")
            await say_all(memora, CATS[:4])
            await model_waits(offline)
            await say_all(memora, [f"I have {n} dogs in Taipei." for n in range(5)])
            offline.release(hold)
            await caught_up(memora, ID)
        assert await count_of(memora) == 12
        check_folds(await folds_of(memora), fold_documents(offline), await history_of(memora))

    async def test_a_backlog_is_caught_up_with(self, memora: Memora, offline: OfflineModel) -> None:
        """No worker for fifty messages, then one."""
        await say_all(memora, [f"I have {n} cats in Taipei. " + "They sleep a lot. " * 40 for n in range(25)])
        started = time.monotonic()
        async with worker_beside(memora):
            await caught_up(memora, ID)
        # Each commit asks for the next fold by itself; the sweep would only do so after five seconds.
        assert time.monotonic() - started < 4
        assert len(await folds_of(memora)) > 1
        assert await count_of(memora) >= 44
        check_folds(await folds_of(memora), fold_documents(offline), await history_of(memora))

    async def test_a_failed_fold_happens_soon_after_all(self, memora: Memora, offline: OfflineModel) -> None:
        """Two failures in different ways, then success within the back-off."""
        offline.add_fault({"kind": "empty"}, match="summary", times=1)
        offline.add_fault({"kind": "status", "status": 400}, match="summary", times=1)
        async with worker_beside(memora):
            await say_all(memora, CATS[:4])
            started = time.monotonic()
            await caught_up(memora, ID)
            assert time.monotonic() - started < 3
        assert await count_of(memora) == 2

    async def test_a_turn_during_the_back_off_does_not_cut_it_short(
        self, settings: Settings, offline: OfflineModel
    ) -> None:
        """More messages do not make a failing summariser be asked more often."""
        offline.add_fault({"kind": "empty"}, match="summary")
        async with open_memora(changed(settings, fold_retry_seconds=30)) as memora, worker_beside(memora):
            await say_all(memora, CATS[:4])

            async def failed() -> bool:
                return (await look(memora)).fold_failures == 1

            await eventually(failed)
            await say_all(memora, CATS)
            assert len(fold_documents(offline)) == 1

    async def test_an_outage_is_not_met_with_a_hot_loop(self, memora: Memora, offline: OfflineModel) -> None:
        """While every call fails, the calls become rarer; when the model is back, all is folded."""
        offline.add_fault({"kind": "status", "status": 500, "headers": QUICK}, match="summary")
        async with worker_beside(memora):
            await say_all(memora, CATS)

            async def failed_often() -> bool:
                return (await look(memora)).fold_failures >= 4

            started = time.monotonic()
            await eventually(failed_often)
            # Three calls a try, for the client tries again by itself; 0.1 + 0.2 + 0.4 s lie between four tries.
            assert time.monotonic() - started > 0.5
            assert len(fold_documents(offline)) <= 3 * 6
            offline.clear_faults()
            await caught_up(memora, ID)
        assert await count_of(memora) == 4

    async def test_a_job_that_ran_out_of_tries_is_brought_back_by_the_sweep(self, memora: Memora) -> None:
        """The job is gone for arq; the outbox still knows."""
        await say_all(memora, CATS[:4])
        name = await job_of(memora)
        await command(memora.storage.redis, "SET", f"arq:retry:{name}", 20, "EX", 88_400)
        async with worker_beside(memora):

            async def dropped() -> bool:
                return not await memora.storage.redis.exists(QUEUE)

            await eventually(dropped)
            assert await count_of(memora) == 0
            await make_due(memora)
            await caught_up(memora, ID)
        assert await count_of(memora) == 2

    async def test_a_lost_queue_is_brought_back_by_the_sweep(self, memora: Memora) -> None:
        """Somebody deleted arq's keys: what is due is enqueued again."""
        await say_all(memora, CATS[:4])
        await memora.storage.redis.delete(QUEUE, f"arq:job:{await job_of(memora)}")
        await make_due(memora)
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert await count_of(memora) == 2

    async def test_a_claim_of_a_worker_that_died_is_outlived(self, memora: Memora) -> None:
        """A claim with arq's own long timeout, left behind, delays the fold by a lease and no longer."""
        await say_all(memora, CATS[:4])
        await command(memora.storage.redis, "SET", f"arq:in-progress:{await job_of(memora)}", 1, "EX", 500)
        await make_due(memora)
        async with worker_beside(memora):
            started = time.monotonic()
            await caught_up(memora, ID)
            assert time.monotonic() - started < 5
        assert await count_of(memora) == 2

    async def test_jobs_that_others_run_do_not_hide_the_one_behind_them(self, settings: Settings) -> None:
        """A job stays in the queue while it runs, so its front may be what other workers are busy with."""
        async with open_memora(changed(settings, worker_concurrency=1)) as memora:
            redis = memora.storage.redis
            await say_all(memora, CATS[:4])
            (_, score), *_ = await redis.zrange(QUEUE, 0, -1, withscores=True)
            others = [f"other-{number}" for number in range(250)]
            await redis.zadd(QUEUE, dict.fromkeys(others, score - 1))
            await command(redis, "MSET", *[word for name in others for word in (f"arq:in-progress:{name}", 1)])
            async with worker_beside(memora):

                async def folded() -> bool:
                    return await count_of(memora) == 2

                await eventually(folded)
            assert await redis.zcard(QUEUE) == len(others)

    async def test_each_outcome_is_told_to_whoever_wants_to_know(self, memora: Memora, offline: OfflineModel) -> None:
        """A failure and a fold, in this order, with the conversation they belong to."""
        told: list[tuple[str, FoldOutcome]] = []

        async def on_fold(conversation_id: str, outcome: FoldOutcome) -> None:
            told.append((conversation_id, outcome))

        offline.add_fault({"kind": "empty"}, match="summary", times=1)
        await say_all(memora, CATS[:4])
        async with anyio.create_task_group() as tasks:
            worker = memora.worker(on_fold)
            tasks.start_soon(worker.run)
            await caught_up(memora, ID)
            worker.stop()
        assert [(name, type(outcome)) for name, outcome in told] == [(ID, Postponed), (ID, Folded)]

    async def test_a_job_for_a_count_that_has_moved_does_nothing(self, memora: Memora, offline: OfflineModel) -> None:
        """Work done by somebody else in the meantime is not done again."""
        await say_all(memora, CATS[:4])
        stale = (await look(memora)).conversation
        assert isinstance(await memora.folds.fold(ID), Folded)
        await say_all(memora, ["Hello"])
        outcome = await memora.folds.fold(ID, expected=(stale.generation, 0))
        assert isinstance(outcome, NothingToFold)
        assert len(fold_documents(offline)) == 1


class TestStopping:
    async def test_a_running_fold_may_finish(self, memora: Memora, offline: OfflineModel) -> None:
        """Told to stop, the worker takes no new fold and ends after the one it has."""
        await say_all(memora, CATS)
        offline.add_fault(match="summary", delay_seconds=1.0)
        async with worker_beside(memora) as worker:

            async def thinks() -> bool:
                return len(fold_documents(offline)) == 1

            await eventually(thinks)
            worker.stop()
        assert await count_of(memora) == 4

    async def test_one_that_does_not_finish_is_left_untouched_and_runs_again_elsewhere(
        self, memora: Memora, offline: OfflineModel
    ) -> None:
        """After the grace the fold is dropped: no commit, no failure, and the next worker does it at once."""
        await say_all(memora, CATS)
        before = await state_of(memora)
        hold = offline.hold("summary")
        started = time.monotonic()
        async with worker_beside(memora) as worker:
            await model_waits(offline)
            worker.stop()
        assert time.monotonic() - started < 8
        assert await state_of(memora) == before
        assert await memora.storage.workers() == 0
        offline.release(hold)
        started = time.monotonic()
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert time.monotonic() - started < 3
        assert await count_of(memora) == 4
        assert (await look(memora)).fold_failures == 0

    async def test_a_cancelled_worker_is_gone_at_once(self, memora: Memora, offline: OfflineModel) -> None:
        """Nothing of it is left running, and its fold is anybody's again."""
        await say_all(memora, CATS)
        hold = offline.hold("summary")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(memora.worker().run)
            await model_waits(offline)
            started = time.monotonic()
            tasks.cancel_scope.cancel()
        assert time.monotonic() - started < 2
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(("lease", "arq"))] == []
        offline.release(hold)
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert await count_of(memora) == 4

    async def test_chats_on_the_same_connection_go_on(self, memora: Memora) -> None:
        """A worker that ends closes nothing that others use."""
        async with worker_beside(memora):
            await say(memora, CATS[0])
        await say(memora, CATS[1])
        assert len(await history_of(memora)) == 4


class TestHostileJobs:
    async def enqueue(self, redis: ArqRedis, name: bytes, payload: bytes) -> None:
        await command(redis, "SET", b"arq:job:" + name, payload, "EX", 100)
        await command(redis, "ZADD", QUEUE, 1, name)

    @pytest.mark.parametrize(
        "payload",
        [
            json.dumps({"t": None, "f": "no_such_function", "a": [], "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": [], "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": ["a", "b", "c", "d"], "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": [1, None, {}], "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": ["../*", "g", 0], "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": ["nobody", "g", 0], "k": {}, "et": 1}).encode(),
            json.dumps({"t": "x", "f": "fold", "a": ["a", "g", 0], "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": ["fold"], "a": [], "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": 5, "k": {}, "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": [], "k": [1], "et": 1}).encode(),
            json.dumps({"t": None, "f": "fold", "a": [], "k": {}, "et": "soon"}).encode(),
            b"{",
            b"",
            b"\xff\xfe",
            b"null",
            b"[" * 100_000,
        ],
        ids=lambda payload: str(payload[:60]),
    )
    async def test_a_job_that_makes_no_sense_is_dropped(self, memora: Memora, payload: bytes) -> None:
        """The worker lives, the job is gone, and honest work beside it is done."""
        await self.enqueue(memora.storage.redis, b"job-1", payload)
        await say_all(memora, CATS[:4])
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert await count_of(memora) == 2
        assert [key for key in await all_keys(memora.storage.redis) if b"arq:" in key] == []

    async def test_a_pickle_runs_nothing(self, memora: Memora, tmp_path: Path) -> None:
        """A payload that would run code in a worker of arq's default is only a job that cannot be read."""
        canary = tmp_path / "canary"
        payload = pickle.dumps(Bomb(canary))
        assert pickle.loads(payload) is not None
        assert canary.exists()
        canary.unlink()
        await self.enqueue(memora.storage.redis, b"job-1", payload)
        await say_all(memora, CATS[:4])
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert not canary.exists()

    async def test_a_name_that_is_no_text_does_not_stop_it(self, memora: Memora) -> None:
        """A worker of arq fails on it at each poll; the sweep takes it away and the worker starts again."""
        await self.enqueue(memora.storage.redis, b"\xff\xfe", b"{}")
        await say_all(memora, CATS[:4])
        async with worker_beside(memora):
            await caught_up(memora, ID)
        assert await count_of(memora) == 2

    async def test_a_damaged_conversation_is_not_folded_and_holds_up_nobody(
        self, memora: Memora, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is named in the log, its keys stay as they are, and the others are folded."""
        await say_all(memora, CATS[:4], "damaged")
        await command(memora.storage.redis, "LSET", "memora:{0}:damaged:history", 0, '{"role":')
        await say_all(memora, CATS[:4])
        async with worker_beside(memora):

            async def folded() -> bool:
                return await count_of(memora) == 2

            await eventually(folded)
        assert "memora:{0}:damaged:history" in caplog.text
        assert await command(memora.storage.redis, "LINDEX", "memora:{0}:damaged:history", 0) == b'{"role":'

    async def test_a_poisonous_conversation_does_not_starve_the_others(
        self, settings: Settings, offline: OfflineModel
    ) -> None:
        """One that always fails is tried ever more rarely, while the rest is folded as quickly as ever."""
        offline.add_fault({"kind": "status", "status": 500, "headers": QUICK}, contains="POISON")
        async with open_memora(changed(settings, worker_concurrency=1)) as memora:
            offline.add_fault({"kind": "text", "text": "I see."}, match="answer")
            offline.clear_faults()
            await say_all(memora, CATS[:4], "poison-talk")
            await command(
                memora.storage.redis,
                *("LSET", "memora:{0}:poison-talk:history", 0),
                json.dumps({"role": "user", "content": "POISON", "tokens": 1, "at": 1}),
            )
            offline.add_fault({"kind": "status", "status": 500, "headers": QUICK}, contains="POISON")
            names = [f"talk-{number}" for number in range(5)]
            for name in names:
                await say_all(memora, CATS[:4], name)
            async with worker_beside(memora):

                async def others_are_folded() -> bool:
                    return all([await count_of(memora, name) == 2 for name in names])

                await eventually(others_are_folded, seconds=5)
                assert await count_of(memora, "poison-talk") == 0
            poisoned = [document for document in fold_documents(offline) if "POISON" in str(document)]
            assert len(poisoned) <= 3 * 8


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(self.canary), os.O_CREAT)


class TestRedisTrouble:
    @pytest.fixture
    def own_server(self, tmp_path: Path) -> Iterator[EmbeddedRedis]:
        """A server that a test may kill."""
        with EmbeddedRedis(tmp_path / "own") as server:
            yield server

    @pytest.fixture
    async def own_memora(self, settings: Settings, own_server: EmbeddedRedis) -> AsyncIterator[Memora]:
        """Memora on that server."""
        async with open_memora(changed(settings, redis_url=own_server.url)) as opened:
            yield opened

    async def test_killed_connections_are_made_anew(self, memora: Memora, redis: ArqRedis) -> None:
        """CLIENT KILL of everybody, again and again: no fold is lost."""
        async with worker_beside(memora):
            for number in range(12):
                await say(memora, f"I have {number} cats in Taipei.")
                await command(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await caught_up(memora, ID, seconds=20)
        assert await count_of(memora) == 18

    async def test_a_restart_of_redis_is_waited_for(
        self, own_memora: Memora, own_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Killed with -9 and started again, the server finds the same worker at work."""
        caplog.set_level(logging.WARNING, logger="memora")
        redis = own_memora.storage.redis
        await command(redis, "CONFIG", "SET", "appendfsync", "always")
        async with worker_beside(own_memora):
            await say_all(own_memora, CATS)
            await caught_up(own_memora, ID)
            os.kill(int((await redis.info("server"))["process_id"]), signal.SIGKILL)
            await anyio.to_thread.run_sync(own_server.stop)
            await anyio.to_thread.run_sync(own_server.start)
            await say_all(own_memora, CATS)
            await caught_up(own_memora, ID, seconds=20)
        assert await count_of(own_memora) == 14
        assert [fold.version for fold in await folds_of(own_memora)] == list(
            range(1, (await look(own_memora)).conversation.summary.version + 1)
        )

    async def test_a_full_redis_is_waited_for(self, memora: Memora, redis: ArqRedis, offline: OfflineModel) -> None:
        """A commit that is refused is tried again, and nothing is half-written meanwhile."""
        await say_all(memora, CATS)
        before = (await look(memora)).conversation.summary
        hold = offline.hold("summary")
        async with worker_beside(memora):
            await model_waits(offline)
            await redis.config_set("maxmemory", 1)
            try:
                offline.release(hold)

                async def asked_again() -> bool:
                    return len(fold_documents(offline)) >= 1 and offline.state()["in_flight"] == 0

                await eventually(asked_again)
                assert (await look(memora)).conversation.summary == before
            finally:
                await redis.config_set("maxmemory", 0)
            await caught_up(memora, ID, seconds=20)
        assert await count_of(memora) == 4


class TestSignsOfLife:
    async def test_each_worker_shows_its_own_and_takes_it_away(self, memora: Memora) -> None:
        """A key a worker, with an expiry of seconds; none after they have stopped."""
        redis = memora.storage.redis

        async def workers(expected: int) -> None:
            async def are_there() -> bool:
                return await memora.storage.workers() == expected

            await eventually(are_there)

        async with worker_beside(memora) as first:
            await workers(1)
            assert 0 < await redis.pttl(first.heartbeat_key) <= 6_000
            async with worker_beside(memora):
                await workers(2)
            await workers(1)
        assert await memora.storage.workers() == 0
        assert await all_keys(redis) == []

    async def test_no_log_line_holds_a_word_of_a_message(
        self, settings: Settings, offline: OfflineModel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Also when folds fail, jobs are broken and the provider repeats what it was sent."""
        for name in ("memora", "arq", "redis"):
            caplog.set_level(logging.DEBUG, logger=name)
        echo = {"error": {"message": "I do not like SECRET-WORD or test-key-0123", "code": "SECRET-WORD is bad"}}
        offline.add_fault({"kind": "status", "status": 400, "body": echo}, match="summary", times=1)
        offline.add_fault({"kind": "refusal"}, match="summary", times=1)
        offline.add_fault({"kind": "echo"}, match="summary", times=1)
        async with open_memora(settings) as memora, worker_beside(memora):
            await say_all(memora, [f"SECRET-WORD number {n} is a cat of mine." for n in range(5)])
            await caught_up(memora, ID)
        assert f"conversation {ID}: folded messages 0 to" in caplog.text
        assert "no fold" in caplog.text
        for secret in ("SECRET-WORD", "test-key"):
            assert secret not in caplog.text

    async def test_after_the_work_only_the_conversations_keys_are_left(
        self, memora: Memora, offline: OfflineModel
    ) -> None:
        """While jobs wait or run, every key of arq expires; afterwards there is none, however many turns there were."""
        redis = memora.storage.redis
        offline.add_fault({"kind": "empty"}, match="summary", times=2)
        async with worker_beside(memora):
            for number in range(20):
                await say(memora, f"I have {number} cats in Taipei.")
                for key in await all_keys(redis):
                    if key.startswith(b"arq:"):
                        # -2: it has gone since we looked.
                        assert await redis.pttl(key) > 0 or await redis.pttl(key) == -2, key
            await caught_up(memora, ID)
        assert await all_keys(redis) == sorted(
            [
                b"memora:{0}:conversations",
                *(
                    f"memora:{{0}}:{ID}:{part}".encode()
                    for part in ("context", "events", "folds", "history", "summary", "turns")
                ),
            ]
        )


class TestTogether:
    async def test_several_workers_fold_everything_once(self, settings: Settings, offline: OfflineModel) -> None:
        """Three workers, six conversations: the folds of each tile its history, and each message was shown once."""
        names = [f"talk-{number}" for number in range(6)]
        async with open_memora(settings) as memora, three_workers(settings):

            async def talk(name: str) -> None:
                await say_all(memora, [f"{name} has {n} cats in Taipei." for n in range(8)], name)

            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(talk, name)
            await caught_up(memora, *names)
            for name in names:
                documents = [document for document in fold_documents(offline) if f"{name} has" in str(document)]
                assert await count_of(memora, name) == 10
                check_folds(await folds_of(memora, name), documents, await history_of(memora, name))
                assert (await look(memora, name)).fold_conflicts == 0

    async def test_a_fold_longer_than_its_lease_keeps_it(self, memora: Memora, offline: OfflineModel) -> None:
        """The lease is renewed while the summariser thinks, so that nobody else starts on the same messages."""
        await say_all(memora, CATS)
        hold = offline.hold("summary")
        async with worker_beside(memora), worker_beside(memora):
            await model_waits(offline)
            key = f"arq:in-progress:{await job_of(memora)}"
            before = time.monotonic()

            async def longer_than_the_lease() -> bool:
                assert 0 < await memora.storage.redis.pttl(key) <= 1_000
                return time.monotonic() - before > 1.5

            await eventually(longer_than_the_lease)
            assert len(fold_documents(offline)) == 1
            offline.release(hold)
            await caught_up(memora, ID)
        assert len(fold_documents(offline)) == 1


@asynccontextmanager
async def three_workers(settings: Settings) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for _ in range(3):
            memora = await stack.enter_async_context(open_memora(settings))
            await stack.enter_async_context(worker_beside(memora))
        yield


@pytest.mark.parametrize("character", ["a", "字", "한", "👩‍👧"])
def test_the_time_limit_of_a_job_allows_for_the_largest_message(settings: Settings, character: str) -> None:
    """A fold that needs all pieces of it is not ended half-way by arq, to begin anew for ever."""
    text = (character * settings.max_message_chars)[: settings.max_message_chars]
    messages = (Message("user", text, 0), Message("assistant", "OK.", 1))
    plan = plan_fold(FoldWork(ID, "g", Summary(), messages), settings.fold_limits)
    assert plan is not None

    async def job(*_: object) -> None: ...

    (function,) = arq_options(settings, job, heartbeat_key="x")["functions"]
    assert function.timeout_s >= len(plan.steps) * settings.summary_timeout_seconds


async def test_a_worker_does_not_wait_for_the_clock_of_redis(memora: Memora) -> None:
    """A job is due for a worker whose own clock is ten minutes behind: it is scored an hour early."""
    await say_all(memora, CATS[:4])
    (_, score), *_ = await memora.storage.redis.zrange(QUEUE, 0, -1, withscores=True)
    assert score < (time.time() - 600) * 1000
