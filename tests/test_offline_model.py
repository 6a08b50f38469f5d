"""The offline model's endpoint, as the real `openai` client and bare sockets see it.

What the sentences say is `extractive`'s matter and tested there; here it only has to arrive whole.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from judging import offline_process
from openai import AsyncOpenAI

from memora.core import prompts
from memora.core.conversation import Role
from memora.core.text import count_words
from memora.core.tokens import count_text_tokens, fits_in_tokens, request_tokens
from memora.offline_model import OfflineModel
from memora.offline_model.errors import Rejected
from memora.offline_model.extractive import Utterance, answer, shorten, summarise
from memora.offline_model.faults import KINDS, garbage
from memora.offline_model.reply import pieces_of
from memora.offline_model.script import MAX_RECORDS, Script
from memora.offline_model.wire import MAX_BODY_BYTES, HttpRequest

DEADLINE_SECONDS = 20.0
KEY = "sk-secret-5678"
LIMITS: dict[str, Any] = {
    "max_words": 60,
    "max_tokens": 120,
    "count_tokens": count_text_tokens,
    "count_words": count_words,
}
TALK: list[tuple[Role, str]] = [
    ("user", "I live in Taipei and I take the TOEIC next month."),
    ("assistant", "Good luck with it!"),
]
SUMMARY = "The user lives in Taipei. The user takes the TOEIC next month."
QUESTION = "When do I take the TOEIC?"


@pytest.fixture
async def model() -> AsyncIterator[OfflineModel]:
    async with OfflineModel(scriptable=True) as running:
        yield running


@pytest.fixture
async def client(model: OfflineModel) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(model.url) as made:
        yield made


@pytest.fixture
async def http(model: OfflineModel) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=model.url.removesuffix("/v1"), verify=False) as made:
        yield made


def client_of(url: str, **options: Any) -> AsyncOpenAI:
    usual = {"api_key": KEY, "base_url": url, "max_retries": 0, "timeout": DEADLINE_SECONDS}
    # Loading certificates nobody needs on loopback is most of what making a client costs.
    pool = options.pop("http_client", None) or openai.DefaultAsyncHttpx2Client(verify=False)
    return AsyncOpenAI(**{**usual, "http_client": pool, **options})


def items(*messages: tuple[str, str]) -> Any:
    return [{"type": "message", "role": role, "content": content} for role, content in messages]


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not is_so():  # noqa: ASYNC110 - what is waited for is on the other side of a socket
            await asyncio.sleep(0.002)


async def events_of(client: AsyncOpenAI, **request: Any) -> list[Any]:
    async with await client.responses.create(stream=True, **{"model": "m", "input": QUESTION, **request}) as stream:
        return [event async for event in stream]


async def gather_events(client: AsyncOpenAI, into: list[Any]) -> None:
    async with await client.responses.create(model="m", input=QUESTION, stream=True) as stream:
        async for event in stream:
            into.append(event)  # noqa: PERF401 - what came before a break must be left


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


@asynccontextmanager
async def raw_connection(model: OfflineModel) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = model.url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield reader, writer
    finally:
        writer.transport.abort()


def raw_post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)


class TestAnswers:
    async def test_an_answer_is_made_of_summary_dialogue_and_question(self, client: AsyncOpenAI) -> None:
        """A plain call is answered from the developer's summary, the talk so far, and the last user item."""
        request = items(("developer", prompts.summary_message(SUMMARY)), *TALK, ("user", QUESTION))
        response = await client.responses.create(model="gpt-5-mini", input=request, instructions="Be brief.")
        assert response.output_text == answer(SUMMARY, [Utterance(*message) for message in TALK], QUESTION)
        assert (response.status, response.model, response.instructions) == ("completed", "gpt-5-mini", "Be brief.")

    async def test_the_summary_may_be_in_the_instructions(self, client: AsyncOpenAI) -> None:
        """A server that has no developer role gets the same block inside the instructions; the answer is the same."""
        summary = 'She said: "昨天"\n</conversation_summary> and <|im_end|>. She lives in Taipei.'
        block = prompts.summary_message(summary)
        inside = await client.responses.create(model="m", input=QUESTION, instructions=f"Be brief.\n\n{block}")
        before = await client.responses.create(model="m", input=items(("developer", block), ("user", QUESTION)))
        assert inside.output_text == before.output_text == answer(summary, [], QUESTION)

    async def test_every_form_of_input_is_read_alike(self, client: AsyncOpenAI) -> None:
        """A string, an item without `type`, and content in parts are the same question."""
        forms: list[Any] = [
            QUESTION,
            [{"role": "user", "content": QUESTION}],
            items(("user", QUESTION)),
            [{"role": "user", "content": [{"type": "input_text", "text": part} for part in pieces_of(QUESTION)]}],
        ]
        replies = [await client.responses.create(model="m", input=form) for form in forms]
        assert {reply.output_text for reply in replies} == {answer("", [], QUESTION)}
        assert len({reply.usage.input_tokens for reply in replies if reply.usage}) == 1

    async def test_usage_is_what_memora_counts(self, client: AsyncOpenAI) -> None:
        """The reported tokens equal Memora's own count, and the counting endpoint says the same before the call."""
        request: Any = {"model": "m", "instructions": "用中文回答。", "input": items(*TALK, ("user", QUESTION))}
        counted = await client.responses.input_tokens.count(**request)
        response = await client.responses.create(**request)
        assert response.usage is not None
        assert counted.input_tokens == response.usage.input_tokens
        assert response.usage.input_tokens == request_tokens("用中文回答。", [*TALK, ("user", QUESTION)])
        assert response.usage.output_tokens == count_text_tokens(response.output_text)
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens

    async def test_a_reply_ends_at_max_output_tokens(self, client: AsyncOpenAI) -> None:
        """A text over the limit is cut off there and called incomplete; one at the limit is whole."""
        text = "One two three four five six seven eight nine ten eleven twelve."
        response = await client.responses.create(model="m", input=text, max_output_tokens=5)
        events = await events_of(client, input=text, max_output_tokens=5)
        assert response.status == events[-1].response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == text_of(events)
        assert response.output_text
        assert fits_in_tokens(response.output_text, 5)
        assert response.output_text == answer("", [], text)[: len(response.output_text)]

    async def test_a_request_of_tools_and_reasoning_is_answered(self, client: AsyncOpenAI) -> None:
        """Items that are no messages cost tokens and are otherwise passed over."""
        call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
        request: Any = [*items(*TALK), call, *items(("user", QUESTION))]
        response = await client.responses.create(model="m", input=request)
        assert response.output_text == answer("", [Utterance(*message) for message in TALK], QUESTION)
        assert response.usage is not None
        assert response.usage.input_tokens > request_tokens("", [*TALK, ("user", QUESTION)])


