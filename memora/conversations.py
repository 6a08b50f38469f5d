"""Conversations that are shared: by several clients, several requests at a time, and clients that come again.

Owns one turn at a time, retries that make no second turn, and whose a conversation is. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio

from memora.chat import ChatService, TurnOptions, TurnResult
from memora.core.conversation import MESSAGES_PER_TURN, Message, pair_up
from memora.core.tokens import DEFAULT_VOCABULARY, count_text_tokens
from memora.core.window import Context
from memora.errors import (
    ConversationLocked,
    ConversationMovedOn,
    ConversationNotFound,
    IdempotencyKeyReused,
    StoreError,
)
from memora.llm import Emit
from memora.settings import Settings
from memora.store import BegunTurn, Busy, ConversationStore, Inspection, NoSuchVersion, Page, Rewound, StoredTurn

LEASE_SECONDS: Final = 15.0
"""How long a conversation stays locked after the process that answers in it was killed."""

_FIRST_POLL_SECONDS: Final = 0.05
_LONGEST_POLL_SECONDS: Final = 0.5
_IMPORT_MESSAGES: Final = 1_000
"""Messages one script call appends; Redis scripts take a bounded number of arguments."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn that somebody asks for.

    `key` is the client's idempotency key, `fingerprint` names the body of the request; `is_retry` says that the client
    has sent the same before, without a key. `before` are messages in front of `text` that are new to the conversation.
    `may_begin` allows a conversation that is not there yet; `expected_messages` is how many messages it must have, if
    that matters. `details` are kept with the answer.
    """

    conversation_id: str
    text: str
    owner: str = ""
    key: str = ""
    fingerprint: str = ""
    is_retry: bool = False
    may_begin: bool = False
    instructions: str | None = None
    model: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    before: tuple[Message, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)
    expected_messages: int | None = None
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def turn_id(self) -> str:
        """With a key, the same turn for the same key; else a turn of its own."""
        return f"key:{self.key}" if self.key else self.nonce


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn that was answered and stored now."""

    result: TurnResult


@dataclass(frozen=True, slots=True)
class Started:
    """A turn whose answer is about to be asked for: the place of its user message, and what it is made from.

    `created_at` is the conversation's, in ms; 0 if it begins with this turn.
    """

    position: int
    created_at: int
    context: Context


