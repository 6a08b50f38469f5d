"""Rubbish, bad ids, strangers: refused with a 4xx, nothing changed, nothing told, nothing logged."""

from __future__ import annotations

import json
import logging
import time
from itertools import product
from typing import Any

import httpx2
import openai
import pytest
from arq.connections import ArqRedis
from openai import AsyncOpenAI
from polling import eventually
from redis_view import all_keys, dump, places_of
from serving import KEY, Line, Serving, ask, ask_streaming, request_bytes, serve, turn_body
from talk import changed

from memora.offline_model import OfflineModel
from memora.settings import Settings

TEXT = "I live in Taipei, and my cat is called Ann."
SECRET = "zq7secretwordzq7"


DEEP = b'{"a":' * 2_000 + b"1" + b"}" * 2_000
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "list": b"[]",
    "string": b'"hello"',
    "number": b"7",
    "true": b"true",
    "not json": b"{",
    "bad utf-8": b'{"model":"memora","input":"\xff\xfe"}',
    "lone surrogate": b'{"model":"memora","input":"\\ud800"}',
    "lone surrogate in a part": b'{"input":[{"role":"user","content":[{"type":"input_text","text":"\\udfff"}]}]}',
    "NaN": b'{"model":"memora","input":"x","temperature":NaN}',
    "huge number": b'{"model":"memora","input":"x","temperature":1e999}',
    "huge integer": b'{"model":"memora","input":"x","max_output_tokens":' + b"9" * 5_000 + b"}",
    "deep": b'{"model":"memora","input":"x","metadata":' + DEEP + b"}",
    "deep lists": b'{"model":"memora","input":' + b"[" * 3_000 + b"]" * 3_000 + b"}",
    "input null": b'{"model":"memora","input":null}',
    "input missing": b'{"model":"memora"}',
    "input number": b'{"model":"memora","input":7}',
    "input empty": b'{"model":"memora","input":""}',
    "input empty list": b'{"model":"memora","input":[]}',
    "input blank": b'{"model":"memora","input":" \\n\\u200b"}',
    "role unknown": b'{"model":"memora","input":[{"role":"root","content":"x"}]}',
    "role list": b'{"model":"memora","input":[{"role":["user"],"content":"x"}]}',
    "content number": b'{"model":"memora","input":[{"role":"user","content":7}]}',
    "item is text": b'{"model":"memora","input":["x"]}',
    "only an assistant": b'{"model":"memora","input":[{"role":"assistant","content":"x"}]}',
    "stream text": b'{"model":"memora","input":"x","stream":"perhaps"}',
    "model number": b'{"model":7,"input":"x"}',
    "metadata list": b'{"model":"memora","input":"x","metadata":[1]}',
    "metadata of objects": b'{"model":"memora","input":"x","metadata":{"a":{"b":1}}}',
    "temperature text": b'{"model":"memora","input":"x","temperature":"hot"}',
    "negative limit": b'{"model":"memora","input":"x","max_output_tokens":-1}',
    "instructions list": b'{"model":"memora","input":"x","instructions":[7]}',
    "previous response number": b'{"model":"memora","input":"x","previous_response_id":7}',
    "3 MB": b'{"model":"memora","input":"' + b"x" * 3_000_000 + b'"}',
}


async def test_rubbish_is_refused_and_changes_nothing(serving: Serving, conversation: str, redis: ArqRedis) -> None:
    """4xx with OpenAI's body, on both doors; no traceback, no word of ours, and not a byte of Redis has changed."""
    before = await dump(redis)
    async with serving.http() as http:
        headers = {"content-type": "application/json", "x-memora-conversation": conversation}
        for name, body in BODIES.items():
            if body.startswith(b'{"'):
                body = body.replace(b"{", b'{"conversation":"' + conversation.encode() + b'",', 1)  # noqa: PLW2901
            for path, field in (("/responses", b'"input"'), ("/chat/completions", b'"messages"')):
                reply = await http.post(path, content=body.replace(b'"input"', field), headers=headers)
                assert 400 <= reply.status_code < 500, f"{name}: {path} {reply.status_code} {reply.text[:200]}"
                _is_an_openai_error(reply)
    assert await dump(redis) == before


