"""Fold workers as processes of their own: killed, stopped, frozen, doubled, and started with wrong settings."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from typing import Any

import anyio
import anyio.to_thread
import pytest
from arq.connections import ArqRedis
from judging import judging_model
from polling import eventually
from talk import (
    ID,
    caught_up,
    changed,
    count_of,
    document_of,
    fold_documents,
    folds_of,
    history_of,
    look,
    model_waits,
    say,
    say_all,
    state_of,
)
from word_for_word import check_folds, check_request
from worker_process import COMMANDS, REPOSITORY, WorkerProcess, environment_for, worker_process

from memora.bootstrap import Memora, open_memora
from memora.chat import TurnResult
from memora.offline_model import OfflineModel
from memora.offline_model.markers import Marker
from memora.settings import Settings

CATS = [f"I have {n} cats in Taipei." for n in range(5)]
SECONDS = float(os.environ.get("MEMORA_TEST_SECONDS", "5"))
"""How long two workers and eight chats work together; before a release it is a minute."""

_TAKEOVER_SECONDS = 5.0
"""Lease of one second, a poll, and a slow machine."""


@pytest.fixture(autouse=True)
def _emptied(redis: ArqRedis) -> None:
    """Every test begins with an empty server."""


async def workers_are_up(memora: Memora, number: int) -> None:
    async def all_show_a_sign() -> bool:
        return await memora.storage.workers() == number

    await eventually(all_show_a_sign, seconds=30)


async def folded(memora: Memora, count: int, *, seconds: float) -> None:
    async def reached() -> bool:
        return await count_of(memora) >= count

    await eventually(reached, seconds=seconds)


async def end(worker: WorkerProcess, number: signal.Signals) -> float:
    """Send a signal and wait for the end; how many seconds it took."""
    return await anyio.to_thread.run_sync(worker.end, number)


async def test_killed_in_the_middle_of_a_fold_nothing_has_changed_and_another_worker_folds_once(
    memora: Memora, settings: Settings, offline: OfflineModel
) -> None:
    """With kill -9 the count stays as it is, and within seconds of the lease the fold happens, exactly once."""
    hold = offline.hold("summary")
    with worker_process(settings, offline, "memora") as victim:
        await say_all(memora, CATS)
        await model_waits(offline)
        before = await state_of(memora)
        with worker_process(settings, offline, "arq"):
            await workers_are_up(memora, 2)
            await end(victim, signal.SIGKILL)
            assert await state_of(memora) == before
            offline.release(hold)
            await folded(memora, 4, seconds=_TAKEOVER_SECONDS)
            await caught_up(memora, ID)
    (fold,) = await folds_of(memora)
    assert (fold.start, fold.end) == (0, 4)
    after = await look(memora)
    assert (after.fold_failures, after.fold_conflicts, after.conversation.summary.version) == (0, 0, 1)


async def test_told_to_stop_in_the_middle_of_a_fold_it_ends_in_time_and_loses_nothing(
    memora: Memora, settings: Settings, offline: OfflineModel
) -> None:
    """SIGTERM: over in less than eight seconds although the model hangs; nothing is half done, the next one does it."""
    hold = offline.hold("summary")
    with worker_process(settings, offline, "arq") as worker:
        await say_all(memora, CATS)
        await model_waits(offline)
        before = await state_of(memora)
        assert await end(worker, signal.SIGTERM) < 8
        assert worker.process.returncode == 0
        assert await state_of(memora) == before
        assert await memora.storage.workers() == 0
        assert "Traceback" not in worker.output
        assert "Taipei" not in worker.output
    offline.release(hold)
    async with anyio.create_task_group() as tasks:
        heir = memora.worker()
        tasks.start_soon(heir.run)
        await folded(memora, 4, seconds=_TAKEOVER_SECONDS)
        heir.stop()


async def test_told_to_stop_it_finishes_the_fold_it_has(
    memora: Memora, settings: Settings, offline: OfflineModel
) -> None:
    """A fold that comes to its end within the grace is committed before the worker goes."""
    hold = offline.hold("summary")
    with worker_process(settings, offline, "memora") as worker:
        await say_all(memora, CATS)
        await model_waits(offline)
        worker.send(signal.SIGTERM)
        offline.release(hold)
        assert await anyio.to_thread.run_sync(worker.process.wait, 8) == 0
    assert await count_of(memora) == 4


async def test_frozen_past_its_lease_it_wakes_up_too_late(
    memora: Memora, settings: Settings, offline: OfflineModel
) -> None:
    """Another worker has folded meanwhile and gone on; the sleeper's commit is refused and its cost is counted."""
    hold = offline.hold("summary")
    with worker_process(settings, offline) as sleeper:
        await say_all(memora, CATS)
        await model_waits(offline)
        sleeper.send(signal.SIGSTOP)
        try:
            # The sleeper's own request stays at its gate; what comes now passes.
            later = await only_new_requests_pass(memora, settings, offline)
            assert later == 8
        finally:
            sleeper.send(signal.SIGCONT)
        seen = [await count_of(memora)]
        offline.release(hold)

        async def refused() -> bool:
            seen.append(await count_of(memora))
            return (await look(memora)).fold_conflicts == 1

        await eventually(refused)
    assert set(seen) == {8}
    folds = await folds_of(memora)
    assert [(fold.start, fold.end) for fold in folds] == [(0, 4), (4, 8)]
    spent = sum(fold.input_tokens + fold.output_tokens for fold in folds)
    assert (await look(memora)).conversation.usage.fold_tokens > spent


