"""The model's wire: the real `openai` client against endpoints that behave, misbehave, and tear their bytes apart."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from memora.core.prompts import ModelRequest
from memora.core.tokens import request_tokens
from memora.errors import (
    ContextLengthExceeded,
    MemoraError,
    ModelDenied,
    ModelError,
    ModelRefused,
    ModelTimeout,
    ModelUnavailable,
    OutputUnusable,
    SettingsError,
)
from memora.llm import ModelClient, ModelReply
from memora.offline_model import OfflineModel

KEY = "sk-a-very-secret-key"
REQUEST = ModelRequest(
    "Be brief.", (("user", "I live in Taipei."), ("assistant", "Good."), ("user", "Where do I live?"))
)
Fault = dict[str, Any]


@pytest.fixture
async def client(offline: OfflineModel) -> AsyncIterator[ModelClient]:
    """A client that tries once."""
    async with client_of(offline.url) as opened:
        yield opened


@asynccontextmanager
async def client_of(url: str, *, retries: int = 0) -> AsyncIterator[ModelClient]:
    opened = ModelClient(api_key=KEY, base_url=url, max_retries=retries)
    try:
        yield opened
    finally:
        await opened.close()


async def stream(client: ModelClient, *, seconds: float = 5.0, **parameters: object) -> tuple[ModelReply, list[str]]:
    pieces: list[str] = []

    async def emit(piece: str) -> None:
        pieces.append(piece)

    reply = await client.stream(REQUEST, emit, model="m", timeout_seconds=seconds, parameters=parameters)
    return reply, pieces


async def complete(client: ModelClient, *, seconds: float = 5.0) -> ModelReply:
    return await client.complete(REQUEST, model="m", timeout_seconds=seconds)


def status(number: int, **more: Any) -> Fault:
    return {"kind": "status", "status": number, **more}


def error_body(code: object = None, kind: str = "some_error") -> dict[str, Any]:
    return {"error": {"message": f"no: {KEY} I live in Taipei.", "type": kind, "param": None, "code": code}}


class TestErrors:
    @pytest.mark.parametrize(
        "case",
        [
            (status(500), ModelUnavailable, True),
            (status(503), ModelUnavailable, True),
            (status(429), ModelUnavailable, True),
            (status(408), ModelUnavailable, True),
            (status(409), ModelUnavailable, True),
            (status(401), ModelDenied, False),
            (status(403), ModelDenied, False),
            (status(400), ModelRefused, False),
            (status(404), ModelRefused, False),
            (status(422), ModelRefused, False),
            (status(400, code="context_length_exceeded"), ContextLengthExceeded, False),
            (status(400, body=error_body(400, "exceed_context_size_error")), ContextLengthExceeded, False),
            (status(400, body=error_body("<script>" * 50)), ModelRefused, False),
            (status(500, body="<html>no</html>"), ModelUnavailable, True),
            (status(500, body=["odd"]), ModelUnavailable, True),
            ({"kind": "reset"}, ModelUnavailable, True),
            ({"kind": "close"}, ModelUnavailable, True),
            ({"kind": "hang"}, ModelTimeout, True),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("call", [stream, complete])
    async def test_each_failure_becomes_the_error_that_says_whose_fault_it_is(
        self,
        client: ModelClient,
        offline: OfflineModel,
        case: tuple[Fault, type[MemoraError], bool],
        call: Callable[..., Awaitable[object]],
    ) -> None:
        """Both ways of calling map alike, in bounded time, and no message repeats the key or what the provider said."""
        fault, error, retryable = case
        offline.add_fault(fault)
        started = time.monotonic()
        with pytest.raises(error) as raised:
            await call(client, seconds=0.3)
        assert time.monotonic() - started < 3
        assert raised.value.retryable is retryable
        for secret in (KEY, "Taipei", "script"):
            assert secret not in str(raised.value)

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            ({"kind": "cut"}, ModelUnavailable),
            ({"kind": "failed"}, ModelUnavailable),
            ({"kind": "error_event"}, ModelUnavailable),
            ({"kind": "no_terminal"}, ModelUnavailable),
            ({"kind": "garbage"}, ModelUnavailable),
            ({"kind": "html"}, ModelUnavailable),
            ({"kind": "truncated_json"}, OutputUnusable),
            ({"kind": "drip", "seconds": 30}, ModelTimeout),
        ],
        ids=str,
    )
    async def test_a_stream_without_a_whole_answer_is_an_error(
        self, client: ModelClient, offline: OfflineModel, fault: Fault, error: type[ModelError]
    ) -> None:
        """What was streamed until then is never taken for an answer."""
        offline.add_fault(fault)
        with pytest.raises(error):
            await stream(client, seconds=0.5)

    @pytest.mark.parametrize(
        ("fault", "problem"),
        [
            ({"kind": "failed"}, "failed: server_error"),
            ({"kind": "no_terminal"}, "in_progress: no reason given"),
            ({"kind": "incomplete"}, "incomplete: max_output_tokens"),
            ({"kind": "incomplete", "reason": "content_filter"}, "incomplete: content_filter"),
            ({"kind": "refusal"}, "refusal"),
            ({"kind": "tool_call"}, "tool call"),
        ],
        ids=str,
    )
    async def test_a_plain_reply_that_is_no_answer_says_why_and_what_it_cost(
        self, client: ModelClient, offline: OfflineModel, fault: Fault, problem: str
    ) -> None:
        """A summary call that came to nothing has been paid for, so it is a value and not an error."""
        offline.add_fault(fault)
        assert (await complete(client)).problem == problem

    @pytest.mark.parametrize("fault", [{"kind": "garbage"}, {"kind": "html"}, status(200, body=[1])], ids=str)
    async def test_a_plain_reply_in_another_language_than_json_is_unusable(
        self, client: ModelClient, offline: OfflineModel, fault: Fault
    ) -> None:
        """A captive portal or a wrong base URL is named as such."""
        offline.add_fault(fault)
        with pytest.raises(OutputUnusable, match="OPENAI_BASE_URL"):
            await complete(client)

    @pytest.mark.parametrize("fault", [{"kind": "truncated_json"}, {"kind": "cut"}], ids=str)
    async def test_half_a_plain_reply_is_no_reply(
        self, client: ModelClient, offline: OfflineModel, fault: Fault
    ) -> None:
        """Whether the connection or the JSON ends early: an error, never half of the text."""
        offline.add_fault(fault)
        with pytest.raises((ModelUnavailable, OutputUnusable)):
            await complete(client)

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"output": None, "usage": None},
            {"output": "text", "usage": []},
            {"output": [None, 1, {"type": "message", "content": None}], "usage": {"input_tokens": None}},
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": None}]}]},
            {"status": "incomplete", "incomplete_details": "no"},
            {"status": 7, "error": "no"},
            {"status": "failed", "error": {"code": {"a": 1}}},
        ],
        ids=str,
    )
    async def test_a_reply_of_odd_shape_has_no_text_and_does_not_crash(
        self, client: ModelClient, offline: OfflineModel, body: dict[str, Any]
    ) -> None:
        """Servers leave fields out, or fill them with something else."""
        offline.add_fault(status(200, body=body))
        reply = await complete(client)
        assert (reply.text, reply.input_tokens, reply.output_tokens) == ("", None, None)

    async def test_nobody_listening_is_said_quickly(self) -> None:
        """A refused connection is an endpoint that cannot be reached, not a timeout."""
        async with client_of("http://127.0.0.1:9/v1") as client:
            with pytest.raises(ModelUnavailable, match="OPENAI_BASE_URL"):
                await stream(client)

    @pytest.mark.parametrize("key", ["sk-ключ", "sk-a\nb", "sk-\x7f"])
    def test_a_key_that_cannot_be_sent_is_a_wrong_setting(self, key: str) -> None:
        """It is found before the first request, and not shown."""
        with pytest.raises(SettingsError) as raised:
            ModelClient(api_key=key, base_url="http://127.0.0.1:9/v1")
        assert key not in str(raised.value)
        assert "OPENAI_API_KEY" in str(raised.value)

    async def test_a_key_with_the_line_end_of_its_file_works(self, offline: OfflineModel) -> None:
        """`OPENAI_API_KEY=$(cat key)` done wrong is still the key."""
        client = ModelClient(api_key=f" {KEY}\n", base_url=offline.url)
        await complete(client)
        await client.close()
        assert offline.requests()[0]["headers"]["authorization"].endswith(KEY[-4:])


class TestRetries:
    async def test_two_refusals_for_being_too_quick_are_outlived(self, offline: OfflineModel) -> None:
        """429 twice, then an answer: the client's own retries, after the wait the provider asks for."""
        offline.add_fault(status(429, headers={"retry-after-ms": "20"}), times=2)
        async with client_of(offline.url, retries=2) as client:
            reply, _ = await stream(client)
        assert "Taipei" in reply.text
        assert [record["headers"]["x-stainless-retry-count"] for record in offline.requests()] == ["0", "1", "2"]

    async def test_the_deadline_covers_all_tries_together(self, offline: OfflineModel) -> None:
        """An endpoint that hangs at each try does not get the time once for each."""
        offline.add_fault({"kind": "hang"})
        async with client_of(offline.url, retries=2) as client:
            started = time.monotonic()
            with pytest.raises(ModelTimeout):
                await complete(client, seconds=0.4)
            assert time.monotonic() - started < 1.0

    @pytest.mark.parametrize(("header", "seconds"), [("200", 200.0), ("soon", None), ("", None)])
    async def test_how_long_the_provider_wants_us_to_wait_is_passed_on(
        self, client: ModelClient, offline: OfflineModel, header: str, seconds: float | None
    ) -> None:
        """A Retry-After too long for the client's own retries reaches whoever decides about the next try."""
        offline.add_fault(status(429, headers={"retry-after": header}))
        with pytest.raises(ModelUnavailable) as raised:
            await complete(client)
        assert raised.value.retry_after == seconds

    async def test_a_stream_that_began_is_never_asked_for_again(self, offline: OfflineModel) -> None:
        """Half an answer that was shown is not followed by another beginning."""
        offline.add_fault({"kind": "cut"})
        async with client_of(offline.url, retries=2) as client:
            with pytest.raises(ModelUnavailable):
                await stream(client)
        assert len(offline.requests()) == 1