def _is_an_openai_error(reply: httpx2.Response) -> None:
    error = json.loads(reply.content)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(error["message"]) < 1_000
    for leak in ("Traceback", 'File "', "/memora/", "redis://", "unix://", "pydantic", KEY):
        assert leak not in reply.text
    assert reply.headers["x-request-id"]


async def test_rubbish_on_the_other_endpoints(serving: Serving, conversation: str) -> None:
    """Never a 5xx there either, and the conversation is as it was."""
    paths = ("/conversations", f"/conversations/{conversation}", f"/conversations/{conversation}/items")
    places = ("null", "list", "string", "number", "not json", "bad utf-8", "deep", "metadata list")
    extra = [
        b'{"items":7}',
        b'{"items":[7]}',
        b'{"items":[{"role":"user"}]}',
        b'{"items":[{"role":"user","content":"\\ud800"}]}',
        b'{"metadata":{"a":7}}',
        b'{"metadata":{"' + b"k" * 5_000 + b'":"x"}}',
        b'{"metadata":{"a":"\\ud800"}}',
    ]
    async with serving.http() as http:
        for path, body in product((*paths, "/responses/input_tokens"), (*(BODIES[place] for place in places), *extra)):
            reply = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert reply.status_code < 500, f"{path} {body[:60]!r}: {reply.status_code} {reply.text[:200]}"
            if reply.status_code >= 400:
                _is_an_openai_error(reply)
    assert await serving.turns(conversation) == []


TEXTS = {
    "NUL": "a\x00b",
    "right to left": "a \u202eb\u202c c",
    "joiner": "👩‍👩‍👧‍👦 👍🏽 🇹🇼",
    "combining": "e\u0301 न\u093c नमस्ते",
    "four bytes": "𠮷野家 𝒳 🀄",
    "line ends": "a\r\nb\rc\nd",
    "zero width": "a\u200bb\ufeffc\u200f",
    "html": "<script>alert('x')</script> &amp; <b>",
    "json": '{"role": "assistant", "content": "x"}\\u0041\\n',
    "separators": "a\u2028b\u2029c\x85d\x0bc\x1c",
    "events": "data: {}\n\nevent: response.completed\ndata: [DONE]\n\n",
    "end of text": "<|endoftext|><|im_start|>system",
    "tags": "🏴\U000e0067\U000e0062\U000e007f \U000e0041",
    "spaces": "  two  spaces, and at the end  ",
    "noncharacters": "a\ufffeb\uffff\U0010ffff",
}


async def test_texts_come_through_byte_for_byte(serving: Serving, offline: OfflineModel, client: AsyncOpenAI) -> None:
    """As a question and as an answer, plain and streaming: to the model, to the history, to the client, to the list."""
    for name, text in TEXTS.items():
        offline.clear()
        offline.add_fault({"kind": "text", "text": text}, match="answer")
        conversation = (await client.conversations.create()).id
        assert await ask(client, text, conversation) == text, name
        assert await ask_streaming(client, text, conversation) == text, name
        assert await serving.turns(conversation) == [(text, text)] * 2, name
        sent = [request["body"]["input"] for request in offline.requests() if request["kind"] == "answer"]
        assert [item["content"] for item in sent[-1]] == [text] * 3, name
        listed = [item async for item in client.conversations.items.list(conversation)]
        assert [part.text for item in listed for part in item.content] == [text] * 4, name  # type: ignore[union-attr]  # messages


async def test_a_megabyte_is_refused_quickly(serving: Serving, client: AsyncOpenAI, conversation: str) -> None:
    """A message that can never fit is a 4xx within seconds, and nobody waits for it."""
    started = time.monotonic()
    for text in ("x" * 1_000_000, "字" * 350_000, "a b " * 250_000):
        with pytest.raises(openai.APIStatusError) as refused:
            await ask(client, text, conversation)
        assert 400 <= refused.value.status_code < 500
        assert len(str(refused.value)) < 1_000
    assert time.monotonic() - started < 8
    assert await serving.turns(conversation) == []


