"""What Memora costs while nobody talks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest
from arq.connections import ArqRedis
from polling import eventually
from server_process import server_process
from worker_process import worker_process

from memora.bootstrap import Memora
from memora.offline_model import OfflineModel
from memora.settings import Settings

MEASURED_SECONDS = 4.0
MOST_OF_A_CORE = 0.35


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_an_idle_server_and_worker_take_little_of_a_core_and_ask_no_model(
    memora: Memora, settings: Settings, offline: OfflineModel, redis: ArqRedis
) -> None:
    """Both together, polls and sweeps included; the laptop of a newcomer stays cool."""
    async with server_process(settings, offline) as server:
        with worker_process(settings, offline) as worker:

            async def worker_is_up() -> bool:
                return await memora.storage.workers() == 1

            await eventually(worker_is_up, seconds=30)
            pids = (server.process.pid, worker.process.pid)
            before = sum(map(cpu_seconds, pids))
            await anyio.sleep(MEASURED_SECONDS)  # not to wait for something: this is the span that is measured
            spent = sum(map(cpu_seconds, pids)) - before
    assert spent < MOST_OF_A_CORE * MEASURED_SECONDS, f"{spent / MEASURED_SECONDS:.0%} of a core"
    assert offline.requests() == []
    assert not await redis.exists("memora:{0}:pending")
