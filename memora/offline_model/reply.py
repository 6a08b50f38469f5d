"""What the offline model says, and how it is written down: one object, or a sequence of events.

Owns the endings and forms that only a model has; the usual shapes are those of `responses_wire`. Pure; must not send
anything or know why a reply is as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from memora.core.prompts import EXISTING_SUMMARY_KEY, LIMITS_KEY, NEW_MESSAGES_KEY, SHORTEN_KEY
from memora.core.text import count_words
from memora.core.tokens import count_text_tokens, fits_in_tokens, request_tokens
from memora.offline_model.call import Call
from memora.offline_model.extractive import Utterance, answer, shorten, summarise
from memora.responses_wire import (
    Event,
    Fields,
    Head,
    Unnumbered,
    ended,
    item_done,
    message_item,
    numbered,
    output_text,
    starting_events,
    text_added,
    text_delta,
    text_done,
    usage_object,
)
from memora.responses_wire import response_object as write_response

NOTHING_TO_SAY: Final = "NONE"

Ending = Literal["completed", "incomplete", "failed", "error", "none", "cut"]
Form = Literal["message", "refusal", "function_call"]

GENERATION_ERROR: Final = {"code": "server_error", "message": "The model failed while it was answering."}
_PIECE = re.compile(r"\s*\S{1,12}|\s+")


@dataclass(frozen=True, slots=True)
class Draft:
    """A reply before it is written down.

    `ending` is how it ends: a status of the API, an `error` event, `none` for no terminal event, `cut` for a connection
    that breaks after `sent_characters`. `usage_factor` falsifies the usage, None leaves it out; `output_tokens` is
    reported instead of the text's own.
    """

    text: str
    input_tokens: int
    form: Form = "message"
    ending: Ending = "completed"
    reason: str = "max_output_tokens"
    usage_factor: float | None = 1.0
    output_tokens: int | None = None
    sent_characters: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of a reply, and when it began (seconds since 1970)."""

    response: str
    item: str
    created_at: int

    @classmethod
    def new(cls, new_id: Callable[[str], str], now: float) -> Identity:
        """Ids in OpenAI's form from a source of unique ones."""
        return cls(new_id("resp_"), new_id("msg_"), int(now))


def honest_draft(call: Call, text: str | None = None) -> Draft:
    """The reply to a call, `text` or the extractive model's own, cut off at the call's `max_output_tokens`."""
    draft = Draft(_AUTHORS[call.kind](call) if text is None else text, count_input_tokens(call))
    return draft if call.max_output_tokens is None else _cut_off(draft, call.max_output_tokens)


def count_input_tokens(call: Call) -> int:
    """Tokens of a whole request."""
    return request_tokens(call.instructions, call.messages)


def pieces_of(text: str) -> list[str]:
    """A text in the pieces a stream sends, about a word each; joined they are the text again."""
    return _PIECE.findall(text)


def response_object(draft: Draft, call: Call, identity: Identity) -> Fields:
    """The reply to a plain request. A reply with no end is one still in progress."""
    head = _head(call, identity)
    if draft.ending == "failed":
        return write_response(head, "failed", error=GENERATION_ERROR)
    if draft.ending == "none":
        return write_response(head, "in_progress", output=[_item(draft, identity, "in_progress")])
    return _final_response(draft, call, identity)


def response_events(draft: Draft, call: Call, identity: Identity) -> list[Event]:
    """The reply to a streaming request, numbered without a gap."""
    return [numbered(number, event) for number, event in enumerate(_unnumbered(draft, call, identity))]


def _answer(call: Call) -> str:
    return answer(call.summary, _utterances(call.dialogue), call.question)


def _summary(call: Call) -> str:
    messages = [(item["role"], item["content"]) for item in call.document[NEW_MESSAGES_KEY]]
    text = summarise(call.document[EXISTING_SUMMARY_KEY], _utterances(messages), **_limits(call))
    return text or NOTHING_TO_SAY


def _shorter(call: Call) -> str:
    return shorten(call.document[SHORTEN_KEY], **_limits(call)) or NOTHING_TO_SAY


_AUTHORS: Final[dict[str, Callable[[Call], str]]] = {"answer": _answer, "summary": _summary, "shorten": _shorter}


def _utterances(messages: Sequence[tuple[str, str]]) -> list[Utterance]:
    return [Utterance(role, content) for role, content in messages]


def _limits(call: Call) -> dict[str, Any]:
    limits = call.document[LIMITS_KEY]
    return {
        "max_words": limits["words"],
        "max_tokens": limits["tokens"],
        "count_tokens": count_text_tokens,
        "count_words": count_words,
    }


def _cut_off(draft: Draft, max_tokens: int) -> Draft:
    if fits_in_tokens(draft.text, max_tokens):
        return draft
    return replace(draft, text=_first_tokens(draft.text, max_tokens), ending="incomplete")


