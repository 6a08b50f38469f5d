"""`/v1/conversations/{id}/memory` and `…/context`: what Memora remembers and what it sent, and the way back.

Owns how much of a long history is listed, and how a summary is asked to begin anew. What is shown is one consistent
snapshot.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query

from memora.conversations import not_found
from memora.errors import ConversationNotFound
from memora.picture import Picture, next_context, take_picture
from memora.records import context_record, next_context_record, picture_record
from memora.store import NoSuchVersion
from memora.web.api import Api, ApiOf, OwnerOf
from memora.web.body import StrictRoute
from memora.web.errors import READ_ERRORS, invalid
from memora.web.wire import RollbackRequest

router = APIRouter(
    prefix="/v1/conversations/{conversation_id}", tags=["memory"], route_class=StrictRoute, responses=READ_ERRORS
)

_USUAL_MESSAGES: Final = 1_000
_MOST_MESSAGES: Final = 10_000


@router.get("/memory", operation_id="retrieveMemory")
async def retrieve_memory(
    conversation_id: str,
    api: ApiOf,
    owner: OwnerOf,
    limit: Annotated[int, Query(ge=0, le=_MOST_MESSAGES)] = _USUAL_MESSAGES,
) -> dict[str, Any]:
    """The summary and how far it reaches, where each message is, and what the next answer would be made from.

    `messages` are the newest `limit` of the history; those before `messages_from` are folded unless `pending_messages`
    says otherwise. `context` is null if not even the summary would fit.
    """
    return await _memory(conversation_id, api, owner, limit)


async def _memory(conversation_id: str, api: Api, owner: str, limit: int) -> dict[str, Any]:
    settings = api.memora.settings
    try:
        picture = await take_picture(api.memora.store, settings, conversation_id, whole_tail=True, most_newest=limit)
    except ConversationNotFound:
        raise not_found(conversation_id) from None
    if picture.inspection.owner != owner:
        raise not_found(conversation_id)
    following = next_context(picture, settings)
    return {
        **picture_record(picture),
        "messages_from": picture.conversation.message_count - len(picture.inspection.newest),
        "messages": _messages(picture),
        "context": following and next_context_record(following, settings.max_input_tokens),
    }


@router.post("/memory/rebuild", operation_id="rebuildMemory")
async def rebuild_memory(conversation_id: str, api: ApiOf, owner: OwnerOf) -> dict[str, Any]:
    """Make the summary anew from the history: it is empty now, and the worker folds everything again.

    Until then contexts hold what fits of the history, and say how much they leave out. The memory as it is now.
    """
    await api.service.rewind(conversation_id, owner, 0)
    return await _memory(conversation_id, api, owner, _USUAL_MESSAGES)


@router.post("/memory/rollback", operation_id="rollbackMemory")
async def rollback_memory(conversation_id: str, body: RollbackRequest, api: ApiOf, owner: OwnerOf) -> dict[str, Any]:
    """Take the summary back to an earlier version; the worker folds again what came after it.

    `version` is that of the summary, 0 for none at all. The memory as it is now.
    """
    rewound = await api.service.rewind(conversation_id, owner, body.version)
    if isinstance(rewound, NoSuchVersion):
        what = f"There is no version {rewound.version} of this summary: the newest is {rewound.newest}."
        raise invalid(what, "version")
    return await _memory(conversation_id, api, owner, _USUAL_MESSAGES)


@router.get("/context", operation_id="retrieveContext")
async def retrieve_context(conversation_id: str, api: ApiOf, owner: OwnerOf) -> dict[str, Any]:
    """What was sent for the last answer, word for word; no messages if nothing was."""
    await api.service.page(conversation_id, owner, 0, 0)
    context = await api.memora.store.last_context(conversation_id)
    return context_record(conversation_id, context, api.memora.settings.max_input_tokens)


def _messages(picture: Picture) -> list[dict[str, Any]]:
    newest = picture.inspection.newest
    first = picture.conversation.message_count - len(newest)
    return [
        {
            "position": position,
            "role": message.role,
            "tokens": message.tokens,
            "state": picture.state_of(position),
        }
        for position, message in enumerate(newest, first)
        if not message.absent
    ]
