"""Running folds under arq: the job, its lease, the sweep, and a supervisor that outlives Redis restarts.

Owns everything about arq's `Worker` and how it is kept alive and stopped. Must not decide what is folded.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
from arq.connections import ArqRedis
from arq.constants import in_progress_key_prefix
from arq.utils import timestamp_ms
from arq.worker import Retry, Worker, func

from memora.errors import MemoraError, StoreError
from memora.fold import Discarded, Folded, FoldOutcome, FoldService, Postponed
from memora.fold_queue import FOLD_JOB, HEARTBEAT_PREFIX, QUEUE, deserialize_job, serialize_job
from memora.redis_connection import redis_errors
from memora.settings import Settings
from memora.store import ConversationStore

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 5
STOP_GRACE_SECONDS: Final = 5.0
"""How long a running fold may take to finish after SIGTERM; then it is left untouched, and runs again elsewhere."""

_POLL_SECONDS: Final = 0.1
_SWEEP_SECONDS: Final = 1.0
_SWEEP_AGAIN_SECONDS: Final = 5.0
_SWEEP_MOST: Final = 100
_CALLS_PER_JOB: Final = 8
_MOST_TOKENS_PER_CHARACTER: Final = 4
"""arq's own time limit allows for so many summary calls, and for all pieces of the largest message. Each call has a
deadline of its own, and the lease, not the limit, notices a dead worker."""

_MAX_TRIES: Final = 20
"""arq counts starts. What it gives up on stays in the outbox and is enqueued again by the sweep."""

_FIRST_RESTART_SECONDS: Final = 0.2
_LONGEST_RESTART_SECONDS: Final = 5.0
_SETTLED_SECONDS: Final = 30.0

Job = Callable[..., Coroutine[Any, Any, None]]
OnFold = Callable[[str, FoldOutcome], Awaitable[None]]


def arq_options(settings: Settings, job: Job, *, heartbeat_key: str) -> dict[str, Any]:
    """What arq's `Worker`, or a `WorkerSettings` class, has to be given besides its connection."""
    pieces = settings.max_message_chars * _MOST_TOKENS_PER_CHARACTER // settings.max_fold_input_tokens
    timeout = settings.summary_timeout_seconds * (_CALLS_PER_JOB + pieces)
    coroutine: Any = job  # arq's protocol also asks for a __qualname__, which a bound method has
    return {
        # A kept result would make arq refuse the same fold for an hour.
        "functions": [func(coroutine, name=FOLD_JOB, timeout=timeout, max_tries=_MAX_TRIES, keep_result=0)],
        "keep_result": 0,
        "log_results": False,
        "queue_name": QUEUE,
        "poll_delay": _POLL_SECONDS,
        "max_jobs": settings.worker_concurrency,
        "max_tries": _MAX_TRIES,
        "health_check_interval": HEARTBEAT_SECONDS,
        "health_check_key": heartbeat_key,
        "job_serializer": serialize_job,
        "job_deserializer": deserialize_job,
    }


def new_heartbeat_key() -> str:
    """A key in which one worker shows that it lives; `.` keeps it apart from every conversation id."""
    return f"{HEARTBEAT_PREFIX}{secrets.token_hex(6)}"


_LEASED: Final = "leased"
"""In a job's context: its claim is a lease already."""