IDS = (
    "*",
    "?",
    ":",
    "{0}",
    "%7B0%7D",
    "%0a",
    "%0d%0aDEL",
    "a%20b",
    "..%2f",
    "%00",
    "x" * 5_000,
    "a:history",
    "%C3%A9",
    "-" * 129,
)
ENDPOINTS = (
    ("GET", "/conversations/{id}"),
    ("POST", "/conversations/{id}"),
    ("DELETE", "/conversations/{id}"),
    ("GET", "/conversations/{id}/items"),
    ("POST", "/conversations/{id}/items"),
    ("GET", "/conversations/{id}/items/{id}"),
    ("GET", "/conversations/{id}/memory"),
    ("GET", "/conversations/{id}/context"),
    ("GET", "/conversations/{id}/events"),
    ("POST", "/conversations/{id}/memory/rebuild"),
    ("POST", "/conversations/{id}/memory/rollback"),
    ("GET", "/responses/{id}"),
    ("GET", "/models/{id}"),
)


async def test_bad_ids_are_refused_everywhere(serving: Serving, conversation: str, redis: ArqRedis) -> None:
    """4xx on every endpoint, in the path, the body and the header; no key is made and nobody else is touched."""
    before = await dump(redis)
    bodies = {"items": {"items": [{"role": "user", "content": "x"}]}, "rollback": {"to": 1}}
    async with serving.http() as http:
        for bad, (method, path) in product(IDS, ENDPOINTS):
            body = bodies.get(path.rsplit("/", 1)[-1], {"metadata": {}})
            target = f"/v1{path.format(id=bad)}"
            line = await Line.open(serving.port, request_bytes(serving.port, method, target, body))
            status = await line.status()
            line.leave()
            assert 400 <= status < 500, f"{method} {target[:60]}: {status}"
        for raw in (httpx2.URL(f"http://x/{bad}").path[1:] for bad in IDS):
            for place in (raw, {"id": raw}):
                reply = await http.post("/responses", json=turn_body(TEXT) | {"conversation": place})
                assert 400 <= reply.status_code < 500, f"{place!r:.60}: {reply.text[:200]}"
                _is_an_openai_error(reply)
            if raw and raw.isascii() and raw.isprintable():
                body = {"model": "memora", "messages": [{"role": "user", "content": TEXT}]}
                reply = await http.post("/chat/completions", json=body, headers={"x-memora-conversation": raw})
                assert 400 <= reply.status_code < 500, f"{raw:.60}: {reply.text[:200]}"
    assert await dump(redis) == before
    assert await serving.turns(conversation) == []


async def test_another_key_learns_nothing(settings: Settings, redis: ArqRedis) -> None:
    """To it a conversation of somebody else is the same as one that never was: status, body, every endpoint."""
    assert await redis.dbsize() == 0
    async with serve(changed(settings, api_keys="key-of-ann,key-of-bea")) as serving:
        async with serving.client(api_key="key-of-ann", max_retries=0) as ann:
            conversation = (await ann.conversations.create(metadata={"title": SECRET})).id
            response = await ann.responses.create(model="memora", input=f"I like {SECRET}.", conversation=conversation)
            item = response.output[0].id
        before = await dump(redis)
        absent = conversation[:-4] + ("0000" if conversation[-4:] != "0000" else "1111")
        async with serving.http(headers={"authorization": "Bearer key-of-bea"}) as bea:
            for method, path in ENDPOINTS:
                if path.startswith("/models"):
                    continue
                replies = [
                    await bea.request(method, path.replace("{id}", one, 1).format(id=item), json=_body_for(path))
                    for one in ((response.id, "resp_0000") if path.startswith("/responses") else (conversation, absent))
                ]
                assert replies[0].status_code in (404, 405), f"{method} {path}: {replies[0].status_code}"
                assert replies[0].status_code == replies[1].status_code
                assert SECRET not in replies[0].text
                assert _shape(replies[0], conversation, response.id) == _shape(replies[1], absent, "resp_0000")
            for body in (
                turn_body("hello", conversation),
                turn_body("hello", previous_response_id=response.id),
                turn_body("hello", conversation, stream=True),
            ):
                reply = await bea.post("/responses", json=body)
                assert reply.status_code in (400, 404), reply.text
                assert SECRET not in reply.text
            listed = await bea.post(
                "/chat/completions",
                json={"model": "memora", "messages": [{"role": "user", "content": "hello"}]},
                headers={"x-memora-conversation": conversation},
            )
            assert listed.status_code == 404, listed.text
        assert await dump(redis) == before
        assert len(await serving.turns(conversation)) == 1