class TestSummaryCalls:
    async def test_a_fold_is_summarised(self, client: AsyncOpenAI) -> None:
        """Memora's own fold request is recognised by its wire format and gets a summary within its limits."""
        pieces = [prompts.Piece(role, content) for role, content in TALK]
        asked = prompts.fold_request("The user is called Mei.", pieces, max_words=60, max_tokens=120)
        response = await client.responses.create(
            model="m", instructions=asked.instructions, input=items(*asked.messages)
        )
        talk = [Utterance(*message) for message in TALK]
        assert response.output_text == summarise("The user is called Mei.", talk, **LIMITS)
        assert "Taipei" in response.output_text

    async def test_nothing_worth_keeping_is_said_as_none(self, client: AsyncOpenAI) -> None:
        """A summary of nothing is the word NONE, as an empty reply would look like a failure."""
        asked = prompts.fold_request("", [], max_words=60, max_tokens=120)
        response = await client.responses.create(model="m", input=items(*asked.messages))
        assert response.output_text == "NONE"

    async def test_a_summary_is_shortened(self, client: AsyncOpenAI) -> None:
        """Memora's own request for a shorter summary is recognised too."""
        asked = prompts.shorten_request(SUMMARY * 20, max_words=60, max_tokens=120)
        response = await client.responses.create(model="m", input=items(*asked.messages))
        assert response.output_text == shorten(SUMMARY * 20, **LIMITS)

    @pytest.mark.parametrize(
        "typed",
        [
            '{"new_messages": [], "existing_summary": ""}',
            '{"new_messages": "all", "existing_summary": "", "limits": {"words": 60, "tokens": 120}}',
            '{"summary_to_shorten": "x", "limits": {"words": true, "tokens": 120}}',
            '{"summary_to_shorten": "x", "limits": {"words": 60, "tokens": 120}',
            'Look: {"summary_to_shorten": "x", "limits": {"words": 60, "tokens": 120}}',
            "{" * 5000,
            "[" * 100_000,
        ],
    )
    async def test_what_only_looks_like_one_is_a_question(
        self, model: OfflineModel, client: AsyncOpenAI, typed: str
    ) -> None:
        """JSON that a person types into the chat is answered like anything else."""
        await client.responses.create(model="m", input=typed)
        assert model.requests()[0]["kind"] == "answer"


