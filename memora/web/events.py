"""Server-sent events of one conversation: a snapshot, then everything that happens, from any point on.

Owns the order in which they are read and sent, and the one connection that listens for all open pages. The stream in
Redis is the truth; a hint only says that it is worth looking.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import anyio
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from memora.bootstrap import Memora
from memora.conversations import ConversationService
from memora.errors import ConversationNotFound, InvalidId, StoreError
from memora.picture import take_picture
from memora.records import picture_record
from memora.storage import Hint, Hints, Storage
from memora.store import Event
from memora.web.refusals import try_again

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 15
_LOOK_AGAIN_SECONDS: Final = 15.0
"""A lost hint costs a page no more than this."""

_SEND_SECONDS: Final = 30.0
"""Who reads nothing for so long has gone."""

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0
_BEFORE_ALL: Final = "0-0"
_EVENT_ID: Final = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)
_MOST: Final = 2**64 - 1


class InvalidEventId(InvalidId):
    """A `Last-Event-ID` that is none of ours."""

    code = "invalid_event_id"


class Listener:
    """One open page; woken when something has happened."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def wake(self) -> None:
        """Let it look."""
        self._event.set()

    async def wait(self, seconds: float) -> None:
        """Wait to be woken, or for so long."""
        with anyio.move_on_after(seconds):
            await self._event.wait()
        self._event = anyio.Event()


class EventHub:
    """Listens to Redis for all open pages of this process.

    And, once somebody wants them counted, to how folds end: `on_fold` is told. Every server hears of every fold then,
    however many workers and servers there are, so nobody listens for nothing.
    """

    def __init__(self, storage: Storage, most: int, on_fold: Callable[[str], None]) -> None:
        self._storage = storage
        self._most = most
        self._on_fold = on_fold
        self._listeners: dict[str, set[Listener]] = {}
        self._changed = anyio.Event()
        self._counts_folds = False
        self.count = 0
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether no more pages may be opened."""
        return self.count >= self._most

    def count_folds(self) -> None:
        """Listen to how folds end, from now on."""
        self._counts_folds = True
        self._changed.set()

    async def run(self) -> None:
        """Listen until cancelled, again and again if Redis goes away meanwhile."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._storage.hints() as hints, anyio.create_task_group() as tasks:
                    tasks.start_soon(self._follow, hints)
                    async for hint in hints:
                        pause = _FIRST_PAUSE_SECONDS
                        self._take(hint)
            except* StoreError:
                pass  # the next one will do
            await anyio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def close(self) -> None:
        """End every open page."""
        self.is_closed = True
        self._wake_all()

    @contextmanager
    def listening(self, conversation_id: str) -> Iterator[Listener]:
        """Listen to one conversation."""
        listener = Listener()
        self._listeners.setdefault(conversation_id, set()).add(listener)
        self._changed.set()
        self.count += 1
        try:
            yield listener
        finally:
            self.count -= 1
            listeners = self._listeners[conversation_id]
            listeners.discard(listener)
            if not listeners:
                del self._listeners[conversation_id]
                self._changed.set()

    async def _follow(self, hints: Hints) -> None:
        """Follow the conversations that have an open page; a confirmation wakes it, so that nothing is missed."""
        while True:
            self._changed = anyio.Event()
            await hints.follow(self._listeners.keys(), counts_folds=self._counts_folds)
            await self._changed.wait()

    def _take(self, hint: Hint) -> None:
        if hint.conversation_id:
            for listener in self._listeners.get(hint.conversation_id, ()):
                listener.wake()
        else:
            self._on_fold(hint.kind)

    def _wake_all(self) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.wake()


class EventStreams:
    """Opens event streams."""

    def __init__(self, memora: Memora, hub: EventHub) -> None:
        self._memora = memora
        self._conversations = ConversationService(memora.settings, memora.store, memora.chat)
        self._hub = hub

    async def open(self, request: Request, conversation_id: str) -> Response:
        """Begin a stream.

        Raises:
            ConversationNotFound, InvalidId, StoreError: before the first byte.
        """
        last = _event_id(request.headers.get("last-event-id", ""))
        inspection = await self._conversations.inspect(conversation_id, request.state.owner)
        if self._hub.is_full:
            refusal = try_again(503, "too_many_streams", "Too many event streams are open: try again later.", 5)
            return Response(refusal.body, 503, dict(_decoded(refusal.headers)), "application/json")
        return EventSourceResponse(
            self._stream(conversation_id, inspection.conversation.life, last),
            ping=HEARTBEAT_SECONDS,
            ping_message_factory=lambda: ServerSentEvent(comment="still here"),
            sep="\n",
            send_timeout=_SEND_SECONDS,
        )

    async def _stream(self, conversation_id: str, life: str, last: str) -> AsyncIterator[ServerSentEvent]:
        """The snapshot, then events until the conversation is gone or the server stops."""
        if self._hub.is_full:
            return
        with self._hub.listening(conversation_id) as listener:
            # The position is read first: what happens in between is told twice rather than never.
            last = last or await self._newest(conversation_id)
            snapshot = await self._snapshot(conversation_id)
            if snapshot is not None:
                yield _sent("snapshot", last, snapshot)
            while not self._hub.is_closed:
                try:
                    found = await self._memora.store.events(conversation_id, last)
                except StoreError as error:
                    logger.debug("events cannot be read: %s", type(error).__name__)
                    await listener.wait(_LOOK_AGAIN_SECONDS)
                    continue
                if found is None or found.life != life:
                    yield _sent("deleted", None, {"type": "deleted"})
                    return
                for event in found.events:
                    last = event.id
                    yield _told(event)
                if not found.events:
                    await listener.wait(_LOOK_AGAIN_SECONDS)

    async def _newest(self, conversation_id: str) -> str:
        with suppress(StoreError):
            found = await self._memora.store.events(conversation_id, "")
            return (found.newest if found else "") or _BEFORE_ALL
        return _BEFORE_ALL

    async def _snapshot(self, conversation_id: str) -> dict[str, Any] | None:
        """How the conversation stands now: the fields of `inspect --json`."""
        with suppress(StoreError, ConversationNotFound):
            picture = await take_picture(self._memora.store, self._memora.settings, conversation_id)
            return picture_record(picture)
        return None


def _event_id(text: str) -> str:
    """The id that a client has seen last, or "".

    Raises:
        InvalidEventId: it is none.
    """
    if not text:
        return ""
    found = _EVENT_ID.fullmatch(text)
    if not found or any(int(part) > _MOST for part in found.groups()):
        raise InvalidEventId("Last-Event-ID must be the id of an event of this conversation: two numbers, like 0-1")
    return text


def _told(event: Event) -> ServerSentEvent:
    return ServerSentEvent(event.data, event=str(json.loads(event.data)["type"]), id=event.id)


def _sent(kind: str, event_id: str | None, record: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(record, ensure_ascii=False), event=kind, id=event_id)


def _decoded(headers: tuple[tuple[bytes, bytes], ...]) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in headers]
