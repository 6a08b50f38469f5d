"""What happens to a request between its arrival and the end of its reply.

Owns the routes of the API and the order of things: understand, record, gate, fault, write, deliver. Must not know how a
text is written or how bytes travel.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from memora.json_bytes import encode_json
from memora.offline_model.behaviour import Behaviour
from memora.offline_model.call import GENERATING, MODEL_NAME, Call, read_call, read_count_call
from memora.offline_model.control import CONTROL_PATH, FAILURES_PATH, JUDGE_PATH, control, judge_control
from memora.offline_model.errors import Rejected, scripted_error
from memora.offline_model.exchange import AS_USUAL, EVENT_STREAM, HTML, JSON, Exchange
from memora.offline_model.faults import HTML_PAGE, Delivery, Fault, Rule, apply_to_draft, delivery_for, garbage
from memora.offline_model.judge import Judge
from memora.offline_model.reply import (
    Draft,
    Identity,
    count_input_tokens,
    honest_draft,
    pieces_of,
    response_events,
    response_object,
)
from memora.offline_model.script import Record, Script
from memora.offline_model.wire import HttpRequest

LARGE_BODY_BYTES: Final = 20_000
"""Requests above this are worked on in a thread: the loop has other conversations to serve."""

_WORKER_THREADS: Final = 4
_MODEL_CREATED_AT: Final = 1_767_225_600
_MODEL_PATH: Final = "/v1/models/"

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def new_id(prefix: str) -> str:
    """A unique id in OpenAI's form."""
    return prefix + secrets.token_hex(16)


class Service:
    """Replies to requests. Without a script it is honest, and keeps nothing of what it is sent.

    With a judge, marked requests are judged, whatever becomes of their replies, and answered with markers.
    """

    def __init__(self, script: Script | None, judge: Judge | None, behaviour: Behaviour) -> None:
        self._script = script
        self._judge = judge
        self._behaviour = behaviour
        self._failed: set[bytes] = set()
        self._threads = anyio.CapacityLimiter(_WORKER_THREADS)

    async def reply(self, exchange: Exchange) -> None:
        """Reply to one request. A connection that breaks, or an error of our own, ends here."""
        try:
            await self._route(exchange)
        except OSError as error:
            _log.debug("a connection broke: %s", error)
        except Exception:  # noqa: BLE001 - a bug met by one request must not end the others; it is logged
            _log.exception("the offline model failed on %s %s", exchange.request.method, exchange.request.path)
            exchange.wire.abort()

    async def _route(self, exchange: Exchange) -> None:
        if self._judge is not None and exchange.request.path == JUDGE_PATH:
            await _rejecting(exchange, partial(judge_control, exchange, self._judge))
        elif exchange.request.path == FAILURES_PATH:
            await exchange.send_json(200, {"failures": len(self._failed)})
        elif self._script is None:
            await _rejecting(exchange, partial(self._reply_honestly, exchange))
        elif exchange.request.path.startswith(CONTROL_PATH):
            await _rejecting(exchange, partial(control, exchange, self._script))
        else:
            await self._reply_on_record(exchange, self._script)

    async def _reply_honestly(self, exchange: Exchange) -> None:
        await self._reply_to(exchange, _understand(exchange.request), None)

    async def _reply_on_record(self, exchange: Exchange, script: Script) -> None:
        record = script.arrive(exchange.request, time.monotonic())
        try:
            await _rejecting(exchange, partial(self._reply_by_script, exchange, script, record))
        finally:
            script.end(record, is_finished=exchange.wire.has_replied)

    async def _reply_by_script(self, exchange: Exchange, script: Script, record: Record) -> None:
        call = _understand(exchange.request)
        record.kind = call.kind
        await script.pass_gates(call)
        rule = script.choose(call, record) or Rule()
        await anyio.sleep(rule.delay_seconds)
        await self._reply_to(exchange, call, rule.fault)

    async def _reply_to(self, exchange: Exchange, call: Call, fault: Fault | None) -> None:
        text = self._judge.read(call) if self._judge is not None and call.kind in GENERATING else None
        fault = fault or self._failure(call)
        if fault is not None and fault.kind in _SPOILERS:
            await _SPOILERS[fault.kind](exchange, call, fault)
        elif call.kind in GENERATING:
            await self._generate(exchange, call, fault, text)
        elif call.kind == "count":
            await self._count(exchange, call, fault)
        else:
            await exchange.deliver(_models(exchange.request.path), _delivery(fault))

    def _failure(self, call: Call) -> Fault | None:
        """What goes wrong by chance. It does so once: who asks the same again is answered."""
        fault = self._behaviour.failure(call) if call.kind in GENERATING else None
        if fault is None:
            return None
        asked = blake2b(f"{call.kind} {call.question}".encode(), digest_size=16).digest()
        if asked in self._failed:
            return None
        self._failed.add(asked)
        return fault

    async def _generate(self, exchange: Exchange, call: Call, fault: Fault | None, text: str | None) -> None:
        draft = await self._work(exchange, partial(_draft, call, fault, text))
        if self._judge is not None:
            self._judge.spoil(call, draft.text[: draft.sent_characters])
        identity = Identity.new(new_id, time.time())
        pieces = len(pieces_of(draft.text))
        timing = self._behaviour.timing(call, pieces)
        if call.is_stream:
            await exchange.stream(response_events(draft, call, identity), _delivery(fault), timing)
            return
        await anyio.sleep(timing.first_seconds + timing.piece_seconds * max(pieces - 1, 0))
        if draft.ending == "error":  # what an event says in a stream, a status says here
            await exchange.send_json(500, scripted_error(500, None))
        else:
            await exchange.deliver(response_object(draft, call, identity), _delivery(fault))

    async def _count(self, exchange: Exchange, call: Call, fault: Fault | None) -> None:
        counted = await self._work(exchange, partial(count_input_tokens, call))
        if fault is not None and fault.kind == "wrong_usage":
            counted = round(counted * fault.parameters["factor"])
        await exchange.deliver({"object": "response.input_tokens", "input_tokens": counted}, _delivery(fault))

    async def _work(self, exchange: Exchange, work: Callable[[], _Result]) -> _Result:
        if len(exchange.request.body) <= LARGE_BODY_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)