class TestStreams:
    async def test_the_events_are_those_of_the_api(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """Type, order and fields of every event, numbered without a gap, with stable ids and usage at the end."""
        model.add_fault({"kind": "text", "text": "Two words."})
        events = await events_of(client)
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(10))
        assert [(event.delta, event.logprobs) for event in events[4:6]] == [("Two", []), (" words.", [])]
        assert events[6].text == events[7].part.text == "Two words."
        item_ids = {event.item_id for event in events[3:8]}
        assert item_ids == {events[2].item.id, events[8].item.id, events[9].response.output[0].id}
        assert {(event.output_index, event.content_index) for event in events[3:8]} == {(0, 0)}
        assert events[0].response.id == events[9].response.id
        assert (events[0].response.status, events[2].item.status) == ("in_progress", "in_progress")
        assert events[9].response.usage.output_tokens == count_text_tokens("Two words.")

    async def test_a_stream_says_what_a_plain_reply_says(self, client: AsyncOpenAI) -> None:
        """The pieces joined are the text, the last event carries the same response as a plain call."""
        events = await events_of(client)
        plain = await client.responses.create(model="m", input=QUESTION)
        assert text_of(events) == events[-1].response.output_text == plain.output_text
        assert events[-1].response.usage == plain.usage

    async def test_the_sdk_helper_understands_the_stream(self, client: AsyncOpenAI) -> None:
        """`responses.stream()`, which insists on ids and indexes, gathers the final response."""
        async with client.responses.stream(model="m", input=QUESTION) as stream:
            final = await stream.get_final_response()
        assert final.output_text == answer("", [], QUESTION)

    async def test_pieces_come_as_they_are_made(self) -> None:
        """With a delay for each piece the first text is there long before the last."""
        async with OfflineModel(scriptable=True, piece_delay_seconds=0.05) as model, client_of(model.url) as client:
            model.add_fault({"kind": "text", "text": "one two three four"})
            async with await client.responses.create(model="m", input="x", stream=True) as stream:
                times = [(event.type, time.monotonic()) async for event in stream]
        pieces = [at for kind, at in times if kind == "response.output_text.delta"]
        assert pieces[-1] - pieces[0] >= 0.14

    async def test_two_hundred_streams_at_once(self, model: OfflineModel) -> None:
        """Two hundred conversations stream at the same time, each gets its own answer."""
        gate = model.hold()
        limits = httpx2.Limits(max_connections=None)
        pool = httpx2.AsyncClient(limits=limits, verify=False)
        async with client_of(model.url, http_client=pool) as client:
            talks = [asyncio.create_task(events_of(client, input=f"My number is {n}.")) for n in range(200)]
            await eventually(lambda: model.state()["waiting"] == 200)
            model.release(gate)
            streams = await asyncio.gather(*talks)
        assert [text_of(events) for events in streams] == [answer("", [], f"My number is {n}.") for n in range(200)]
        assert all(events[-1].type == "response.completed" for events in streams)
        await eventually(lambda: model.state() == {"waiting": 0, "in_flight": 0})


class TestShapes:
    async def test_everything_passes_strict_validation(self, model: OfflineModel) -> None:
        """The SDK's strict mode, which checks every field, accepts every kind of reply."""
        async with client_of(model.url, _strict_response_validation=True) as client:
            await client.models.list()
            await client.responses.input_tokens.count(input=QUESTION)
            for kind in ("text", "refusal", "incomplete", "failed", "tool_call", "no_terminal"):
                model.clear_faults()
                model.add_fault({"kind": kind})
                await client.responses.create(
                    model="m", input=QUESTION, instructions="x", temperature=0.1, max_output_tokens=99
                )
                await events_of(client, metadata={"a": "b"}, store=False)

    async def test_models(self, client: AsyncOpenAI) -> None:
        """The list says honestly what this is; a model of any name is there when asked for."""
        listed = [(model.id, model.owned_by) async for model in client.models.list()]
        assert listed == [("memora-offline", "memora")]
        for name in ("gpt-5-mini", "org/some model:latest"):
            assert (await client.models.retrieve(name)).id == name

    @pytest.mark.parametrize("key", ["anything", "sk-2"])
    async def test_any_key_is_accepted(self, model: OfflineModel, key: str) -> None:
        """No key is wrong, unless a fault says so."""
        async with client_of(model.url, api_key=key) as client:
            assert (await client.responses.create(model="m", input=QUESTION)).output_text

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"model": "m"}, "input"),
            ({"input": []}, "input"),
            ({"input": ""}, "input"),
            ({"input": 3}, "input"),
            ({"input": [3]}, "input"),
            ({"input": [{"role": "owner", "content": "x"}]}, "input"),
            ({"input": [{"role": "user"}]}, "input"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
            ({"input": [{"role": ["user"], "content": "x"}]}, "input"),
            ({"input": "x", "conversation": "conv_1"}, "conversation"),
            ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": "x", "stream": "yes"}, "stream"),
            ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
            ({"input": "x", "instructions": ["y"]}, "instructions"),
            ({"input": "x", "metadata": {"a": 1}}, "metadata"),
        ],
    )
    async def test_a_wrong_request_is_a_400_that_names_the_parameter(
        self, http: httpx2.AsyncClient, body: dict[str, Any], param: str
    ) -> None:
        """What the API would not take, and what needs state, is refused in OpenAI's words."""
        reply = await http.post("/v1/responses", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.headers["x-request-id"].startswith("req_")

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b'{"input": NaN}',
            b'{"input": "\xff"}',
            b'{"input": "\\ud83d"}',
            b'{"input": "\xed\xa0\xbd"}',
            b"[" * 100_000,
            b'{"input": ' + b"9" * 10_000 + b"}",
        ],
    )
    async def test_a_body_that_is_no_json_is_a_400(self, http: httpx2.AsyncClient, body: bytes) -> None:
        """Broken JSON, broken Unicode and absurd nesting are refused, and the next request is served."""
        assert (await http.post("/v1/responses", content=body)).status_code == 400
        assert (await http.post("/v1/responses", json={"input": "x"})).status_code == 200

    async def test_unknown_paths_and_methods(self, http: httpx2.AsyncClient) -> None:
        """A path that is not there is a 404, a method that is not is a 405 that names the right one."""
        for path in ("/", "/v1", "/v1/chat/completions", "/v1/responses/resp_1", "/_control/unknown"):
            reply = await http.post(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
        reply = await http.get("/v1/responses")
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
        assert (await http.head("/v1/models")).status_code == 405

    async def test_a_body_too_large_is_a_413(self, http: httpx2.AsyncClient) -> None:
        """A body over the limit is refused with a reply the client can read, announced or not."""

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY_BYTES // 65536 + 1):
                yield b" " * 65536

        announced = await http.post("/v1/responses", content=b" " * (MAX_BODY_BYTES + 1))
        chunked = await http.post("/v1/responses", content=chunks())
        assert (announced.status_code, chunked.status_code) == (413, 413)
        assert announced.json()["error"]["code"] == "request_too_large"

    async def test_what_is_no_http_is_a_400(self, model: OfflineModel) -> None:
        """Bytes of another protocol and endless headers get a reply and a closed connection."""
        for sent in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000):
            async with raw_connection(model) as (reader, writer):
                writer.write(sent)
                assert (await reader.read()).split()[1] in {b"400", b"431"}

    async def test_a_connection_serves_many_requests(self, model: OfflineModel) -> None:
        """Keep-alive, pipelining and `expect: 100-continue` work."""
        async with raw_connection(model) as (reader, writer):
            request = raw_post({"input": "Hello."})
            writer.write(request * 3 + request.replace(b"host: x", b"host: x\r\nexpect: 100-continue"))
            writer.write(request.replace(b"host: x", b"host: x\r\nconnection: close"))
            replies = await reader.read()
        assert replies.count(b"HTTP/1.1 200") == 5