class _LeasingWorker(Worker):
    """arq's worker, which claims all the jobs it can take in one step, and by a lease from the start.

    arq itself asks four times for each job in the queue, at every poll also for those it is running: with two hundred
    folds under way that is most of a core. Its claim lasts as long as the longest fold may take, also if the worker is
    killed the moment after.
    """

    def __init__(self, store: ConversationStore, lease_seconds: float, **options: Any) -> None:
        super().__init__(**options, ctx={_LEASED: True}, handle_signals=False)
        self._store = store
        self._lease_seconds = lease_seconds

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start what can be claimed of these, as many as there is room for."""
        room = self.max_jobs - self.job_counter
        waiting = [job_id for job_id in map(bytes.decode, job_ids) if job_id not in self.tasks]
        claimed = []
        if room and waiting:
            claimed = await self._store.claim_jobs(
                waiting, most=room, now_ms=timestamp_ms(), lease_seconds=self._lease_seconds
            )
        # A page of the queue that others have taken whole must not hide the jobs behind it.
        passed_over = room and not claimed and len(job_ids) == self.queue_read_limit
        self._queue_read_offset = self._queue_read_offset + len(job_ids) if passed_over else 0
        for job_id, score in claimed:
            await self.sem.acquire()
            self.job_counter += 1
            self.tasks[job_id] = task = self.loop.create_task(self.run_job(job_id, score))
            task.add_done_callback(lambda _: self._release_sem_dec_counter_on_complete())


class FoldWorker:
    """Folds what is due until it is cancelled or told to stop."""

    def __init__(
        self,
        settings: Settings,
        redis: ArqRedis,
        store: ConversationStore,
        folds: FoldService,
        on_fold: OnFold | None = None,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._store = store
        self._folds = folds
        self._on_fold = on_fold
        self._stopping = anyio.Event()
        self.heartbeat_key = new_heartbeat_key()

    def stop(self) -> None:
        """Take no new folds, give running ones a moment, then end `run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until stopped. A Redis that goes away is waited for; only `stop` or cancellation ends this."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.sweep_forever)
            await self._supervise()
            tasks.cancel_scope.cancel()

    async def sweep_forever(self) -> None:
        """See to what is due, about once a second. A failed sweep is followed by the next."""
        while True:
            try:
                swept = await self._store.sweep(
                    most=_SWEEP_MOST,
                    again_seconds=_SWEEP_AGAIN_SECONDS,
                    lease_seconds=self._settings.fold_lease_seconds,
                )
                if swept.enqueued:
                    logger.info("enqueued %d folds that were overdue", swept.enqueued)
            except StoreError as error:
                logger.debug("sweep failed: %s", error)
            # Jitter keeps the sweeps of several workers apart.
            await anyio.sleep(_SWEEP_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311

    async def _supervise(self) -> None:
        delay = _FIRST_RESTART_SECONDS
        while not self._stopping.is_set():
            started = anyio.current_time()
            failure = await self._run_worker()
            if failure is None:
                return
            settled = anyio.current_time() - started > _SETTLED_SECONDS
            delay = _FIRST_RESTART_SECONDS if settled else min(delay * 2, _LONGEST_RESTART_SECONDS)
            logger.warning("the worker stopped (%s); it starts again in %.1f s", type(failure).__name__, delay)
            with anyio.move_on_after(delay):
                await self._stopping.wait()

    async def _run_worker(self) -> BaseException | None:
        """Run one arq worker until it fails (its error comes back) or we are to stop (None)."""
        options = arq_options(self._settings, self.fold_job, heartbeat_key=self.heartbeat_key)
        worker = _LeasingWorker(self._store, self._settings.fold_lease_seconds, **options, redis_pool=self._redis)
        running = asyncio.create_task(worker.async_run(), name="arq worker")
        stopping = asyncio.create_task(self._stopping.wait(), name="worker stop")
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await _let_jobs_finish(worker)
        finally:
            with anyio.CancelScope(shield=True):
                await _cancel_until_done(running, stopping, *worker.tasks.values(), *worker.job_tasks.values())
                await self._remove_heartbeat()
        return None if self._stopping.is_set() or running.cancelled() else running.exception()

    async def _remove_heartbeat(self) -> None:
        with suppress(StoreError), anyio.move_on_after(1), redis_errors():
            await self._redis.delete(self.heartbeat_key)

    async def fold_job(
        self, ctx: dict[str, Any], conversation_id: str, generation: str, summarized_message_count: int
    ) -> None:
        """The arq job: one fold under a lease. What can pass is tried again by arq, after a delay."""
        expected = (generation, summarized_message_count)
        try:
            with redis_errors():
                leased = ctx.get(_LEASED, False)
                async with _lease(self._redis, ctx["job_id"], self._settings.fold_lease_seconds, leased=leased):
                    outcome = await self._folds.fold(conversation_id, expected=expected)
        except MemoraError as error:
            if error.retryable:
                raise Retry(defer=self._settings.fold_retry_seconds) from error
            logger.error("conversation %s cannot be folded: %s", conversation_id, error)
            return
        _log(conversation_id, outcome)
        if self._on_fold:
            await self._on_fold(conversation_id, outcome)
        if isinstance(outcome, Postponed):
            raise Retry(defer=outcome.retry_in_seconds)


@asynccontextmanager
async def _lease(redis: ArqRedis, job_id: str, seconds: float, *, leased: bool) -> AsyncIterator[None]:
    """Hold the claim on a job by a short lease that is renewed while the fold runs.

    The claim of arq's own command lasts as long as the longest job may take, unless it is `leased` already; with a
    lease, another worker takes over the fold of one that was killed as soon as the lease runs out.
    """
    key = in_progress_key_prefix + job_id
    milliseconds = int(seconds * 1_000)

    async def renew() -> None:
        while True:
            await asyncio.sleep(seconds / 3)
            with suppress(StoreError), redis_errors():
                await redis.pexpire(key, milliseconds)

    if not leased:
        await redis.pexpire(key, milliseconds)
    renewing = asyncio.create_task(renew(), name=f"lease of {job_id}")
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await _cancel_until_done(renewing)


async def _let_jobs_finish(worker: Worker) -> None:
    worker.allow_pick_jobs = False
    if worker.tasks:
        await asyncio.wait(set(worker.tasks.values()), timeout=STOP_GRACE_SECONDS)


async def _cancel_until_done(*tasks: asyncio.Task[Any]) -> None:
    """Cancel until it takes: a task may be in a place that swallows one cancellation."""
    for task in tasks:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=0.2)
        if not task.cancelled():
            task.exception()


def _log(conversation_id: str, outcome: FoldOutcome) -> None:
    match outcome:
        case Folded(start, end, version, pending):
            logger.info(
                "conversation %s: folded messages %d to %d, version %d, %d pending",
                *(conversation_id, start, end - 1, version, pending),
            )
        case Discarded(start, end):
            logger.info(
                "conversation %s: the fold of messages %d to %d was discarded, another was first or it is gone",
                *(conversation_id, start, end - 1),
            )
        case Postponed(reason, seconds):
            logger.warning("conversation %s: no fold (%s); again in %.1f s", conversation_id, reason, seconds)
        case _:
            logger.debug("conversation %s: nothing to fold", conversation_id)
