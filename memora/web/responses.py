"""`/v1/responses`: OpenAI's Responses API over Memora's conversations.

Owns what a request for a response means, and the order in which a stream of it is written. Must not know how turns are
answered or kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from memora.conversations import Started, TurnRequest
from memora.core.window import ContextTokens
from memora.errors import ConversationNotFound, InvalidId
from memora.records import tokens_record
from memora.responses_wire import (
    EventWriter,
    Fields,
    Head,
    Unnumbered,
    ended,
    item_done,
    message_item,
    output_text,
    response_object,
    starting_events,
    text_added,
    text_done,
    usage_object,
)
from memora.store import StoredTurn
from memora.web.api import (
    OWN_MODEL,
    Answer,
    Api,
    ApiOf,
    OwnerOf,
    answer_headers,
    answer_of,
    api_of,
    model_of,
    news_before,
    owner_of,
    retry_fields,
)
from memora.web.body import StrictRoute
from memora.web.dialogue import Dialogue, dialogue_of, read_input
from memora.web.errors import READ_ERRORS, TURN_ERRORS, invalid, missing, unsupported
from memora.web.names import ResponseName, item_name, read_response_name
from memora.web.stream import EVENT_STREAM, TurnStream, begun, broken_off
from memora.web.turns import RunningTurn
from memora.web.wire import Asked, ResponseRequest

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=StrictRoute, responses=READ_ERRORS)

_PASSED_ON: Final = (
    *("max_output_tokens", "temperature", "top_p", "reasoning", "text", "user", "safety_identifier"),
    *("prompt_cache_key", "service_tier"),
)
_ECHOED: Final = (
    *("instructions", "max_output_tokens", "previous_response_id", "reasoning", "temperature", "text", "top_p"),
    *("user", "safety_identifier", "prompt_cache_key", "service_tier"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A request for a response, understood."""

    turn: TurnRequest
    echo: Mapping[str, Any]
    wants_news: bool


@dataclass(frozen=True, slots=True)
class Written:
    """A response on its way: what it says about itself, and the id of its item."""

    head: Head
    item_id: str
    conversation_id: str

    def response(self, status: str, news: Mapping[str, str], **more: Any) -> Fields:
        """The response as it stands."""
        head = self.head
        settings = {**head.settings, "metadata": {**head.settings["metadata"], **news}}
        response = response_object(Head(head.id, head.created_at, head.model, settings), status, **more)
        return response | {"conversation": {"id": self.conversation_id} if self.conversation_id else None}

    def final(self, answer: Answer) -> Fields:
        """The response with its answer."""
        status = "incomplete" if answer.incomplete else "completed"
        usage = usage_object(answer.input_tokens, answer.output_tokens)
        item = self.item(status, answer.text)
        return self.response(status, answer.news, output=[item], usage=usage, incomplete=answer.incomplete)

    def item(self, status: str, text: str) -> Fields:
        """The answer as an item."""
        return message_item(self.item_id, "assistant", status, [output_text(text)])


