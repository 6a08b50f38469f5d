"""The model: one class over the official `openai` client, which keeps connections, retries and deadlines.

Owns the wire of the Responses API as Memora needs it, and the one place where the client's errors become ours. Must not
know what a conversation or a summary is. Calls are stateless and never stored by the provider (`store: false`).

The client's typed parameters and stream events cost three quarters of a turn's CPU, so the body is posted as it is, the
few stream events that matter are read from the bytes, and the connections are those of its aiohttp transport.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import anyio
import httpx2
import openai

from memora.core.prompts import ModelRequest
from memora.errors import (
    ContextLengthExceeded,
    ModelDenied,
    ModelError,
    ModelRefused,
    ModelTimeout,
    ModelUnavailable,
    OutputUnusable,
    SettingsError,
)
from memora.json_bytes import decode_json

Emit = Callable[[str], Awaitable[None]]
"""Receives the pieces of an answer as they arrive."""

_MAX_CONNECTIONS: Final = 1_000
_KEEP_ALIVE_SECONDS: Final = 5.0
_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
"""No text reply is this large; a broken endpoint may be."""

_COUNT_TIMEOUT_SECONDS: Final = 5.0
_LAST_BYTES_SECONDS: Final = 0.5
"""How long the end of a stream may take after its last event; a connection is used again only if it has ended."""

_EVENT_STREAM: Final = {"accept": "text/event-stream"}
_NO_PARAMETERS: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What came back. `problem` is empty for a complete text answer, else why it is none.

    Token counts are the provider's, None where it does not say. `phase` has to be sent back with the message.
    """

    text: str
    problem: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    phase: str | None = None


class ModelClient:
    """The models behind one endpoint.

    Raises:
        SettingsError: the API key cannot be sent.
    """

    def __init__(self, *, api_key: str, base_url: str | None, max_retries: int = 2) -> None:
        api_key = api_key.strip()
        if not (api_key.isascii() and api_key.isprintable()):
            raise SettingsError("OPENAI_API_KEY holds characters that no key has (not shown): copy it again")
        limits = httpx2.Limits(max_connections=_MAX_CONNECTIONS, keepalive_expiry=_KEEP_ALIVE_SECONDS)
        self._client = openai.AsyncOpenAI(
            api_key=api_key, base_url=base_url, max_retries=max_retries, http_client=_HttpClient(limits=limits)
        )
        # An address that is whole already is not put together again for each call.
        self._responses_url = f"{self._client.base_url}responses"
        self._counts_tokens = True

    def warm_up(self) -> None:
        """Load what the client else loads at its first call: half a second in which an answer would wait."""
        _ = self._client.responses.with_streaming_response

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def stream(
        self,
        request: ModelRequest,
        emit: Emit,
        *,
        model: str,
        timeout_seconds: float,
        parameters: Mapping[str, object] = _NO_PARAMETERS,
    ) -> ModelReply:
        """Stream an answer: each piece goes to `emit`, the whole comes back.

        `timeout_seconds` is the deadline of the whole answer.

        Raises:
            ModelError: no answer, or one that broke off. ContextLengthExceeded: the model says that it is too long.
        """
        reader = _StreamReader()
        body = {**_body(request, parameters), "model": model, "store": False, "stream": True}
        with _model_errors():
            with anyio.move_on_after(timeout_seconds) as scope:
                stream = await self._client.post(
                    self._responses_url,
                    cast_to=object,
                    body=body,
                    options={"timeout": httpx2.Timeout(timeout_seconds, read=None), "headers": _EVENT_STREAM},
                    stream=True,
                    stream_cls=openai.AsyncStream[object],
                )
                async with stream, aclosing(_chunks(stream.response)) as chunks:
                    async for chunk in chunks:
                        for piece in reader.read(chunk):
                            await emit(piece)
                        if reader.finished:
                            break
                    scope.deadline = min(scope.deadline, anyio.current_time() + _LAST_BYTES_SECONDS)
                    await _read_on(chunks)
            if not reader.finished and scope.cancelled_caught:
                raise TimeoutError
        return _checked_length(reader.reply(), parameters)

    async def complete(self, request: ModelRequest, *, model: str, timeout_seconds: float) -> ModelReply:
        """Ask for a reply in one piece. An unusable one is a reply with a `problem`, since its tokens were spent.

        Raises:
            ModelError: the call itself failed.
        """
        with _model_errors(), anyio.fail_after(timeout_seconds):
            response = await self._client.post(
                self._responses_url,
                cast_to=httpx2.Response,
                body={**_body(request, _NO_PARAMETERS), "model": model, "store": False},
                options={"timeout": timeout_seconds},
            )
            return _reply(_json_object(response.content))

    async def count_input_tokens(self, request: ModelRequest, *, model: str) -> int | None:
        """Let the endpoint count; None if it cannot, which is then remembered.

        Raises:
            ModelError: the endpoint can, but did not answer.
        """
        if not self._counts_tokens:
            return None
        try:
            with _model_errors(), anyio.fail_after(_COUNT_TIMEOUT_SECONDS):
                response = await self._client.responses.input_tokens.with_raw_response.count(
                    model=model, extra_body=_body(request, _NO_PARAMETERS), timeout=_COUNT_TIMEOUT_SECONDS
                )
                counted = _json_object(response.http_response.content).get("input_tokens")
        except (ModelRefused, OutputUnusable):
            counted = None
        self._counts_tokens = isinstance(counted, int)
        return counted if isinstance(counted, int) else None

    async def check(self, model: str) -> None:
        """See whether the endpoint answers and knows the model.

        Raises:
            ModelError: it does not.
        """
        with _model_errors(), anyio.fail_after(_COUNT_TIMEOUT_SECONDS):
            await self._client.models.with_raw_response.retrieve(model, timeout=_COUNT_TIMEOUT_SECONDS)