def _body_for(path: str) -> dict[str, Any]:
    if path.endswith("/items"):
        return {"items": [{"role": "user", "content": "x"}]}
    return {"version": 1} if path.endswith("rollback") else {"metadata": {}}


def _shape(reply: httpx2.Response, *ids: str) -> str:
    """What a reply says, without the ids in it."""
    text = reply.text
    for one in sorted(ids, key=len, reverse=True):
        text = text.replace(one, "<id>")
    return text.replace(reply.headers.get("x-request-id", "-"), "<request>")


async def test_a_wrong_key_opens_nothing(settings: Settings, redis: ArqRedis) -> None:
    """401 `invalid_api_key` on every endpoint under `/v1`, and the key is not repeated."""
    wrong = (
        None,
        "",
        "Bearer",
        "Bearer key-of-nobody",
        "Basic Zzo=",
        "key-of-ann",
        "Bearer \xff",
        "Bearer key-of-ann2",
    )
    calls = (*ENDPOINTS, ("POST", "/responses"), ("POST", "/chat/completions"), ("GET", "/models"))
    async with (
        serve(changed(settings, api_keys="key-of-ann")) as serving,
        httpx2.AsyncClient(base_url=serving.url, timeout=10, trust_env=False) as http,
    ):
        for header, (method, path) in product(wrong, calls):
            headers = {} if header is None else {b"authorization": header.encode("latin-1")}
            reply = await http.request(method, path.format(id="conv_1"), json=turn_body(TEXT), headers=headers)
            assert reply.status_code == 401, f"{header} {method} {path}: {reply.status_code}"
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert "key-of-" not in reply.text
    assert await all_keys(redis) == []


async def test_no_key_and_no_message_is_ever_logged(
    offline: OfflineModel,
    client: AsyncOpenAI,
    conversation: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not in a good turn, not in a failed one, not at the most talkative level."""
    caplog.set_level(logging.DEBUG)
    await ask(client, f"I like {SECRET}.", conversation, extra_headers={"Idempotency-Key": "k"})
    await ask_streaming(client, f"I like {SECRET} still.", conversation, instructions=f"Say {SECRET}.")
    for kind in ("failed", "cut", "garbage"):
        offline.clear_faults()
        offline.add_fault({"kind": kind}, match="answer")
        for turn in (ask, ask_streaming):
            with pytest.raises((openai.APIError, AssertionError)):
                await turn(client, f"I like {SECRET} again.", conversation)
    with pytest.raises(openai.UnprocessableEntityError):
        await ask(client, f"I like {SECRET}, another.", conversation, extra_headers={"Idempotency-Key": "k"})
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="memora", input=SECRET, conversation=conversation, tools=[{SECRET: 1}])  # type: ignore[list-item]
    ours = [record for record in caplog.records if record.name.split(".")[0] in ("memora", "uvicorn", "fastapi", "arq")]
    for record in ours:
        text = f"{record.getMessage()} {record.__dict__} {record.exc_text or ''}"
        assert SECRET not in text
        assert KEY not in text
        assert "test-key-0123" not in text


async def test_deleted_through_the_api_is_gone(client: AsyncOpenAI, conversation: str, redis: ArqRedis) -> None:
    """No key and no value knows of it, neither by its id, nor by its words, nor by its idempotency key."""
    for number in range(6):
        key = {"Idempotency-Key": f"{SECRET}-{number}"}
        await ask(client, f"I like {SECRET} {number}.", conversation, extra_headers=key)
    assert await places_of(redis, SECRET)
    await client.conversations.delete(conversation)

    async def is_gone() -> bool:
        return not await places_of(redis, SECRET) and not await places_of(redis, conversation)

    await eventually(is_gone)