@router.post(
    "",
    responses=TURN_ERRORS | {200: {"description": "The response, or its events", "content": {EVENT_STREAM: {}}}},
    operation_id="createResponse",
)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Answer a turn: of a conversation, or of the messages that the request itself holds."""
    # By hand, because this is where turns come from: as dependencies the two cost more than selecting a context.
    api, owner = await api_of(request), await owner_of(request)
    question = await _understand(body, request, api, owner)
    turn = api.start(question.turn, request)
    if body.stream:
        return TurnStream(await begun(turn), _events(question, turn, request.state.request_id))
    with turn:
        answer = answer_of(await turn.finish(), turn.started)
    written = _written_answer(question, answer)
    return JSONResponse(written.final(answer), headers=answer_headers(answer, turn.times))


@router.post("/input_tokens", operation_id="countInputTokens", responses=TURN_ERRORS)
async def count_input_tokens(body: Asked, api: ApiOf, owner: OwnerOf) -> dict[str, Any]:
    """Count what would be sent for this turn: instructions, summary, tail and message; nothing is sent or stored."""
    _check_supported(body)
    turn = await _turn(body, api, owner, _dialogue(body), {})
    context = await api.preview(turn)
    return {"object": "response.input_tokens", "input_tokens": context.counted_input_tokens}


@router.get("/{response_id}", operation_id="retrieveResponse")
async def retrieve_response(response_id: str, api: ApiOf, owner: OwnerOf) -> dict[str, Any]:
    """A response of a conversation, as the history has it."""
    found = await _find(response_id, api, owner)
    if found is None:
        raise missing("There is no response with this id.", "response_id", "response_not_found")
    name, turn = found
    said, details = turn.assistant, turn.assistant.details or {}
    answer = Answer(said.content, details, turn.position, turn.created_at, said.incomplete)
    return _written(name, details, turn.created_at, {}, details.get("metadata")).final(answer)


async def _understand(body: ResponseRequest, request: Request, api: Api, owner: str) -> Question:
    _check_supported(body)
    dialogue = _dialogue(body)
    given: dict[str, Any] = body.model_dump(exclude_none=True)
    retry = await retry_fields(request, owner)
    turn = await _turn(body, api, owner, dialogue, {name: given[name] for name in _PASSED_ON if name in given})
    turn = replace(turn, **retry, metadata=body.metadata or {})
    turn = replace(turn, details=api.details(turn))
    echo: dict[str, Any] = {name: given[name] for name in _ECHOED if name in given}
    return Question(turn, echo, request.headers.get("x-memora-events") == "1")


async def _turn(body: Asked, api: Api, owner: str, dialogue: Dialogue, parameters: Mapping[str, object]) -> TurnRequest:
    conversation_id, expected = body.conversation_id or "", None
    if body.previous_response_id:
        found = await _find(body.previous_response_id, api, owner)
        if found is None:
            message = "There is no previous response with this id."
            raise invalid(message, "previous_response_id", code="previous_response_not_found")
        conversation_id, expected = found[0].conversation_id, found[1].position + 2
    return TurnRequest(
        conversation_id,
        dialogue.text,
        owner,
        instructions=dialogue.instructions,
        model=model_of(body.model),
        parameters=parameters,
        before=dialogue.messages(api.service.message, api.max_chars),
        expected_messages=expected,
    )


def _dialogue(body: Asked) -> Dialogue:
    if body.input in (None, "", []):
        raise invalid("Missing required parameter: 'input'.", "input", code="missing_required_parameter")
    return dialogue_of(body.instructions, read_input(body.input), "input")


def _check_supported(body: Asked) -> None:
    """Refuse what OpenAI's API has and Memora has not, rather than answer as if it had not been asked for.

    Raises:
        Refused: naming it.
    """
    if body.conversation is not None and body.previous_response_id is not None:
        message = "Mutually exclusive parameters: 'conversation' and 'previous_response_id'."
        raise invalid(message, "previous_response_id", code="mutually_exclusive_parameters")
    if body.conversation_id == "":
        raise InvalidId("a conversation id has at least one character")
    for name, what in _UNSUPPORTED.items():
        if getattr(body, name, None):
            raise unsupported(name, what)


_UNSUPPORTED: Final = {
    "tools": "Tools are",
    "background": "Responses in the background are",
    "prompt": "Stored prompts are",
    "include": "Additional output is",
}


async def _find(response_id: str, api: Api, owner: str) -> tuple[ResponseName, StoredTurn] | None:
    """The turn of a response; None if this owner has none."""
    name = read_response_name(response_id)
    if name is None:
        return None
    try:
        page = await api.service.page(name.conversation_id, owner, name.position, name.position + 2)
    except ConversationNotFound:
        return None
    if len(page.messages) < 2 or (page.messages[1].details or {}).get("response") != name.nonce:
        return None
    user, assistant = page.messages
    return name, StoredTurn("", name.position, user, assistant, page.created_at)


def _written(
    name: ResponseName, details: Mapping[str, Any], conversation_created_at: int, echo: Mapping[str, Any], metadata: Any
) -> Written:
    settings = {**echo, "metadata": metadata or {}}
    if not name.conversation_id:
        head = Head(f"resp_{name.nonce}", details["created_at"], details["model"], settings)
        return Written(head, f"msg_{name.nonce}", "")
    head = Head(str(name), int(details.get("created_at", 0)), str(details.get("model", OWN_MODEL)), settings)
    item_id = item_name(name.conversation_id, conversation_created_at, name.position + 1)
    return Written(head, item_id, name.conversation_id)


def _written_answer(question: Question, answer: Answer) -> Written:
    """The response of an answer: a replayed one has the id and the time that it had."""
    turn = question.turn
    nonce = str(answer.details.get("response", turn.nonce))
    name = ResponseName(nonce, answer.position, turn.conversation_id)
    return _written(name, answer.details, answer.created_at, question.echo, turn.metadata)


async def _events(question: Question, turn: RunningTurn, request_id: str) -> AsyncIterator[bytes]:
    events = EventWriter()
    with turn:
        if turn.started is None:  # it was there already
            answer = answer_of(await turn.finish(), None)
            written = _written_answer(question, answer)
            yield b"".join(map(events.write, _start(written, answer.news)))
            yield events.write_piece(written.item_id, answer.text)
        else:
            written = _written_start(question, turn.started)
            news = news_before(turn.started.context)
            yield b"".join(map(events.write, _start(written, news)))
            if question.wants_news:
                yield events.write(_news_event(turn.started))
            try:
                async for piece in turn.pieces():
                    yield events.write_piece(written.item_id, piece)
            except Exception as error:  # noqa: BLE001  # whatever ended the answer, the client has to be told
                yield b"".join(map(events.write, _failed(written, error, news, request_id)))
                return
            answer = answer_of(await turn.finish(), turn.started)
        yield b"".join(map(events.write, _end(written, answer)))


def _written_start(question: Question, started: Started) -> Written:
    turn = question.turn
    name = ResponseName(turn.nonce, started.position, turn.conversation_id)
    return _written(name, turn.details, started.created_at, question.echo, turn.metadata)


def _start(written: Written, news: Mapping[str, str]) -> Iterator[Unnumbered]:
    item = message_item(written.item_id, "assistant", "in_progress", [])
    yield from starting_events(written.response("in_progress", news), item)
    yield text_added(written.item_id)


def _end(written: Written, answer: Answer) -> Iterator[Unnumbered]:
    final = written.final(answer)
    yield from text_done(written.item_id, answer.text)
    yield item_done(final["output"][0])
    yield ended(final)


def _news_event(started: Started) -> Unnumbered:
    """What the answer is made from, for those who asked for Memora's own events."""
    context = started.context
    tokens: ContextTokens = context.tokens
    return "memora.context", {
        "tokens": tokens_record(tokens),
        "messages": context.messages_sent,
        "gap_messages": context.gap_messages,
        "summary_version": context.summary_version,
    }


def _failed(written: Written, error: Exception, news: Mapping[str, str], request_id: str) -> Iterator[Unnumbered]:
    """What broke off the answer, with Memora's code; and the response as failed."""
    told = broken_off(error, request_id)
    yield "error", {"code": told.code or _FAILED_CODE, "message": told.message, "param": told.param}
    yield ended(written.response("failed", news, error={"code": _FAILED_CODE, "message": told.message}))


_FAILED_CODE: Final = "server_error"
"""The client knows a fixed set of codes here, and a strict one takes no other."""