OnStart = Callable[[Started], Awaitable[None]]
"""Is told that a turn has started."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Messages that were appended, with their positions; `created_at` is the conversation's, in ms."""

    created_at: int
    messages: tuple[tuple[int, Message], ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A turn that had been stored before; the answer is the one given then."""

    turn: StoredTurn


class ConversationService:
    """Turns and histories of shared conversations. Its only state is who waits in this process."""

    def __init__(self, settings: Settings, store: ConversationStore, chat: ChatService) -> None:
        self._settings = settings
        self._store = store
        self._chat = chat
        self._queues: dict[str, _Queue] = {}

    async def respond(
        self, request: TurnRequest, emit: Emit, *, wait_seconds: float, on_start: OnStart | None = None
    ) -> Answered | Replayed:
        """Answer a turn once it is its turn, or find the answer that it got before.

        Raises:
            ConversationNotFound: there is none, or it is another's.
            ConversationMovedOn: it has not the expected number of messages.
            ConversationLocked: another turn took longer than `wait_seconds`.
            IdempotencyKeyReused: the key came with another body.
            CallerError, StoreError, ModelError: as of any turn.
        """
        token = secrets.token_hex(8)
        begun = await self._begin(request, token, wait_seconds)
        if isinstance(begun, StoredTurn):
            return Replayed(_checked(begun, request))
        async with self._holding(request.conversation_id, token):
            _check_expected(begun.conversation.message_count, request)

            async def tell(context: Context) -> None:
                if on_start:
                    await on_start(Started(context.tail_start + len(context.tail), begun.created_at, context))

            options = self._options(request, token)
            return Answered(await self._chat.answer(begun.conversation, request.text, emit, options, tell))

    async def create(self, owner: str, metadata: Mapping[str, str], messages: Sequence[Message] = ()) -> str:
        """Begin a conversation, with a history if one is given; its id.

        Raises:
            StoreError.
        """
        conversation_id = f"conv_{secrets.token_hex(16)}"
        await self._store.create(conversation_id, owner=owner, metadata=dict(metadata))
        if messages:
            await self.import_messages(conversation_id, owner, messages, wait_seconds=0)
        return conversation_id

    async def inspect(self, conversation_id: str, owner: str) -> Inspection:
        """One consistent picture of a conversation.

        Raises:
            ConversationNotFound: there is none, or it is another's. InvalidId, StoreError.
        """
        try:
            inspection = await self._store.inspect(conversation_id, self._chat.most_messages)
        except ConversationNotFound:
            raise not_found(conversation_id) from None
        if inspection.owner != owner:
            raise not_found(conversation_id)
        return inspection

    async def set_metadata(self, conversation_id: str, owner: str, metadata: Mapping[str, str]) -> None:
        """Replace the metadata.

        Raises:
            ConversationNotFound, InvalidId, StoreError.
        """
        if not await self._store.set_metadata(conversation_id, owner=owner, metadata=dict(metadata)):
            raise not_found(conversation_id)

    async def delete(self, conversation_id: str, owner: str) -> None:
        """Leave nothing of a conversation behind.

        Raises:
            ConversationNotFound, InvalidId, StoreError.
        """
        await self.inspect(conversation_id, owner)
        await self._store.delete(conversation_id)

    async def import_messages(
        self, conversation_id: str, owner: str, messages: Sequence[Message], *, wait_seconds: float
    ) -> Imported:
        """Append messages of a history that was made elsewhere.

        Each page of them is stored whole or not at all; a turn that waits may come between two pages.

        Raises:
            ConversationNotFound, ConversationLocked, InvalidId, StoreError.
        """
        request = TurnRequest(conversation_id, "", owner)
        token = secrets.token_hex(8)
        created_at, stored = 0, list[tuple[int, Message]]()
        for start in range(0, len(messages), _IMPORT_MESSAGES):
            begun = await self._begin(request, token, wait_seconds)
            assert isinstance(begun, BegunTurn)  # noqa: S101  # a fresh turn id is never there already
            created_at = begun.created_at
            page = pair_up(messages[start : start + _IMPORT_MESSAGES])
            await self._store.import_messages(
                conversation_id,
                page,
                import_id=secrets.token_hex(16),
                generation=begun.conversation.generation,
                window_messages=self._settings.max_recent_turns * MESSAGES_PER_TURN,
                lock_token=token,
            )
            places = enumerate(page, begun.conversation.message_count)
            stored += [(position, message) for position, message in places if not message.absent]
        return Imported(created_at, tuple(stored))

    async def page(self, conversation_id: str, owner: str, first: int, stop: int) -> Page:
        """The messages `[first, stop)` of a conversation, as far as there are some.

        Raises:
            ConversationNotFound, InvalidId, StoreError.
        """
        page = await self._store.page(conversation_id, first, stop)
        if page is None or page.owner != owner:
            raise not_found(conversation_id)
        return page

    async def remove_message(self, conversation_id: str, owner: str, position: int, *, wait_seconds: float) -> bool:
        """Take back one message that is not summarized yet; False if there is none at this position.

        Raises:
            MessageSummarized. ConversationNotFound, ConversationLocked, InvalidId, StoreError.
        """
        token = secrets.token_hex(8)
        begun = await self._begin(TurnRequest(conversation_id, "", owner), token, wait_seconds)
        assert isinstance(begun, BegunTurn)  # noqa: S101  # a fresh turn id is never there already
        async with self._holding(conversation_id, token):
            generation = begun.conversation.generation
            removed = await self._store.remove_message(conversation_id, generation, position, lock_token=token)
            if not removed:
                await self._give_back(conversation_id, token)
            return removed

    async def rewind(self, conversation_id: str, owner: str, version: int) -> Rewound | NoSuchVersion:
        """Take the summary back to an earlier version, 0 for none; the worker folds again what came after it.

        Raises:
            ConversationNotFound, InvalidId, StoreError.
        """
        rewound = await self._store.rewind(conversation_id, version, owner=owner)
        if rewound is None:
            raise not_found(conversation_id)
        return rewound

    async def context_of(self, request: TurnRequest) -> Context:
        """The context a turn would be answered from; nothing is sent or stored.

        Raises:
            ConversationNotFound, InvalidId, StoreError, ContextLengthExceeded.
        """
        inspection = await self.inspect(request.conversation_id, request.owner)
        return await self._chat.preview(inspection.conversation, request.text, self._options(request, ""))

    def message(self, role: str, content: str) -> Message:
        """A message of a history, counted."""
        vocabulary = self._settings.budget.vocabulary
        return Message(
            "user" if role == "user" else "assistant",
            content,
            count_text_tokens(content, vocabulary),
            vocabulary=None if vocabulary == DEFAULT_VOCABULARY else vocabulary,
        )

    async def _begin(self, request: TurnRequest, token: str, wait_seconds: float) -> BegunTurn | StoredTurn:
        """Wait for the lock: in line behind the turns of this process, then, politely, for other processes."""
        deadline = anyio.current_time() + wait_seconds
        async with self._in_line(request.conversation_id, wait_seconds):
            pause = _FIRST_POLL_SECONDS
            while True:
                begun = await self._store.begin_turn(
                    request.conversation_id,
                    lock_token=token,
                    lease_seconds=LEASE_SECONDS,
                    turn_id=request.turn_id,
                    fingerprint=request.fingerprint if request.is_retry and not request.key else "",
                    most_messages=self._chat.most_messages,
                    owner=request.owner,
                    may_begin=request.may_begin,
                )
                if begun is None:
                    raise not_found(request.conversation_id)
                if not isinstance(begun, Busy):
                    return begun
                if anyio.current_time() + pause > deadline:
                    raise _locked(request.conversation_id, begun.seconds)
                await anyio.sleep(min(pause, begun.seconds))
                pause = min(pause * 2, _LONGEST_POLL_SECONDS)

    @asynccontextmanager
    async def _in_line(self, conversation_id: str, wait_seconds: float) -> AsyncIterator[None]:
        """Stand in line with the other requests of this process, so that one of them at most asks Redis."""
        queue = self._queues.setdefault(conversation_id, _Queue())
        queue.waiting += 1
        try:
            try:
                with anyio.fail_after(wait_seconds + _LONGEST_POLL_SECONDS):
                    await queue.lock.acquire()
            except TimeoutError:
                raise _locked(conversation_id, LEASE_SECONDS) from None
            try:
                yield
            finally:
                queue.lock.release()
        finally:
            queue.waiting -= 1
            if not queue.waiting:
                self._queues.pop(conversation_id, None)

    @asynccontextmanager
    async def _holding(self, conversation_id: str, token: str) -> AsyncIterator[None]:
        """Keep the lock alive while the model talks; give it back if the turn came to nothing."""
        renewing = asyncio.create_task(self._renew(conversation_id, token), name=f"lock of {conversation_id}")
        try:
            yield
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(LEASE_SECONDS):
                await self._give_back(conversation_id, token)
            raise
        finally:
            renewing.cancel()

    async def _renew(self, conversation_id: str, token: str) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                if not await self._store.renew_lock(conversation_id, token, LEASE_SECONDS):
                    return
            except StoreError:
                continue

    async def _give_back(self, conversation_id: str, token: str) -> None:
        try:
            await self._store.release_lock(conversation_id, token)
        except StoreError:
            return  # the lease runs out by itself

    def _options(self, request: TurnRequest, token: str) -> TurnOptions:
        return TurnOptions(
            turn_id=request.turn_id,
            instructions=request.instructions,
            model=request.model,
            parameters=request.parameters,
            before=pair_up(request.before),
            lock_token=token,
            owner=request.owner,
            request_details={"fingerprint": request.fingerprint} if request.fingerprint else None,
            answer_details={"metadata": dict(request.metadata), **request.details},
        )


@dataclass(slots=True)
class _Queue:
    """Requests of this process for one conversation."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    waiting: int = 0


def not_found(conversation_id: str) -> ConversationNotFound:
    """The error for a conversation that is not there, or not for this one to see: nobody can tell which."""
    return ConversationNotFound(f"Conversation with id '{conversation_id}' not found.")


def metadata_of(inspection: Inspection | Page) -> dict[str, str]:
    """The metadata a client gave a conversation."""
    try:
        found = json.loads(inspection.metadata or "{}")
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _checked(turn: StoredTurn, request: TurnRequest) -> StoredTurn:
    known = (turn.user.details or {}).get("fingerprint")
    if request.key and request.fingerprint and known != request.fingerprint:
        raise IdempotencyKeyReused("this Idempotency-Key came before with another request: use a new key")
    return turn


def _check_expected(message_count: int, request: TurnRequest) -> None:
    if request.expected_messages not in (None, message_count):
        raise ConversationMovedOn(
            "this response is not the newest of its conversation any more: continue the conversation by its id"
        )


def _locked(conversation_id: str, seconds: float) -> ConversationLocked:
    return ConversationLocked(
        f"another turn of conversation {conversation_id} is being answered: wait for it, then send this one again",
        retry_after=max(seconds, 1.0),
    )
