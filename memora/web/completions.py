"""`/v1/chat/completions`: the second door, for front ends that know nothing else.

Owns how such a client names its conversation, and how completions and their chunks are written. With a conversation
only the last user message is new: the rest is what Memora knows anyway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from memora.conversations import TurnRequest
from memora.json_bytes import encode_json
from memora.web.api import (
    Answer,
    Api,
    answer_headers,
    answer_of,
    api_of,
    model_of,
    owner_of,
    retry_fields,
)
from memora.web.body import StrictRoute
from memora.web.dialogue import dialogue_of, read_chat
from memora.web.errors import READ_ERRORS, TURN_ERRORS, unsupported
from memora.web.stream import EVENT_STREAM, TurnStream, begun, broken_off
from memora.web.turns import RunningTurn
from memora.web.wire import CompletionRequest

router = APIRouter(prefix="/v1/chat/completions", tags=["chat"], route_class=StrictRoute, responses=READ_ERRORS)

CONVERSATION_HEADERS: Final = ("x-memora-conversation", "x-openwebui-chat-id")
TASK_HEADER: Final = "x-openwebui-task"
"""Marks titles, tags and the like, which are no part of any conversation."""

_PASSED_ON: Final = ("temperature", "top_p", "user", "safety_identifier", "prompt_cache_key", "service_tier")


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion on its way."""

    id: str
    created: int
    model: str

    def record(self, kind: str, choices: list[dict[str, Any]], usage: Mapping[str, int] | None) -> dict[str, Any]:
        """The completion, or a chunk of it."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, "usage": usage}

    def chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        """A piece of the answer as an event."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event(self.record("chat.completion.chunk", [choice], None))


@router.post(
    "",
    responses=TURN_ERRORS | {200: {"description": "The completion, or its chunks", "content": {EVENT_STREAM: {}}}},
    operation_id="createChatCompletion",
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Answer the last message: of the conversation that the headers name, or of the messages given."""
    api, owner = await api_of(request), await owner_of(request)  # by hand, as in `create_response`
    _check_supported(body)
    asked = await _turn(body, request, api, owner)
    turn = api.start(asked, request)
    if body.stream:
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        chunks = _chunks(asked, turn, request.state.request_id, wants_usage=wants_usage)
        return TurnStream(await begun(turn), chunks)
    with turn:
        answer = answer_of(await turn.finish(), turn.started)
    return JSONResponse(_completion(asked, answer), headers=answer_headers(answer, turn.times))


async def _turn(body: CompletionRequest, request: Request, api: Api, owner: str) -> TurnRequest:
    dialogue = dialogue_of(None, read_chat(body.messages), "messages")
    conversation_id = _conversation_of(request)
    retry = await retry_fields(request, owner)
    turn = TurnRequest(
        conversation_id,
        dialogue.text,
        owner,
        may_begin=True,
        instructions=dialogue.instructions,
        model=model_of(body.model),
        parameters=_parameters(body),
        before=() if conversation_id else dialogue.messages(api.service.message, api.max_chars),
        metadata=body.metadata or {},
        **retry,
    )
    return replace(turn, details=api.details(turn))


def _conversation_of(request: Request) -> str:
    if TASK_HEADER in request.headers:
        return ""
    return next((request.headers[name] for name in CONVERSATION_HEADERS if request.headers.get(name)), "")


def _parameters(body: CompletionRequest) -> dict[str, object]:
    """The same wishes as the Responses API has them."""
    given = body.model_dump(exclude_none=True)
    parameters = {name: given[name] for name in _PASSED_ON if name in given}
    most = body.max_completion_tokens or body.max_tokens
    text: dict[str, Any] = {"verbosity": body.verbosity} if body.verbosity else {}
    if body.response_format and body.response_format.type != "text":
        text["format"] = {"type": body.response_format.type, **(body.response_format.json_schema or {})}
    wishes = {
        "max_output_tokens": most,
        "reasoning": {"effort": body.reasoning_effort} if body.reasoning_effort else None,
        "text": text or None,
    }
    return parameters | {name: value for name, value in wishes.items() if value is not None}


def _check_supported(body: CompletionRequest) -> None:
    for name, what in _UNSUPPORTED.items():
        if getattr(body, name, None):
            raise unsupported(name, what)
    if body.n not in (None, 1):
        raise unsupported("n", "Several answers to one message are")
    if body.modalities and body.modalities != ["text"]:
        raise unsupported("modalities", "Answers other than text are")


_UNSUPPORTED: Final = {
    "tools": "Tools are",
    "functions": "Functions are",
    "audio": "Audio is",
    "logprobs": "Probabilities of tokens are",
    "stop": "Stop sequences are",
    "logit_bias": "Biases of tokens are",
    "presence_penalty": "Penalties are",
    "frequency_penalty": "Penalties are",
}


def _head(asked: TurnRequest, details: Mapping[str, Any]) -> Completion:
    known = {**asked.details, **details}
    return Completion(f"chatcmpl-{known['response']}", known["created_at"], known["model"])


def _completion(asked: TurnRequest, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
    record = _head(asked, answer.details).record("chat.completion", [choice], _usage(answer))
    return {**record, "metadata": {**asked.metadata, **answer.news}}


def _finish_reason(answer: Answer) -> str:
    return "length" if answer.incomplete else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    read, written = answer.input_tokens, answer.output_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


async def _chunks(asked: TurnRequest, turn: RunningTurn, request_id: str, *, wants_usage: bool) -> AsyncIterator[bytes]:
    with turn:
        replayed = None if turn.started else answer_of(await turn.finish(), None)
        head = _head(asked, replayed.details if replayed else {})
        yield head.chunk({"role": "assistant", "content": "", "refusal": None})
        try:
            async for piece in turn.pieces():
                yield head.chunk({"content": piece})
        except Exception as error:  # noqa: BLE001  # whatever ended the answer, the client has to be told
            yield _event(broken_off(error, request_id).body)
            return
        answer = replayed or answer_of(await turn.finish(), turn.started)
        if replayed:
            yield head.chunk({"content": replayed.text})
        yield head.chunk({}, _finish_reason(answer))
        if wants_usage:
            yield _event(head.record("chat.completion.chunk", [], _usage(answer)))
        yield b"data: [DONE]\n\n"


def _event(value: object) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
