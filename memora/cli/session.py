"""A chat at the command line without a face: turns, what can be looked at, fold notices, catching up at the end.

Owns what the terminal, the pipe and `--json` have in common. Must not print.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Final

import anyio
import anyio.to_thread

from memora.bootstrap import Memora
from memora.chat import TurnResult
from memora.core.conversation import Message
from memora.core.window import Context
from memora.errors import ConversationNotFound, StoreError
from memora.fold import FoldOutcome
from memora.llm import Emit
from memora.picture import MessageState, Picture, take_picture

CATCH_UP_SECONDS: Final = 10.0
"""How long leaving may wait for the summary; what is pending then is folded next time."""

_PATIENCE_SECONDS: Final = 1.0
"""Nobody waits longer than this without being told why."""

_POLL_SECONDS: Final = 1.0
_CATCH_UP_POLL_SECONDS: Final = 0.1
_SHORT_ID_BYTES: Final = 3


@dataclass(frozen=True, slots=True)
class FoldNotice:
    """Messages `[start, end)` went into the summary; a failed fold has a `failure` instead."""

    start: int = 0
    end: int = 0
    version: int = 0
    summary_tokens: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the history and where it is."""

    position: int
    message: Message
    state: MessageState


@dataclass(slots=True)
class _Seen:
    """What has been told about folds so far."""

    generation: str = ""
    summarized_message_count: int = 0
    version: int = 0
    failures: int = 0


OnNotice = Callable[[FoldNotice], Awaitable[None]]


def new_conversation_id(today: date) -> str:
    """A fresh id that a person can read and type again."""
    return f"chat-{today:%Y%m%d}-{secrets.token_hex(_SHORT_ID_BYTES)}"


class Session:
    """One conversation that is being talked in. One turn at a time."""

    def __init__(self, memora: Memora, conversation_id: str) -> None:
        self._memora = memora
        self._last: TurnResult | None = None
        self._seen = _Seen()
        self._tried_again_at = 0.0
        self.conversation_id = conversation_id
        self.pending_messages = 0
        self.on_notice: OnNotice | None = None

    @property
    def has_worker(self) -> bool:
        """Whether folds are made beside this chat, on a private Redis."""
        return self._memora.storage.embedded is not None

    @property
    def has_messages(self) -> bool:
        """Whether there is something to come back to."""
        return self._last is not None or bool(self._seen.generation)

    @property
    def max_input_tokens(self) -> int:
        """The budget."""
        return self._memora.settings.max_input_tokens

    async def open(self) -> Picture | None:
        """Look at the conversation before the first turn; None if it is new.

        Raises:
            StoreError.
        """
        picture = await self.picture()
        if picture:
            self._remember(picture)
        return picture

    async def reply(self, text: str, emit: Emit) -> TurnResult:
        """One turn.

        Raises:
            CallerError, StoreError, ModelError.
        """
        result = await self._memora.chat.reply(self.conversation_id, text, emit)
        self._last = result
        self.pending_messages = result.stats.pending_messages
        return result

    async def warm_up(self) -> None:
        """Get ready for the first turn while the person still types it."""
        await anyio.to_thread.run_sync(self._memora.client.warm_up)

    async def picture(self) -> Picture | None:
        """The conversation as it is now; None if nothing is stored of it.

        Raises:
            StoreError.
        """
        with suppress(ConversationNotFound):
            return await take_picture(self._memora.store, self._memora.settings, self.conversation_id)
        return None

    async def context(self) -> Context | None:
        """What was sent for the last answer, here or in an earlier chat.

        Raises:
            StoreError.
        """
        if self._last:
            return self._last.context
        return await self._memora.store.last_context(self.conversation_id)

    async def history(self, picture: Picture) -> AsyncIterator[Entry]:
        """Every message, oldest first, in pages.

        Raises:
            ConversationDeleted, StoreError.
        """
        position = 0
        async for message in self._memora.store.messages(self.conversation_id):
            yield Entry(position, message, picture.state_of(position))
            position += 1

    async def on_fold(self, conversation_id: str, _: FoldOutcome) -> None:
        """The worker beside this chat has folded something."""
        if conversation_id == self.conversation_id:
            await self.tell_news()

    async def tell_news(self) -> None:
        """Look whether the summary has moved, whoever moved it, and say so once."""
        with suppress(StoreError):
            picture = await self.picture()
            notices = self._news(picture) if picture else []
            for notice in notices:
                if self.on_notice:
                    await self.on_notice(notice)

    async def watch(self) -> None:
        """Tell the news about once a second while something is pending."""
        while True:
            await anyio.sleep(_POLL_SECONDS)
            if self.pending_messages:
                await self.tell_news()

    async def catch_up(self, on_wait: Callable[[int], Awaitable[None]]) -> None:
        """Wait until nothing is pending, for `CATCH_UP_SECONDS` at most, and not for a fold put off beyond that.

        `on_wait` hears how many messages are pending when it takes longer.
        """
        started, give_up_at = anyio.current_time(), time.time() + CATCH_UP_SECONDS
        has_told = False
        while True:
            await self.tell_news()
            if not self.pending_messages or max(time.time(), self._tried_again_at) > give_up_at:
                return
            if not has_told and anyio.current_time() - started > _PATIENCE_SECONDS:
                await on_wait(self.pending_messages)
                has_told = True
            await anyio.sleep(_CATCH_UP_POLL_SECONDS)

    def _news(self, picture: Picture) -> list[FoldNotice]:
        seen, conversation = self._seen, picture.conversation
        summary, failures = conversation.summary, picture.inspection.fold_failures
        is_same_life = conversation.generation == seen.generation or not seen.generation
        if is_same_life and summary.version < seen.version:
            return []  # an older picture that arrived late
        self._remember(picture)
        if not is_same_life:
            return []
        news = []
        if summary.version > seen.version:
            start, end = seen.summarized_message_count, summary.summarized_message_count
            news.append(FoldNotice(start, end, summary.version, summary.tokens))
        if failures > seen.failures:
            news.append(FoldNotice(failure=picture.inspection.last_fold_error))
        return news

    def _remember(self, picture: Picture) -> None:
        """What is known from here on; no await between looking and this, so nothing is told twice."""
        conversation = picture.conversation
        self.pending_messages = picture.pending_messages
        # The private Redis has our own clock.
        due_at, has_failed = picture.inspection.fold_due_at, picture.inspection.fold_failures > 0
        self._tried_again_at = due_at / 1_000 if due_at and has_failed else 0.0
        self._seen = _Seen(
            conversation.generation,
            conversation.summary.summarized_message_count,
            conversation.summary.version,
            picture.inspection.fold_failures,
        )
