"""The ids that clients see: of items and of responses.

Owns their form. An item's id names its place in the history and the life of its conversation (when it was created), not
the generation, so that it stays the same when another item is deleted or the summary is rebuilt, and means nothing any
more when the conversation is deleted. A response's id also names its conversation, and carries the nonce of its turn.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

_ITEM: Final = re.compile(r"msg_([0-9a-f]{16})_(0|[1-9][0-9]{0,8})")
_RESPONSE: Final = re.compile(r"resp_([0-9a-f]{32})_(0|[1-9][0-9]{0,8})_([A-Za-z0-9_-]{1,128})")


@dataclass(frozen=True, slots=True)
class ResponseName:
    """What a response's id says: the nonce of its turn, the place of the user's message, the conversation."""

    nonce: str
    position: int
    conversation_id: str

    def __str__(self) -> str:
        return f"resp_{self.nonce}_{self.position}_{self.conversation_id}"


def read_response_name(response_id: str) -> ResponseName | None:
    """What the id says; None if it is none of a stored response."""
    found = _RESPONSE.fullmatch(response_id)
    return found and ResponseName(found[1], int(found[2]), found[3])


def item_name(conversation_id: str, created_at: int, position: int) -> str:
    """The id of the message at this place of a conversation that was created then (ms)."""
    return f"msg_{_life(conversation_id, created_at)}_{position}"


def read_item_name(item_id: str, conversation_id: str, created_at: int) -> int | None:
    """The place that the id names; None if it is of another conversation, or of another life of this one."""
    found = _ITEM.fullmatch(item_id)
    return int(found[2]) if found and found[1] == _life(conversation_id, created_at) else None


def _life(conversation_id: str, created_at: int) -> str:
    return hashlib.sha256(f"{conversation_id} {created_at}".encode()).hexdigest()[:16]
