"""Fold workers as processes of their own, started as a person would start them, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from judging import JudgingModel

from memora.offline_model import OfflineModel
from memora.settings import Settings

REPOSITORY = Path(__file__).parent.parent
COMMANDS = {
    "arq": [sys.executable, "-m", "arq", "workers.fold_worker.WorkerSettings"],
    "memora": [sys.executable, "-m", "memora", "worker"],
}
_KILL_AFTER_SECONDS = 10.0


class WorkerProcess:
    """One worker process; `output` is all it wrote."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Send a signal and wait for the end; how many seconds it took."""
        started = time.monotonic()
        self.send(number)
        self.process.wait(_KILL_AFTER_SECONDS)
        return time.monotonic() - started

    @property
    def output(self) -> str:
        """Standard output and error together."""
        return self._log.read_text(errors="replace")


def environment_for(settings: Settings, model: OfflineModel | JudgingModel, **more: str) -> dict[str, str]:
    """As little of ours as possible, and what points to the same Redis and model."""
    assert settings.redis_url
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(settings.data_dir),
        "MEMORA_REDIS_URL": settings.redis_url.get_secret_value(),
        "MEMORA_FOLD_LEASE_SECONDS": "1",
        "MEMORA_FOLD_RETRY_SECONDS": "0.1",
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_KEY": "test-key-0123",
        **more,
    }


@contextmanager
def worker_process(
    settings: Settings, model: OfflineModel | JudgingModel, name: str = "arq", **environment: str
) -> Iterator[WorkerProcess]:
    """A worker that runs meanwhile; it is killed at the end if it is still there."""
    assert settings.data_dir
    log = settings.data_dir / f"worker-{time.monotonic_ns()}.log"
    worker = WorkerProcess(COMMANDS[name], environment_for(settings, model, **environment), log)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()