async def only_new_requests_pass(memora: Memora, settings: Settings, offline: OfflineModel) -> int:
    """Fold with a worker of another endpoint, the sleeper being held at its own; the count that is reached."""
    async with OfflineModel() as other:
        elsewhere = Settings.model_validate({**settings.model_dump(), "openai_base_url": other.url})
        async with open_memora(elsewhere) as awake, anyio.create_task_group() as tasks:
            heir = awake.worker()
            tasks.start_soon(heir.run)
            await folded(memora, 4, seconds=_TAKEOVER_SECONDS)
            await say_all(awake, ["I have 5 cats in Taipei.", "I have 6 cats in Taipei."])
            await folded(memora, 8, seconds=_TAKEOVER_SECONDS)
            heir.stop()
    assert len(fold_documents(offline)) == 1
    return await count_of(memora)


async def test_two_workers_and_eight_chats_lose_nothing_and_fold_nothing_twice(settings: Settings) -> None:
    """The folds tile every history, and the judge finds every earlier message once in every request."""
    names = [f"talk{number}" for number in range(8)]
    results: dict[str, list[TurnResult]] = {name: [] for name in names}
    async with (
        judging_model("--scriptable") as model,
        open_memora(changed(settings, openai_base_url=model.url)) as memora,
    ):
        with worker_process(settings, model, "arq"), worker_process(settings, model, "memora"):
            await workers_are_up(memora, 2)
            deadline = anyio.current_time() + SECONDS

            async def talk(name: str) -> None:
                for number in itertools.count():
                    if anyio.current_time() > deadline:
                        return
                    marker = Marker(name, number)
                    result = await say(memora, f"{marker} I have cats. " + "They sleep a lot. " * (number % 9), name)
                    await model.report(marker, "ok", result.stats.gap_messages)
                    results[name].append(result)

            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(talk, name)
            await caught_up(memora, *names, seconds=30)
        verdict = await model.verdict()
        assert verdict["ok"], verdict
        assert verdict["markers"] == verdict["reported"]["ok"] == sum(map(len, results.values()))
        records = await model.requests()
        for name in names:
            own = [record for record in records if f"[#{name}:" in str(record["body"])]
            await _check_talk(memora, name, results[name], own)


async def _check_talk(memora: Memora, name: str, results: list[TurnResult], records: list[dict[str, Any]]) -> None:
    """Word for word, and within the budget: what one conversation's requests carried and what is stored of it."""
    history, folds = await history_of(memora, name), await folds_of(memora, name)
    assert len(history) == 2 * len(results) > 10
    assert [message.content for message in history][1::2] == [result.text for result in results]
    documents = [document_of(record) for record in records if record["kind"] == "summary"]
    check_folds(folds, documents, history)
    assert folds[-1].end >= len(history) - 6
    requests = [record for record in records if record["kind"] == "answer"]
    for result, record in zip(results, requests, strict=True):
        check_request(record, result, history, folds, 1_000)
    assert (await look(memora, name)).fold_conflicts == 0


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("arq", "MEMORA_MAX_RECENT_TURNS", "many"),
        ("arq", "MEMORA_REDIS_URL", "redis://:pa/ss@host:port"),
        ("memora", "MEMORA_MAX_INPUT_TOKENS", "70"),
    ],
)
def test_with_wrong_settings_it_ends_with_one_line(
    settings: Settings, offline: OfflineModel, name: str, variable: str, value: str
) -> None:
    """Exit code 2, no traceback, and no part of a URL that may hold a password."""
    environment = environment_for(settings, offline, **{variable: value})
    ended = subprocess.run(
        COMMANDS[name], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 2
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    assert len(lines) == 1
    assert variable in lines[0] or "Redis URL" in lines[0]
    assert "ss@host" not in lines[0]