class TestRequests:
    async def test_calls_are_stateless_and_never_stored(self, client: ModelClient, offline: OfflineModel) -> None:
        """`store: false`, typed messages, and nothing that would tie a call to one before it."""
        await stream(client, temperature=0.2)
        await complete(client)
        streamed, plain = (record["body"] for record in offline.requests())
        assert streamed == {
            "model": "m",
            "stream": True,
            "store": False,
            "temperature": 0.2,
            "instructions": "Be brief.",
            "input": [{"type": "message", "role": role, "content": text} for role, text in REQUEST.messages],
        }
        assert plain == {key: value for key, value in streamed.items() if key not in ("stream", "temperature")}

    async def test_usage_is_the_providers_and_none_where_it_says_nothing(
        self, client: ModelClient, offline: OfflineModel
    ) -> None:
        """Whoever counts instead can tell the difference."""
        reply, _ = await stream(client)
        assert reply.input_tokens == request_tokens(REQUEST.instructions, REQUEST.messages)
        offline.add_fault({"kind": "no_usage"})
        reply, _ = await stream(client)
        assert (reply.input_tokens, reply.output_tokens) == (None, None)
        assert reply.problem == ""

    async def test_an_answer_as_long_as_was_allowed_counts_as_cut_off(
        self, client: ModelClient, offline: OfflineModel
    ) -> None:
        """llama.cpp says `completed` although the limit ended the text."""
        offline.add_fault({"kind": "silent_cut"})
        reply, _ = await stream(client, max_output_tokens=50)
        assert reply.problem == "incomplete: max_output_tokens"


