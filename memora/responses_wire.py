"""How the Responses API writes things down: a response, its items and usage, and the events of a stream.

Owns these shapes, for the server that answers and for the offline model that plays one. Pure; must not know where an
answer comes from or how bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from memora.json_bytes import encode_json

Fields = dict[str, Any]
Unnumbered = tuple[str, Fields]
"""Type and fields of an event that has no number yet."""

INVALID_REQUEST: Final = "invalid_request_error"
"""The type of an error that is the client's own."""

_DELTA_EVENTS: Final = frozenset(
    {"response.output_text.delta", "response.refusal.delta", "response.function_call_arguments.delta"}
)


@dataclass(frozen=True, slots=True)
class Head:
    """What a response says about itself from its first event on. `settings` are the request's, echoed."""

    id: str
    created_at: int
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class EventWriter:
    """Numbers and encodes the events of one stream. Pieces of text are most of them, and cost next to nothing here."""

    def __init__(self) -> None:
        self._number = 0
        self._around_piece: tuple[str, bytes, bytes, bytes] | None = None

    def write(self, unnumbered: Unnumbered) -> bytes:
        """The next event."""
        event = numbered(self._number, unnumbered)
        self._number += 1
        return event.encode()

    def write_piece(self, item_id: str, piece: str) -> bytes:
        """The next event, a `text_delta`: the same bytes as `write` has for it."""
        if self._around_piece is None or self._around_piece[0] != item_id:
            self._around_piece = (item_id, *_around_piece(item_id))
        _, head, middle, end = self._around_piece
        number, self._number = self._number, self._number + 1
        return b"%b%d%b%b%b" % (head, number, middle, encode_json(piece), end)


def _around_piece(item_id: str) -> tuple[bytes, bytes, bytes]:
    """The bytes of a `text_delta` in front of its number, between number and text, and behind the text."""
    number, piece = 2**62, "\ue000"
    head, _, rest = numbered(number, text_delta(item_id, piece)).encode().partition(b"%d" % number)
    middle, _, end = rest.partition(encode_json(piece))
    return head, middle, end


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. `is_delta` marks those that a model takes its time for."""

    type: str
    data: Mapping[str, Any]

    @property
    def is_delta(self) -> bool:
        """Whether it carries a piece of the text."""
        return self.type in _DELTA_EVENTS

    def encode(self) -> bytes:
        """As server-sent event."""
        return b"event: %b\ndata: %b\n\n" % (self.type.encode(), encode_json(self.data))


def numbered(number: int, unnumbered: Unnumbered) -> Event:
    """The event with its place in the stream."""
    kind, data = unnumbered
    return Event(kind, {"type": kind, "sequence_number": number, **data})


def response_object(
    head: Head,
    status: str,
    *,
    output: Sequence[Mapping[str, Any]] = (),
    usage: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
    incomplete: str | None = None,
) -> Fields:
    """A response; `incomplete` is the reason why it was cut off."""
    settings = head.settings
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_at,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "instructions": settings.get("instructions"),
        "max_output_tokens": settings.get("max_output_tokens"),
        "metadata": settings.get("metadata") or {},
        "model": head.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": settings.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None, **(settings.get("reasoning") or {})},
        "store": False,
        "temperature": _given(settings, "temperature", 1.0),
        "text": {"format": {"type": "text"}, **(settings.get("text") or {})},
        "tool_choice": "auto",
        "tools": [],
        "top_p": _given(settings, "top_p", 1.0),
        "truncation": "disabled",
        "usage": usage,
    }


def usage_object(input_tokens: int, output_tokens: int) -> Fields:
    """What a response cost."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def message_item(item_id: str, role: str, status: str, content: Sequence[Mapping[str, Any]]) -> Fields:
    """A message as an item."""
    return {"id": item_id, "type": "message", "role": role, "status": status, "content": list(content)}


def output_text(text: str) -> Fields:
    """What an assistant said, as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def input_text(text: str) -> Fields:
    """What a user said, as a part of a message."""
    return {"type": "input_text", "text": text}


def starting_events(started: Fields, item: Fields) -> Iterator[Unnumbered]:
    """What comes before the content of the first item: `started` is the response in progress, `item` the empty item."""
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    yield "response.output_item.added", {"output_index": 0, "item": item}


def text_added(item_id: str) -> Unnumbered:
    """A part for text begins."""
    return "response.content_part.added", {**_place(item_id), "part": output_text("")}


def text_delta(item_id: str, piece: str) -> Unnumbered:
    """A piece of the text."""
    return "response.output_text.delta", {**_place(item_id), "delta": piece, "logprobs": []}


def text_done(item_id: str, text: str) -> Iterator[Unnumbered]:
    """The text and its part are complete."""
    yield "response.output_text.done", {**_place(item_id), "text": text, "logprobs": []}
    yield "response.content_part.done", {**_place(item_id), "part": output_text(text)}


def item_done(item: Fields) -> Unnumbered:
    """The item is complete."""
    return "response.output_item.done", {"output_index": 0, "item": item}


def ended(response: Fields) -> Unnumbered:
    """The last event: the response and how it ended."""
    return f"response.{response['status']}", {"response": response}


def error_body(
    message: str, *, kind: str = INVALID_REQUEST, code: str | None = None, param: str | None = None
) -> Fields:
    """`{"error": {"message", "type", "param", "code"}}`, the body of every error of the API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _place(item_id: str) -> Fields:
    return {"item_id": item_id, "output_index": 0, "content_index": 0}


def _given(settings: Mapping[str, Any], name: str, default: float) -> Any:
    value = settings.get(name)
    return default if value is None else value
