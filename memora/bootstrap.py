"""Building everything, once, by hand, and closing it in reverse order.

Owns what is made from the settings, and whether the model is a real one or the offline model. Must not parse a command
line or print.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from memora.chat import ChatService
from memora.fold import FoldService
from memora.llm import ModelClient
from memora.offline_model import OfflineModel
from memora.settings import Settings
from memora.storage import Storage, open_storage
from memora.store import ConversationStore
from memora.summarizer import Summarizer
from memora.worker import FoldWorker, OnFold

OFFLINE_MODEL: Final = "memora-offline"


@dataclass(frozen=True)
class Memora:
    """Everything an entry point needs: conversations, answers, folds."""

    settings: Settings
    storage: Storage
    client: ModelClient
    chat: ChatService
    folds: FoldService

    @property
    def store(self) -> ConversationStore:
        """The conversations."""
        return self.storage.store

    def worker(self, on_fold: OnFold | None = None) -> FoldWorker:
        """A fold worker over the same parts."""
        return FoldWorker(self.settings, self.storage.redis, self.store, self.folds, on_fold)


@asynccontextmanager
async def open_model(settings: Settings) -> AsyncIterator[tuple[Settings, ModelClient]]:
    """Open the model's endpoint: the configured one, or the offline model. The settings come back with its name.

    Raises:
        StoreError: the offline model cannot listen.
    """
    async with AsyncExitStack() as stack:
        if settings.uses_offline_model:
            offline = await stack.enter_async_context(OfflineModel())
            settings = settings.model_copy(update={"model": OFFLINE_MODEL, "summary_model": OFFLINE_MODEL})
            client = ModelClient(api_key="offline", base_url=offline.url)
        else:
            key = settings.openai_api_key.get_secret_value() if settings.openai_api_key else "none"
            client = ModelClient(api_key=key, base_url=settings.openai_base_url)
        stack.push_async_callback(client.close)
        yield settings, client


@asynccontextmanager
async def open_memora(settings: Settings) -> AsyncIterator[Memora]:
    """Open Redis and the model and build the services over them.

    Raises:
        SettingsError, StoreError.
    """
    async with open_storage(settings) as storage, open_model(settings) as (named, client):
        summarizer = Summarizer(
            client,
            model=named.fold_model,
            limits=named.fold_limits,
            timeout_seconds=named.summary_timeout_seconds,
        )
        yield Memora(
            settings=named,
            storage=replace(storage, settings=named),
            client=client,
            chat=ChatService(named, storage.store, client),
            folds=FoldService(named, storage.store, summarizer),
        )