class TestCounting:
    async def test_the_endpoint_counts(self, client: ModelClient, offline: OfflineModel) -> None:
        """The count is of the same request, and nothing is generated for it."""
        counted = await client.count_input_tokens(REQUEST, model="m")
        assert counted == request_tokens(REQUEST.instructions, REQUEST.messages)
        assert [record["kind"] for record in offline.requests()] == ["count"]

    @pytest.mark.parametrize("fault", [status(404), status(400), {"kind": "html"}, status(200, body={})], ids=str)
    async def test_one_that_cannot_is_asked_once(
        self, client: ModelClient, offline: OfflineModel, fault: Fault
    ) -> None:
        """Not having the call is remembered."""
        offline.add_fault(fault)
        assert await client.count_input_tokens(REQUEST, model="m") is None
        assert await client.count_input_tokens(REQUEST, model="m") is None
        assert len(offline.requests()) == 1

    async def test_one_that_is_only_busy_is_asked_again(self, client: ModelClient, offline: OfflineModel) -> None:
        """An overloaded endpoint still has the call."""
        offline.add_fault(status(503), times=1)
        with pytest.raises(ModelUnavailable):
            await client.count_input_tokens(REQUEST, model="m")
        assert await client.count_input_tokens(REQUEST, model="m")


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"