def _first_tokens(text: str, max_tokens: int) -> str:
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits_in_tokens(text[:middle], max_tokens) else (low, middle - 1)
    return text[:low]


def _unnumbered(draft: Draft, call: Call, identity: Identity) -> Iterator[Unnumbered]:
    """Type and fields of each event, in order."""
    yield from starting_events(write_response(_head(call, identity), "in_progress"), _empty_item(draft, identity))
    yield from _WRITERS[draft.form](draft, identity)
    if draft.ending not in _BROKEN_OFF:
        yield item_done(_item(draft, identity, draft.ending))
    yield from _terminal_event(draft, call, identity)


_BROKEN_OFF: Final = frozenset({"failed", "error", "cut"})
"""Endings in the middle of the text: a cut after the characters to be sent, the others after half of it."""


def _terminal_event(draft: Draft, call: Call, identity: Identity) -> Iterator[Unnumbered]:
    if draft.ending == "failed":
        yield ended(write_response(_head(call, identity), "failed", error=GENERATION_ERROR))
    elif draft.ending == "error":
        yield "error", {**GENERATION_ERROR, "param": None}
    elif draft.ending in {"completed", "incomplete"}:
        yield ended(_final_response(draft, call, identity))


def _write_message(draft: Draft, identity: Identity) -> Iterator[Unnumbered]:
    yield text_added(identity.item)
    for piece in _sent_pieces(draft):
        yield text_delta(identity.item, piece)
    if draft.ending not in _BROKEN_OFF:
        yield from text_done(identity.item, draft.text)


def _write_refusal(draft: Draft, identity: Identity) -> Iterator[Unnumbered]:
    place = {"item_id": identity.item, "output_index": 0, "content_index": 0}
    yield "response.content_part.added", {**place, "part": _refusal("")}
    for piece in _sent_pieces(draft):
        yield "response.refusal.delta", {**place, "delta": piece}
    if draft.ending not in _BROKEN_OFF:
        yield "response.refusal.done", {**place, "refusal": draft.text}
        yield "response.content_part.done", {**place, "part": _refusal(draft.text)}


def _write_function_call(draft: Draft, identity: Identity) -> Iterator[Unnumbered]:
    place = {"item_id": identity.item, "output_index": 0}
    for piece in _sent_pieces(draft):
        yield "response.function_call_arguments.delta", {**place, "delta": piece}
    if draft.ending not in _BROKEN_OFF:
        yield (
            "response.function_call_arguments.done",
            {**place, "name": _FUNCTION_NAME, "arguments": draft.text},
        )


_WRITERS: Final[dict[Form, Callable[[Draft, Identity], Iterable[Unnumbered]]]] = {
    "message": _write_message,
    "refusal": _write_refusal,
    "function_call": _write_function_call,
}
_FUNCTION_NAME: Final = "look_up"


def _sent_pieces(draft: Draft) -> list[str]:
    pieces = pieces_of(draft.text[: draft.sent_characters])
    return pieces[: -(-len(pieces) // 2)] if draft.ending in {"failed", "error"} else pieces


def _item(draft: Draft, identity: Identity, ending: str) -> Fields:
    status = ending if ending in {"in_progress", "incomplete"} else "completed"
    if draft.form == "function_call":
        return _function_call(identity, status, draft.text)
    part = _refusal(draft.text) if draft.form == "refusal" else output_text(draft.text)
    return message_item(identity.item, "assistant", status, [part])


def _empty_item(draft: Draft, identity: Identity) -> Fields:
    if draft.form == "function_call":
        return _function_call(identity, "in_progress", "")
    return message_item(identity.item, "assistant", "in_progress", [])


def _function_call(identity: Identity, status: str, arguments: str) -> Fields:
    return {
        "id": identity.item,
        "type": "function_call",
        "status": status,
        "call_id": identity.item.replace("msg_", "call_"),
        "name": _FUNCTION_NAME,
        "arguments": arguments,
    }


def _refusal(text: str) -> Fields:
    return {"type": "refusal", "refusal": text}


def _final_response(draft: Draft, call: Call, identity: Identity) -> Fields:
    status = "incomplete" if draft.ending == "incomplete" else "completed"
    response = write_response(
        _head(call, identity),
        status,
        output=[_item(draft, identity, status)],
        usage=_usage(draft),
        incomplete=draft.reason if status == "incomplete" else None,
    )
    if draft.usage_factor is None:
        del response["usage"]
    return response


def _usage(draft: Draft) -> Fields | None:
    if draft.usage_factor is None:
        return None
    counted = count_text_tokens(draft.text) if draft.output_tokens is None else draft.output_tokens
    return usage_object(round(draft.input_tokens * draft.usage_factor), round(counted * draft.usage_factor))


def _head(call: Call, identity: Identity) -> Head:
    echoed = {name: call.settings[name] for name in _ECHOED if name in call.settings}
    return Head(identity.response, identity.created_at, call.model, echoed)


_ECHOED: Final = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")
