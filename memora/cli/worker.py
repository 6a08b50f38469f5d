"""`memora worker`: folds until it is told to stop.

Owns what a supervisor sees: one line at the start, one a fold, and how signals end it.
"""

from __future__ import annotations

import logging
import signal
from functools import partial
from urllib.parse import urlsplit

from memora.bootstrap import Memora, open_memora
from memora.cli.exit import Exit
from memora.cli.logs import log_to_stderr
from memora.cli.runner import Signals, event_loop, run_command
from memora.cli.texts import Texts, texts_for
from memora.settings import Settings, load_settings
from memora.storage import data_directory
from memora.worker import FoldWorker

logger = logging.getLogger(__name__)


def run(*, offline: bool) -> int:
    """Work. Returns the exit code."""
    return run_command(partial(_work, offline), loop=event_loop())


def redis_place(settings: Settings) -> str:
    """Where Redis is, for people: never with a password."""
    if settings.redis_url is None:
        return str(data_directory(settings) / "redis")
    parts = urlsplit(settings.redis_url.get_secret_value())
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


async def _work(offline: bool, signals: Signals) -> int:
    settings = load_settings(**({"offline": True} if offline else {}))
    texts = texts_for(settings.lang)
    log_to_stderr(settings.log_level if "log_level" in settings.model_fields_set else "INFO")
    async with open_memora(settings) as memora:
        worker = memora.worker()
        stopped_by: list[signal.Signals] = []
        signals.handler = partial(_stop_gently, worker, stopped_by, texts)
        logger.info(_opening(memora, texts))
        await worker.run()
    return Exit.INTERRUPTED if signal.SIGINT in stopped_by else Exit.DONE


def _stop_gently(worker: FoldWorker, stopped_by: list[signal.Signals], texts: Texts, number: signal.Signals) -> bool:
    """The first signal lets running folds finish; the second ends everything at once."""
    if stopped_by:
        return False
    stopped_by.append(number)
    logger.info(texts.worker_stopping)
    worker.stop()
    return True


def _opening(memora: Memora, texts: Texts) -> str:
    settings = memora.settings
    place = redis_place(settings)
    redis = texts.private_redis.format(place=place) if memora.storage.embedded else place
    model = settings.fold_model
    if settings.uses_offline_model:
        model = f"{model} ({texts.offline_chosen if settings.offline else texts.offline_model})"
    return texts.worker_started.format(redis=redis, model=model)