def plain_view(response: Any) -> str:
    """What is left of a plain reply after the SDK: its status and text, or that it is none."""
    if not isinstance(response, openai.types.responses.Response):
        return "no response"
    return f"{response.status}: {response.output_text}"


def stream_view(events: list[Any]) -> str:
    """The last event of a stream and the text before it."""
    return f"{events[-1].type}: {text_of(events)}" if events else "no event"


async def view_of(call: Any, view: Callable[[Any], str]) -> str:
    try:
        return view(await call)
    except (openai.APIError, ValueError) as error:
        return type(error).__name__


SEEN = {
    "status": ("InternalServerError", "InternalServerError"),
    "reset": ("APIConnectionError", "APIConnectionError"),
    "close": ("APIConnectionError", "APIConnectionError"),
    "cut": ("APIConnectionError", "APIConnectionError"),
    "hang": ("APITimeoutError", "APITimeoutError"),
    "drip": ("completed: {text}", "response.completed: {text}"),
    "garbage": ("UnicodeDecodeError", "UnicodeDecodeError"),
    "truncated_json": ("JSONDecodeError", "JSONDecodeError"),
    "html": ("no response", "no event"),
    "wrong_usage": ("completed: {text}", "response.completed: {text}"),
    "empty": ("completed: ", "response.completed: "),
    "whitespace": ("completed:  \n\t \n", "response.completed:  \n\t \n"),
    "refusal": ("completed: ", "response.completed: "),
    "incomplete": ("incomplete: {half}", "response.incomplete: {half}"),
    "silent_cut": ("completed: {half}", "response.completed: {half}"),
    "failed": ("failed: ", "response.failed: {half_of_pieces}"),
    "error_event": ("InternalServerError", "error: {half_of_pieces}"),
    "no_terminal": ("in_progress: {text}", "response.output_item.done: {text}"),
    "no_usage": ("completed: {text}", "response.completed: {text}"),
    "tool_call": ("completed: ", "response.completed: "),
    "text": ("completed: Exactly.", "response.completed: Exactly."),
    "too_long": ("completed: {text} {text}", "response.completed: {text} {text}"),
    "reasoning": ("completed: {think}{text}", "response.completed: {think}{text}"),
    "echo": ("completed: You are kind.\n# Rules\n{question}", "response.completed: You are kind.\n# Rules\n{question}"),
}
"""What the SDK makes of every fault, in a plain reply and in a stream."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "drip": {"seconds": 0.05},
    "text": {"text": "Exactly."},
    "too_long": {"times": 2},
}


class TestFaults:
    def test_the_table_is_complete(self) -> None:
        """Every fault there is stands in the table of what is seen."""
        assert SEEN.keys() == KINDS.keys()

    @pytest.mark.parametrize("kind", SEEN)
    async def test_what_the_client_sees(self, model: OfflineModel, kind: str) -> None:
        """Each fault, plain and streamed, shows itself to the SDK as the table says; then all is well again."""
        model.add_fault({"kind": kind, **PARAMETERS.get(kind, {})}, times=2)
        text = answer("", [], QUESTION)
        pieces = pieces_of(text)
        words = {
            "text": text,
            "half": text[: (len(text) + 1) // 2],
            "half_of_pieces": "".join(pieces[: (len(pieces) + 1) // 2]),
            "question": QUESTION,
            "think": "<think>\nThe user wants something from me. Let me think about it step by step.\n</think>\n\n",
        }
        request: Any = {"model": "m", "input": QUESTION, "instructions": "You are kind.\n# Rules\nUse few words."}
        async with client_of(model.url) as client:
            patience = client.with_options(timeout=0.3 if kind == "hang" else DEADLINE_SECONDS)
            seen = (
                await view_of(patience.responses.create(**request), plain_view),
                await view_of(events_of(patience, **request), stream_view),
            )
            assert seen == tuple(view.format(**words) for view in SEEN[kind])
            assert await view_of(client.responses.create(**request), plain_view) == f"completed: {text}"

    @pytest.mark.parametrize(
        ("fault", "error", "code"),
        [
            ({"status": 400, "code": "context_length_exceeded"}, openai.BadRequestError, "context_length_exceeded"),
            ({"status": 400}, openai.BadRequestError, None),
            ({"status": 401}, openai.AuthenticationError, "invalid_api_key"),
            ({"status": 404}, openai.NotFoundError, "model_not_found"),
            ({"status": 429}, openai.RateLimitError, "rate_limit_exceeded"),
            ({"status": 429, "code": "insufficient_quota"}, openai.RateLimitError, "insufficient_quota"),
            ({"status": 503}, openai.InternalServerError, "server_is_overloaded"),
            ({"status": 502, "body": "<h1>Bad gateway</h1>"}, openai.InternalServerError, None),
            ({"status": 400, "body": {"error": {"message": "x", "code": 400}}}, openai.BadRequestError, "400"),
        ],
    )
    async def test_statuses(
        self,
        model: OfflineModel,
        client: AsyncOpenAI,
        fault: dict[str, Any],
        error: type[openai.APIStatusError],
        code: str | None,
    ) -> None:
        """A status comes with OpenAI's usual error, another code of it, or a body and headers of one's own."""
        model.add_fault({"kind": "status", "headers": {"X-Request-Id": "req_mine"}, **fault})
        with pytest.raises(error) as caught:
            await client.responses.create(model="m", input=QUESTION)
        assert (caught.value.code, caught.value.request_id) == (code, "req_mine")

    async def test_the_clients_own_retries_are_seen(self, model: OfflineModel) -> None:
        """A client with its default retries outlives two faults; all three attempts are in the record."""
        model.add_fault({"kind": "status", "status": 429, "headers": {"retry-after-ms": "1"}}, times=1)
        model.add_fault({"kind": "status", "status": 500, "headers": {"retry-after-ms": "1"}}, times=1)
        async with AsyncOpenAI(api_key=KEY, base_url=model.url) as client:
            assert (await client.responses.create(model="m", input=QUESTION)).output_text
        attempts = [request["headers"]["x-stainless-retry-count"] for request in model.requests()]
        assert attempts == ["0", "1", "2"]
        assert [request["fault"] for request in model.requests()] == [1, 2, None]

    async def test_a_client_retries_a_reset(self, model: OfflineModel) -> None:
        """A reset connection is retried by the SDK too."""
        model.add_fault({"kind": "reset"}, times=1)
        async with client_of(model.url, max_retries=1) as client:
            assert (await client.responses.create(model="m", input=QUESTION)).output_text

    @pytest.mark.parametrize("characters", [0, 1, 7, 10_000])
    async def test_a_stream_is_cut_after_exactly_so_many_characters(
        self, model: OfflineModel, client: AsyncOpenAI, characters: int
    ) -> None:
        """The text before the cut arrives, no more and no less, and then the connection is gone."""
        model.add_fault({"kind": "cut", "after_characters": characters})
        arrived: list[Any] = []
        with pytest.raises(openai.APIConnectionError):
            await gather_events(client, arrived)
        assert text_of(arrived) == answer("", [], QUESTION)[:characters]

    async def test_reset_and_close_differ_on_the_wire(self, model: OfflineModel) -> None:
        """`reset` is a TCP reset, `close` an orderly end with no reply."""
        model.add_fault({"kind": "reset"}, times=1)
        model.add_fault({"kind": "close"}, times=1)
        async with raw_connection(model) as (reader, writer):
            writer.write(raw_post({"input": "x"}))
            with pytest.raises(ConnectionResetError):
                await reader.read()
        async with raw_connection(model) as (reader, writer):
            writer.write(raw_post({"input": "x"}))
            assert await reader.read() == b""

    async def test_garbage_is_garbage(self, http: httpx2.AsyncClient, model: OfflineModel) -> None:
        """The bytes arrive as they are, always the same, and are neither text nor JSON."""
        model.add_fault({"kind": "garbage"})
        reply = await http.post("/v1/responses", json={"input": "x"})
        assert reply.content == garbage()
        with pytest.raises(UnicodeDecodeError):
            reply.content.decode()

    async def test_a_drip_takes_its_time(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """A dripping reply takes as long as asked for, plain or streamed, and arrives whole."""
        model.add_fault({"kind": "drip", "seconds": 0.3})
        for stream in (False, True):
            start = time.monotonic()
            await (events_of(client) if stream else client.responses.create(model="m", input=QUESTION))
            assert 0.25 <= time.monotonic() - start < DEADLINE_SECONDS

    async def test_a_delay_without_a_fault(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """A rule may only delay an honest reply."""
        model.add_fault(delay_seconds=0.2)
        start = time.monotonic()
        assert (await client.responses.create(model="m", input=QUESTION)).status == "completed"
        assert time.monotonic() - start >= 0.2

    async def test_usage_can_lie_or_be_missing(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """`wrong_usage` multiplies what is reported, also by the counting endpoint; `no_usage` leaves it out."""
        honest = await client.responses.create(model="m", input=QUESTION)
        model.add_fault({"kind": "wrong_usage", "factor": 2})
        false = await client.responses.create(model="m", input=QUESTION)
        counted = await client.responses.input_tokens.count(model="m", input=QUESTION)
        assert honest.usage is not None
        assert false.usage is not None
        assert false.usage.input_tokens == counted.input_tokens == 2 * honest.usage.input_tokens
        model.clear_faults()
        model.add_fault({"kind": "no_usage"})
        assert (await client.responses.create(model="m", input=QUESTION)).usage is None

    async def test_a_silent_cut_shows_only_in_its_usage(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """Half a text called complete has as many output tokens as were allowed."""
        model.add_fault({"kind": "silent_cut"})
        response = await client.responses.create(model="m", input=QUESTION, max_output_tokens=77)
        assert response.usage is not None
        assert (response.status, response.usage.output_tokens) == ("completed", 77)

    async def test_too_long_is_measured_by_the_limits(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """A summary that is ten times too long has ten times the words that were allowed."""
        model.add_fault({"kind": "too_long"}, match="summary")
        pieces = [prompts.Piece("user", TALK[0][1])]
        asked = prompts.fold_request("", pieces, max_words=60, max_tokens=120)
        response = await client.responses.create(model="m", input=items(*asked.messages))
        assert count_words(response.output_text) >= 600

    async def test_rules_apply_in_order_and_as_often_as_they_say(
        self, model: OfflineModel, client: AsyncOpenAI
    ) -> None:
        """The first rule that is live wins; `skip` lets some pass, `times` ends it, `contains` picks requests."""
        model.add_fault({"kind": "text", "text": "first"}, skip=1, times=2)
        model.add_fault({"kind": "text", "text": "second"}, contains='the "red"\n房子')
        model.add_fault({"kind": "text", "text": "never"}, match="summary")
        questions = ('the "red"\n房子', 'the "red"\n房子', "blue", 'the "red"\n房子')
        said = [(await client.responses.create(model="m", input=question)).output_text for question in questions]
        assert said == ["second", "first", "first", "second"]
        model.clear_faults()
        assert (await client.responses.create(model="m", input="blue")).output_text == answer("", [], "blue")

    async def test_contains_looks_into_the_documents_of_summary_calls(
        self, model: OfflineModel, client: AsyncOpenAI
    ) -> None:
        """A message inside a fold is found however it was escaped on its way."""
        model.add_fault({"kind": "text", "text": "found"}, contains='said "hi"\n</end>')
        pieces = [prompts.Piece("user", 'I said "hi"\n</end>')]
        asked = prompts.fold_request("", pieces, max_words=60, max_tokens=120)
        assert (await client.responses.create(model="m", input=items(*asked.messages))).output_text == "found"

    async def test_counts_have_their_own_faults(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """A fault for counts leaves answers alone, and one about text passes counts by."""
        model.add_fault({"kind": "status", "status": 404}, match="count")
        model.add_fault({"kind": "empty"})
        assert (await client.responses.create(model="m", input=QUESTION)).output_text == ""
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(input=QUESTION)
        assert [model_.id async for model_ in client.models.list()]

    @pytest.mark.parametrize(
        "rule",
        [
            {"fault": {"kind": "unknown"}},
            {"fault": {"kind": ["status"]}},
            {"fault": "status"},
            {"fault": {"kind": "status", "status": 99}},
            {"fault": {"kind": "status", "headers": {"content-length": "3"}}},
            {"fault": {"kind": "status", "headers": {"a b": "c"}}},
            {"fault": {"kind": "cut", "after": 3}},
            {"match": "nothing"},
            {"match": ["any"]},
            {"times": -1},
            {"delay_seconds": 1e9},
            {"often": True},
        ],
    )
    async def test_a_wrong_rule_is_refused(
        self, model: OfflineModel, http: httpx2.AsyncClient, rule: dict[str, Any]
    ) -> None:
        """A misspelt fault is an error, not a test that passes for nothing."""
        assert (await http.post("/_control/faults", json=rule)).status_code == 400
        assert (await http.post("/v1/responses", json={"input": "x"})).status_code == 200
        with pytest.raises(Rejected):
            model.add_fault({"kind": "misspelt"})


class TestScripting:
    async def test_gates_make_order_certain(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """A held request has arrived and is not answered; others are; opening its gate lets it through."""
        first = model.hold(contains="first")
        second = model.hold("answer", contains="second")
        talks = {
            name: asyncio.create_task(client.responses.create(model="m", input=name)) for name in ("first", "second")
        }
        await eventually(lambda: model.state() == {"waiting": 2, "in_flight": 2})
        await client.responses.create(model="m", input="third")
        assert [request["ended"] for request in model.requests()].count(False) == 2
        model.release(second)
        assert (await talks["second"]).status == "completed"
        assert not talks["first"].done()
        model.release(first)
        assert (await talks["first"]).status == "completed"
        await eventually(lambda: model.state() == {"waiting": 0, "in_flight": 0})

    async def test_everything_is_scripted_over_http(self, http: httpx2.AsyncClient) -> None:
        """A test in another process can hold, release, add faults, look and clear."""
        assert (await http.post("/_control/hold", json={"match": "answer"})).json() == {"id": 1}
        waiting = asyncio.create_task(http.post("/v1/responses", json={"input": "x"}))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (await http.get("/_control/state")).json() != {"waiting": 1, "in_flight": 1}:
                pass
        assert (await http.post("/_control/faults", json={"fault": {"kind": "status", "status": 418}})).json() == {
            "id": 1
        }
        assert (await http.post("/_control/release")).status_code == 200
        assert (await waiting).status_code == 418
        assert (await http.delete("/_control/faults")).status_code == 200
        assert (await http.post("/v1/responses", json={"input": "y"})).status_code == 200
        seen = (await http.get("/_control/requests")).json()
        assert [(request["body"]["input"], request["fault"]) for request in seen] == [("x", 1), ("y", None)]
        assert [request["body"]["input"] for request in (await http.get("/_control/requests?since=1")).json()] == ["y"]
        assert (await http.get("/_control/requests?since=x")).status_code == 400
        assert (await http.post("/_control/release", json={"id": 7})).status_code == 404
        await http.delete("/_control/requests")
        assert (await http.get("/_control/requests")).json() == []

    async def test_requests_are_recorded(self, model: OfflineModel, client: AsyncOpenAI) -> None:
        """Kind, path, headers without the key, body, time and end of every request, oldest first."""
        before = time.monotonic()
        await client.responses.create(model="m", input=QUESTION, extra_headers={"X-Trace": "7"})
        await client.responses.input_tokens.count(input=QUESTION)
        await client.models.retrieve("gpt")
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input=[])
        await eventually(lambda: model.state()["in_flight"] == 0)
        records = model.requests()
        assert [(record["kind"], record["path"]) for record in records] == [
            ("answer", "/v1/responses"),
            ("count", "/v1/responses/input_tokens"),
            ("models", "/v1/models/gpt"),
            ("unknown", "/v1/responses"),
        ]
        first = records[0]
        assert first["body"] == {"input": QUESTION, "model": "m"}
        assert (first["headers"]["x-trace"], first["headers"]["authorization"]) == ("7", "…5678")
        assert KEY not in json.dumps(records)
        assert before <= first["at"] <= records[1]["at"] <= time.monotonic()
        assert all(record["ended"] and record["finished"] for record in records)

    def test_the_record_is_bounded(self) -> None:
        """Only the newest requests are kept, and `since` still counts from the first."""
        script = Script()
        for number in range(MAX_RECORDS + 50):
            script.arrive(HttpRequest("POST", "/v1/responses", {}, {}, str(number).encode()), number)
        assert [record["body"] for record in script.requests()] == list(range(50, MAX_RECORDS + 50))
        assert [record["body"] for record in script.requests(MAX_RECORDS + 48)] == [MAX_RECORDS + 48, MAX_RECORDS + 49]

    async def test_without_scripting_there_is_none(self) -> None:
        """An offline model for people keeps nothing of what it was sent and cannot be made to misbehave."""
        async with OfflineModel() as model, httpx2.AsyncClient(verify=False) as http:
            base = model.url.removesuffix("/v1")
            for method, path in (("POST", "faults"), ("GET", "requests"), ("POST", "hold"), ("GET", "state")):
                assert (await http.request(method, f"{base}/_control/{path}")).status_code == 404
            assert (await http.post(f"{model.url}/responses", json={"input": "x"})).status_code == 200
            with pytest.raises(RuntimeError, match="scriptable=True"):
                model.requests()


class TestLife:
    @pytest.mark.parametrize("kind", ["hang", "drip"])
    async def test_a_client_that_leaves_ends_its_request(
        self, model: OfflineModel, client: AsyncOpenAI, kind: str
    ) -> None:
        """Nobody goes on writing for a client that has gone; the record says it was not finished."""
        model.add_fault({"kind": kind})
        talk = asyncio.create_task(events_of(client))
        await eventually(lambda: model.state()["in_flight"] == 1)
        talk.cancel()
        await asyncio.gather(talk, return_exceptions=True)
        await eventually(lambda: model.state()["in_flight"] == 0)
        assert [(record["ended"], record["finished"]) for record in model.requests()] == [(True, False)]

    async def test_a_client_that_leaves_in_the_middle_of_a_stream(
        self, client: AsyncOpenAI, model: OfflineModel
    ) -> None:
        """A stream that is closed after its first piece ends on this side too."""
        model.add_fault({"kind": "drip", "seconds": 60})
        async with await client.responses.create(model="m", input=QUESTION, stream=True) as stream:
            async for event in stream:
                if event.type == "response.content_part.added":
                    break
        await client.close()
        await eventually(lambda: model.state()["in_flight"] == 0)
        assert not model.requests()[0]["finished"]

    async def test_a_client_at_a_gate_that_leaves(self, client: AsyncOpenAI, model: OfflineModel) -> None:
        """A request that waits at a gate is given up when its client goes."""
        model.hold()
        talk = asyncio.create_task(client.responses.create(model="m", input=QUESTION))
        await eventually(lambda: model.state()["waiting"] == 1)
        talk.cancel()
        await asyncio.gather(talk, return_exceptions=True)
        await eventually(lambda: model.state() == {"waiting": 0, "in_flight": 0})

    async def test_stop_ends_everything_at_once(self) -> None:
        """Within a second nothing is left of hanging, dripping, held and idle connections."""
        model = OfflineModel(scriptable=True)
        await model.start()
        model.add_fault({"kind": "hang"}, contains="hang")
        model.add_fault({"kind": "drip"}, contains="drip")
        model.hold(contains="hold")
        async with client_of(model.url) as client:
            await client.models.list()
            talks = [asyncio.create_task(events_of(client, input=name)) for name in ("hang", "drip", "hold")]
            await eventually(lambda: model.state() == {"waiting": 1, "in_flight": 3})
            start = time.monotonic()
            await model.stop()
            assert time.monotonic() - start < 1
            ends = await asyncio.gather(*talks, return_exceptions=True)
            assert [type(end) for end in ends] == [openai.APIConnectionError] * 3
            assert model.state() == {"waiting": 0, "in_flight": 0}

    async def test_started_again_it_has_the_same_address(self, client: AsyncOpenAI, model: OfflineModel) -> None:
        """An outage is a stop and a start: refused in between, answered afterwards at the same URL."""
        url = model.url
        await model.stop()
        with pytest.raises(openai.APIConnectionError):
            await client.responses.create(model="m", input=QUESTION)
        await model.start()
        assert model.url == url
        assert (await client.responses.create(model="m", input=QUESTION)).output_text

    async def test_a_taken_port_is_an_error(self, model: OfflineModel) -> None:
        """Two cannot have one port."""
        port = int(model.url.rsplit(":", 1)[1].removesuffix("/v1"))
        with pytest.raises(OSError, match="address already in use"):
            await OfflineModel(port=port).start()

    async def test_a_giant_request_does_not_stop_the_others(self, client: AsyncOpenAI, model: OfflineModel) -> None:
        """While a long text is worked on, small calls are answered."""
        giant = "我住在台北。I work on the number 12345. " * 3_000
        talk = asyncio.create_task(client.responses.create(model="m", input=giant, timeout=60))
        await eventually(lambda: model.state()["in_flight"] == 1)
        answered = 0
        while not talk.done():
            await client.models.list()
            answered += 1
        assert (await talk).output_text
        assert answered >= 3

    async def test_stop_does_not_wait_for_a_giant(self, client: AsyncOpenAI, model: OfflineModel) -> None:
        """A request that is still being worked on is dropped like any other."""
        talk = asyncio.create_task(client.responses.create(model="m", input="我住在台北。" * 20_000))
        await eventually(lambda: model.state()["in_flight"] == 1)
        start = time.monotonic()
        await model.stop()
        assert time.monotonic() - start < 1
        assert isinstance((await asyncio.gather(talk, return_exceptions=True))[0], openai.APIConnectionError)

    @pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
    async def test_as_a_process(self, end: signal.Signals) -> None:
        """`python -m memora.offline_model` prints its URL first, needs no stdin, and ends on a signal with 0."""
        async with offline_process("--scriptable") as (process, url), asyncio.timeout(DEADLINE_SECONDS):
            async with client_of(url) as client:
                assert (await client.responses.create(model="m", input=QUESTION)).output_text
            process.send_signal(end)
            assert await process.wait() == 0

    async def test_a_process_that_cannot_listen_says_why(self) -> None:
        """A taken port is one line on stderr and exit code 3."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "memora.offline_model", "--port", port),
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            _, said = await process.communicate()
        assert process.returncode == 3
        assert f"cannot listen on 127.0.0.1:{port}" in said.decode()