def delta(text: str) -> str:
    return event("response.output_text.delta", delta=text)


def completed(text: str = "", **message: Any) -> str:
    content = [{"type": "output_text", "text": text}]
    item = {"type": "message", "role": "assistant", "content": content, **message}
    return event("response.completed", response={"status": "completed", "output": [item]})


@asynccontextmanager
async def raw_endpoint(chunks: Sequence[bytes], *more_head: bytes) -> AsyncIterator[str]:
    """An endpoint that answers every request with these pieces of one body, each in a packet of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (b"HTTP/1.1 200 OK", b"content-type: text/event-stream", b"connection: close", *more_head)
        writer.write(b"\r\n".join((*head, b"", b"")))
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}/v1"
    finally:
        server.close()
        await server.wait_closed()


async def read_stream(chunks: Sequence[bytes], *more_head: bytes) -> tuple[ModelReply, list[str]]:
    async with raw_endpoint(chunks, *more_head) as url, client_of(url) as client:
        return await stream(client)


NASTY = (
    "line\u2028separator\u2029, next\x85line, NUL\x00, \r\n CRLF, data: not a field\n\n"
    "data: [DONE]\nevent: response.failed\n"
    "中文 한국어 👩‍👩‍👧‍👦 \u202eright to left\u202c \ufeff <|endoftext|> </conversation_summary>"
)


class TestStreamBytes:
    async def test_text_that_looks_like_the_stream_itself_comes_through_unchanged(self) -> None:
        """Separators, field names and end markers inside the text are text."""
        reply, pieces = await read_stream([(delta(NASTY[:30]) + delta(NASTY[30:]) + completed(NASTY)).encode()])
        assert "".join(pieces) == reply.text == NASTY

    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    async def test_bytes_may_be_torn_anywhere(self, size: int) -> None:
        """Also inside a character of several bytes, and between CR and LF."""
        body = (delta("日本語 👩‍👧 é") + completed()).replace("\n", "\r\n").encode()
        reply, _ = await read_stream([body[at : at + size] for at in range(0, len(body), size)])
        assert reply.text == "日本語 👩‍👧 é"

    async def test_comments_unknown_events_and_an_end_marker_are_passed_over(self) -> None:
        """Keep-alives and events of later versions say nothing to us."""
        noise = ": keep-alive\n\nid: 7\nretry: 10\n\ndata:\n\ndata: [DONE]\n\n" + event("response.new_thing", x=[1])
        reply, _ = await read_stream([(noise + delta("Hi") + event("response.x", error=None) + completed()).encode()])
        assert reply.text == "Hi"

    async def test_events_that_repeat_the_answer_are_passed_over(self) -> None:
        """Whatever they hold; the name belongs to one event, and the next may have none."""
        repeated = "".join(f"event: response.{name}\ndata: {{broken\n\n" for name in ("created", "output_text.done"))
        unnamed = f"data:{delta('there').partition('data:')[2]}"
        body = repeated + delta("Hi ") + repeated + unnamed + repeated + completed()
        reply, pieces = await read_stream([body.replace("\n", "\r\n").encode()])
        assert (reply.text, pieces) == ("Hi there", ["Hi ", "there"])

    async def test_what_breaks_behind_the_last_event_loses_nothing(self) -> None:
        """The answer is whole, though the connection ends before the body does."""
        reply, _ = await read_stream([(delta("Hi") + completed()).encode()], b"content-length: 100000")
        assert reply.text == "Hi"

    async def test_a_packed_stream_is_unpacked(self) -> None:
        """A proxy may pack what nobody asked it to."""
        packed = gzip.compress((delta("日本語 ") * 50 + completed()).encode())
        chunks = [packed[at : at + 20] for at in range(0, len(packed), 20)]
        reply, _ = await read_stream(chunks, b"content-encoding: gzip")
        assert reply.text == "日本語 " * 50

    async def test_halves_of_a_character_in_two_deltas_are_joined(self) -> None:
        """An endpoint that escapes by UTF-16 units may cut an emoji in two; a lone half becomes U+FFFD."""
        body = "".join(
            f'data: {{"type":"response.output_text.delta","delta":"{text}"}}\n\n'
            for text in ("a\\ud83d", "\\ude00b", "\\ude00", "c\\ud83d", "d", "\\ud83d")
        )
        reply, pieces = await read_stream([(body + completed()).encode()])
        assert reply.text == "a😀b\ufffdc\ufffdd"
        assert "".join(pieces) == reply.text
        assert reply.text.encode()

    async def test_text_only_in_the_last_event_is_the_answer(self) -> None:
        """An endpoint that streams nothing before its end has answered all the same."""
        reply, pieces = await read_stream([completed("All at once.").encode()])
        assert reply.text == "All at once."
        assert pieces == []

    async def test_what_was_shown_counts_when_the_last_event_says_something_else(self) -> None:
        """The stored answer is the one the user saw."""
        reply, pieces = await read_stream([(delta("seen") + completed("rewritten")).encode()])
        assert reply.text == "seen" == "".join(pieces)

    async def test_the_phase_is_handed_on(self) -> None:
        """It has to go back with the message."""
        reply, _ = await read_stream([(delta("Hi") + completed("Hi", phase="final_answer")).encode()])
        assert reply.phase == "final_answer"

    @pytest.mark.parametrize(
        ("ending", "error"),
        [
            (event("response.failed", response={}), ModelUnavailable),
            (event("response.failed", response="broken"), ModelUnavailable),
            (
                event("response.failed", response={"error": {"code": "context_length_exceeded", "message": KEY}}),
                ContextLengthExceeded,
            ),
            (event("error", code="context_length_exceeded", message=KEY), ContextLengthExceeded),
            (event("error", code="x y " + KEY, message=KEY), ModelUnavailable),
            (event("anything", error={"message": f"Incorrect API key {KEY}", "code": None}), ModelUnavailable),
            ("data: {\n\n", OutputUnusable),
            ("data: [1]\n\n", OutputUnusable),
            ("data: " + "[" * 100_000 + "\n\n", OutputUnusable),
            ("", ModelUnavailable),
        ],
        ids=lambda value: str(value)[:40],
    )
    async def test_an_ending_that_is_none_is_an_error_without_the_providers_words(
        self, ending: str, error: type[MemoraError]
    ) -> None:
        """However the failure is written down, half an answer is not stored and nothing secret is repeated."""
        with pytest.raises(error) as raised:
            await read_stream([(delta("half an ans") + ending).encode()])
        assert KEY not in str(raised.value)

    async def test_an_incomplete_end_is_known_by_its_event(self) -> None:
        """Some endpoints leave the status out of the object inside."""
        reply, _ = await read_stream([(delta("half") + event("response.incomplete", response={})).encode()])
        assert reply.problem == "incomplete: no reason given"
