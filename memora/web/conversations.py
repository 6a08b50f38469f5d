"""`/v1/conversations`: conversations and their items, as OpenAI has them.

Owns paging through a history, which reads only what a page needs. Items are the messages of the history; the summary is
never among them. Must not know how turns are answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from memora.conversations import metadata_of
from memora.core.conversation import Message
from memora.responses_wire import input_text, message_item, output_text
from memora.store import Page
from memora.web.api import Api, ApiOf, OwnerOf
from memora.web.body import StrictRoute
from memora.web.dialogue import counted, read_items
from memora.web.errors import READ_ERRORS, WRITE_ERRORS, Refused, invalid, missing, unsupported
from memora.web.names import item_name, read_item_name
from memora.web.wire import ConversationRequest, Item, ItemsRequest, MetadataRequest

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], route_class=StrictRoute, responses=READ_ERRORS)

Record = dict[str, Any]
Order = Literal["asc", "desc"]

_MOST_ITEMS: Final = 100


@dataclass(frozen=True, slots=True)
class Items:
    """Some messages of a conversation, with their positions."""

    conversation_id: str
    created_at: int
    messages: Sequence[tuple[int, Message]]
    has_more: bool = False

    @property
    def record(self) -> Record:
        """As a list of the API."""
        data = [item_record(self.conversation_id, self.created_at, *message) for message in self.messages]
        first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": self.has_more}


def item_record(conversation_id: str, created_at: int, position: int, message: Message) -> Record:
    """A message as an item."""
    part = input_text(message.content) if message.role == "user" else output_text(message.content)
    status = "incomplete" if message.incomplete else "completed"
    item = message_item(item_name(conversation_id, created_at, position), message.role, status, [part])
    return item | ({"phase": message.phase} if message.phase else {})


@router.post("", operation_id="createConversation", responses=WRITE_ERRORS)
async def create_conversation(api: ApiOf, owner: OwnerOf, body: ConversationRequest | None = None) -> Record:
    """Begin a conversation, with a history if one is given."""
    body = body or ConversationRequest()
    messages = _messages(api, body.items or [])
    conversation_id = await api.service.create(owner, body.metadata or {}, messages)
    return await _record(api, owner, conversation_id)


@router.get("/{conversation_id}", operation_id="retrieveConversation")
async def retrieve_conversation(conversation_id: str, api: ApiOf, owner: OwnerOf) -> Record:
    """A conversation: when it began, and its metadata."""
    return await _record(api, owner, conversation_id)


@router.post("/{conversation_id}", operation_id="updateConversation", responses=WRITE_ERRORS)
async def update_conversation(conversation_id: str, body: MetadataRequest, api: ApiOf, owner: OwnerOf) -> Record:
    """Replace the metadata."""
    await api.service.set_metadata(conversation_id, owner, body.metadata or {})
    return await _record(api, owner, conversation_id)


@router.delete("/{conversation_id}", operation_id="deleteConversation", responses=WRITE_ERRORS)
async def delete_conversation(conversation_id: str, api: ApiOf, owner: OwnerOf) -> Record:
    """Leave nothing of it behind, items included."""
    await api.service.delete(conversation_id, owner)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


class ItemsQuery(BaseModel):
    """Which items to list."""

    limit: int = Field(20, ge=1, le=_MOST_ITEMS)
    order: Order = "desc"
    after: str | None = None


@router.get("/{conversation_id}/items", operation_id="listItems")
async def list_items(conversation_id: str, api: ApiOf, owner: OwnerOf, query: Annotated[ItemsQuery, Query()]) -> Record:
    """The messages of a conversation, all of them, a page at a time."""
    head = await api.service.page(conversation_id, owner, 0, 0)
    after = _after(conversation_id, head, query.order, query.after)
    walk = _Walk(query.order == "asc", query.limit, after)
    return (await _walk(api, owner, conversation_id, head, walk)).record


@router.post("/{conversation_id}/items", operation_id="createItems", responses=WRITE_ERRORS)
async def create_items(conversation_id: str, body: ItemsRequest, api: ApiOf, owner: OwnerOf) -> Record:
    """Append messages of a history that was made elsewhere; they are summarized like any others."""
    messages = _messages(api, body.items)
    imported = await api.service.import_messages(conversation_id, owner, messages, wait_seconds=api.wait_seconds)
    return Items(conversation_id, imported.created_at, imported.messages).record


@router.get("/{conversation_id}/items/{item_id}", operation_id="retrieveItem")
async def retrieve_item(conversation_id: str, item_id: str, api: ApiOf, owner: OwnerOf) -> Record:
    """One message."""
    page, position = await _find(api, owner, conversation_id, item_id)
    return item_record(conversation_id, page.created_at, position, page.messages[0])


@router.delete("/{conversation_id}/items/{item_id}", operation_id="deleteItem", responses=WRITE_ERRORS)
async def delete_item(conversation_id: str, item_id: str, api: ApiOf, owner: OwnerOf) -> Record:
    """Take back a message that no summary stands for yet; the others keep their ids."""
    _, position = await _find(api, owner, conversation_id, item_id)
    wait = api.wait_seconds
    if not await api.service.remove_message(conversation_id, owner, position, wait_seconds=wait):
        raise _no_item(item_id)
    return await _record(api, owner, conversation_id)


async def _record(api: Api, owner: str, conversation_id: str) -> Record:
    page = await api.service.page(conversation_id, owner, 0, 0)
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": page.created_at // 1_000,
        "metadata": metadata_of(page),
    }


def _messages(api: Api, items: Sequence[Item]) -> tuple[Message, ...]:
    said = read_items(items, "items")
    for message in said:
        if message.role not in ("user", "assistant"):
            raise unsupported(f"{message.param}.role", f"Messages of the role '{message.role}' in a history are")
    return counted(said, api.service.message, api.max_chars)


@dataclass(frozen=True, slots=True)
class _Walk:
    """A way through a history: so many messages in this order, behind this position."""

    is_ascending: bool
    limit: int
    after: int


def _after(conversation_id: str, head: Page, order: Order, after: str | None) -> int:
    if after is None:
        return -1 if order == "asc" else head.message_count
    position = read_item_name(after, conversation_id, head.created_at)
    if position is None or position >= head.message_count:
        raise invalid(f"No item with id '{after[:200]}' in this conversation.", "after")
    return position


async def _walk(api: Api, owner: str, conversation_id: str, head: Page, walk: _Walk) -> Items:
    """Read until there are enough messages, and one more that tells whether there are others behind them."""
    found: list[tuple[int, Message]] = []
    count, most = head.message_count, walk.limit + 1
    first, stop = (walk.after + 1, walk.after + 1 + most) if walk.is_ascending else (walk.after - most, walk.after)
    while len(found) < most and first < count and stop > 0:
        page = await api.service.page(conversation_id, owner, max(first, 0), min(stop, count))
        present = [(at, message) for at, message in enumerate(page.messages, page.first) if not message.absent]
        found += present if walk.is_ascending else reversed(present)
        step = most if walk.is_ascending else -most
        first, stop = first + step, stop + step
    return Items(conversation_id, head.created_at, found[: walk.limit], has_more=len(found) > walk.limit)


async def _find(api: Api, owner: str, conversation_id: str, item_id: str) -> tuple[Page, int]:
    """The one message that an id names, and its position."""
    head = await api.service.page(conversation_id, owner, 0, 0)
    position = read_item_name(item_id, conversation_id, head.created_at)
    if position is None:
        raise _no_item(item_id)
    page = await api.service.page(conversation_id, owner, position, position + 1)
    if not page.messages or page.messages[0].absent or page.created_at != head.created_at:
        raise _no_item(item_id)
    return page, position


def _no_item(item_id: str) -> Refused:
    return missing(f"Item with id '{item_id[:200]}' not found.", "item_id", "item_not_found")