async def _rejecting(exchange: Exchange, reply: Callable[[], Awaitable[None]]) -> None:
    """Reply, or say why not."""
    try:
        await reply()
    except Rejected as rejected:
        await exchange.send_json(rejected.status, rejected.body, rejected.headers)


def _understand(request: HttpRequest) -> Call:
    path = _MODEL_PATH if request.path.startswith(_MODEL_PATH) else request.path
    if path not in _ROUTES:
        raise Rejected(404, f"Invalid URL ({request.method} {request.path})", code="not_found")
    method, read = _ROUTES[path]
    if request.method != method:
        message = f"Not allowed to {request.method} on {request.path}; only {method} is."
        raise Rejected(405, message, code="method_not_supported", headers={"allow": method})
    return read(request.body)


_ROUTES: Final[dict[str, tuple[str, Callable[[bytes], Call]]]] = {
    "/v1/responses": ("POST", read_call),
    "/v1/responses/input_tokens": ("POST", read_count_call),
    "/v1/models": ("GET", lambda _: Call("models")),
    _MODEL_PATH: ("GET", lambda _: Call("models")),
}


def _draft(call: Call, fault: Fault | None, text: str | None) -> Draft:
    draft = honest_draft(call, text)
    return draft if fault is None else apply_to_draft(fault, draft, call)


def _delivery(fault: Fault | None) -> Delivery:
    return AS_USUAL if fault is None else delivery_for(fault)


def _models(path: str) -> dict[str, Any]:
    """The one model of the list, or, asked for by name, a model of any name."""
    name = path.removeprefix(_MODEL_PATH) if path.startswith(_MODEL_PATH) else ""
    model = {
        "id": name or MODEL_NAME,
        "object": "model",
        "created": _MODEL_CREATED_AT,
        "owned_by": "memora",
    }
    return model if name else {"object": "list", "data": [model]}


async def _send_status(exchange: Exchange, _: Call, fault: Fault) -> None:
    status, body = fault.parameters["status"], fault.parameters["body"]
    if body is None:
        body = scripted_error(status, fault.parameters["code"])
    content = (body.encode(), HTML) if isinstance(body, str) else (encode_json(body), JSON)
    await exchange.send(status, *content, fault.parameters["headers"])


async def _reset(exchange: Exchange, *_: object) -> None:
    exchange.wire.reset()


async def _close(exchange: Exchange, *_: object) -> None:
    await exchange.wire.close()


async def _hang(*_: object) -> None:
    await anyio.sleep_forever()


async def _send_garbage(exchange: Exchange, call: Call, _: Fault) -> None:
    await exchange.send(200, garbage(), EVENT_STREAM if call.is_stream else JSON)


async def _send_html(exchange: Exchange, *_: object) -> None:
    await exchange.send(200, HTML_PAGE, HTML)


_SPOILERS: Final[dict[str, Callable[[Exchange, Call, Fault], Awaitable[None]]]] = {
    "status": _send_status,
    "reset": _reset,
    "close": _close,
    "hang": _hang,
    "garbage": _send_garbage,
    "html": _send_html,
}
"""Faults that need no text."""