class _HttpClient(openai.DefaultAioHttpClient):
    """The official client's own transport. It takes a request as that client has made it, with no defaults to merge."""

    def build_request(
        self,
        method: str,
        url: httpx2.URL | str,
        *,
        headers: Any = None,
        content: Any = None,
        timeout: Any = None,
        **more: Any,
    ) -> httpx2.Request:
        """Put a request together."""
        if any(more.values()):
            return super().build_request(method, url, headers=headers, content=content, timeout=timeout, **more)
        extensions = {"timeout": httpx2.Timeout(timeout).as_dict()}
        return httpx2.Request(
            method, _url(str(url)), headers=headers, content=content, cookies=self.cookies, extensions=extensions
        )


@lru_cache
def _url(address: str) -> httpx2.URL:
    """There are a few; to take one apart costs as much as to encode a request."""
    return httpx2.URL(address)


async def _read_on(chunks: AsyncIterator[bytes]) -> None:
    """Read what comes behind the last event; the answer is whole, whatever it is."""
    with suppress(httpx2.HTTPError):
        async for _ in chunks:
            pass


def _chunks(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """The body as it arrives, unpacked if it has to be."""
    return response.aiter_bytes() if "content-encoding" in response.headers else response.aiter_raw()


def _body(request: ModelRequest, parameters: Mapping[str, object]) -> dict[str, object]:
    items = [{"type": "message", "role": role, "content": content} for role, content in request.messages]
    for index, phase in request.phases:
        items[index]["phase"] = phase
    instructions = {"instructions": request.instructions} if request.instructions else {}
    return {**parameters, **instructions, "input": items}


class _StreamReader:
    """Turns the bytes of one stream of server-sent events into pieces and, at the end, into a reply.

    Lines end at line feeds only: text may hold any other separator.
    """

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._is_needed = True
        self._half_character = ""
        self._pieces: list[str] = []
        self._final: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return self._final is not None

    def read(self, chunk: bytes) -> list[str]:
        """Take what arrived; return the pieces of text it completes.

        Fields other than the data, events that are announced as ones of no use here, and the end marker of older APIs
        carry nothing we need.
        """
        *lines, self._unfinished_line = (self._unfinished_line + chunk).split(b"\n")
        if len(self._unfinished_line) > _MAX_LINE_BYTES:
            raise OutputUnusable("the model's endpoint sends an endless line")
        pieces = []
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip() if self._is_needed else b""
                if data and data != b"[DONE]" and (piece := self._event(_json_object(data))):
                    pieces.append(piece)
            elif line.startswith(b"event:"):
                self._is_needed = line[6:].strip() not in _NOT_NEEDED
            elif not line.strip():
                self._is_needed = True
        self._pieces += pieces
        return pieces

    def _event(self, event: dict[str, Any]) -> str:
        """The text an event adds to the answer."""
        kind = event.get("type")
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            return self._piece(str(event.get("delta") or ""))
        if kind in _ENDINGS:
            # The event says how it ended; some endpoints leave that out of the object inside.
            self._final = {**_dict(event.get("response")), "status": _ENDINGS[kind]}
        elif kind == "error" or event.get("error"):
            raise _stream_error("the model broke off", _dict(event.get("error")) or event)
        return ""

    def _piece(self, delta: str) -> str:
        """The text of a delta. Half of a character that two deltas share waits for the other half."""
        text = self._half_character + delta
        self._half_character = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        return _encodable(text.removesuffix(self._half_character))

    def reply(self) -> ModelReply:
        if self._final is None:
            raise ModelUnavailable("the model's answer broke off before its end")
        if self._final["status"] == "failed":
            raise _stream_error("the model failed", _dict(self._final.get("error")))
        reply = _reply(self._final)
        # What was streamed is what the user saw; an endpoint may leave the text out of its last event.
        text = "".join(self._pieces) or reply.text
        return ModelReply(text, reply.problem, reply.input_tokens, reply.output_tokens, reply.phase)


_NOT_NEEDED: Final = frozenset(
    f"response.{name}".encode()
    for name in (
        *("created", "in_progress", "queued", "output_item.added", "output_item.done"),
        *("content_part.added", "content_part.done", "output_text.done", "refusal.done"),
    )
)
"""They repeat what is elsewhere, and the longest of them is the whole answer."""

_ENDINGS: Final[Mapping[object, str]] = {
    f"response.{ending}": ending for ending in ("completed", "incomplete", "failed")
}


def _reply(response: dict[str, Any]) -> ModelReply:
    messages = [item for item in _list(response.get("output")) if item.get("type") == "message"]
    parts = [part for message in messages for part in _list(message.get("content"))]
    text = "".join(str(part.get("text") or "") for part in parts if part.get("type") == "output_text")
    refusal = "".join(str(part.get("refusal") or "") for part in parts if part.get("type") == "refusal")
    usage = _dict(response.get("usage"))
    phase = messages[-1].get("phase") if messages else None
    return ModelReply(
        text=_encodable(text or refusal),
        problem=_problem(response, text, refusal),
        input_tokens=_count(usage, "input_tokens"),
        output_tokens=_count(usage, "output_tokens"),
        phase=phase if isinstance(phase, str) else None,
    )


def _problem(response: dict[str, Any], text: str, refusal: str) -> str:
    """Why a reply is not a complete text answer; "" if it is."""
    status = response.get("status", "completed")
    if status != "completed":
        details = _dict(response.get("incomplete_details")) or _dict(response.get("error"))
        return f"{_word(status)}: {_word(details.get('reason') or details.get('code'))}"
    if refusal and not text:
        return "refusal"
    if any(str(item.get("type")).endswith("_call") for item in _list(response.get("output"))):
        return "tool call"
    return ""


def _checked_length(reply: ModelReply, parameters: Mapping[str, object]) -> ModelReply:
    """Some endpoints say `completed` although the limit cut the text off."""
    most = parameters.get("max_output_tokens")
    if reply.problem or not isinstance(most, int) or (reply.output_tokens or 0) < most:
        return reply
    return ModelReply(reply.text, "incomplete: max_output_tokens", reply.input_tokens, reply.output_tokens, reply.phase)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = decode_json(data)
    except (ValueError, RecursionError):
        raise OutputUnusable("the model's endpoint does not answer in JSON: check OPENAI_BASE_URL") from None
    if not isinstance(value, dict):
        raise OutputUnusable("the model's endpoint does not answer with an object: check OPENAI_BASE_URL")
    return value


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _encodable(text: str) -> str:
    """Join the halves of characters that an endpoint has escaped apart; a lone half becomes U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _list(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _stream_error(what: str, error: Mapping[str, Any]) -> ModelError | ContextLengthExceeded:
    if error.get("code") in _TOO_LONG_CODES:
        return _too_long()
    return ModelUnavailable(f"{what} ({_word(error.get('code'))}): try again")


def _word(value: object) -> str:
    """A code as it may be shown. The provider's sentences may repeat keys and messages, so they are not passed on."""
    return value if isinstance(value, str) and _CODE.fullmatch(value) else "no reason given"


_CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@contextmanager
def _model_errors() -> Iterator[None]:
    """Turn whatever the client raises inside into a `ModelError`."""
    try:
        yield
    except openai.APIStatusError as error:
        raise _status_error(error) from error
    except (openai.APIError, httpx2.HTTPError, httpx2.StreamError, TimeoutError) as error:
        if _is_timeout(error):
            raise ModelTimeout("the model did not finish in time: try again, or raise the timeout") from error
        raise ModelUnavailable("the model's endpoint cannot be reached or broke off: check OPENAI_BASE_URL") from error


def _is_timeout(error: Exception) -> bool:
    """Whether the endpoint was too slow; the transport says that of a connection that was closed too early, too."""
    cause = error.__cause__ if isinstance(error, openai.APITimeoutError) else error
    return isinstance(cause, (TimeoutError, httpx2.TimeoutException)) and not isinstance(cause, httpx2.ConnectTimeout)


def _status_error(error: openai.APIStatusError) -> ModelError | ContextLengthExceeded:
    status, codes = error.status_code, (error.code, error.type)
    if status in (401, 403):
        return ModelDenied(f"the model's endpoint rejects the API key (status {status}): check OPENAI_API_KEY")
    if any(code in _TOO_LONG_CODES for code in codes):
        return _too_long()
    if status in (408, 409, 429) or status >= 500:
        what = "is asked too often" if status == 429 else "is out of order"
        return ModelUnavailable(
            f"the model's endpoint {what} (status {status}): try again later", retry_after=_retry_after(error)
        )
    hint = ": check MEMORA_MODEL and OPENAI_BASE_URL" if status == 404 else ""
    code = _word(error.code or error.type)
    return ModelRefused(f"the model's endpoint rejects the request (status {status}, {code}){hint}")


def _too_long() -> ContextLengthExceeded:
    return ContextLengthExceeded("the model says that the input is too long: lower MEMORA_MAX_INPUT_TOKENS")


_TOO_LONG_CODES: Final = ("context_length_exceeded", "exceed_context_size_error")


def _retry_after(error: openai.APIStatusError) -> float | None:
    try:
        return float(error.response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
