"""What surrounds the API: access, limits, health, metrics, events, the page, the log."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx2
import pytest
from arq.connections import ArqRedis
from polling import eventually
from redis_view import all_keys, command
from serving import KEY, Serving, ask, request_bytes, serve, turn_body

from memora.core.tokens import count_text_tokens
from memora.errors import SettingsError
from memora.settings import Settings
from memora.web.access import Access, is_loopback
from memora.web.limits import RateLimit
from memora.web.logs import LogFormatter
from memora.web.metrics import Metrics

OTHER_KEY = "sk-another-0123456789"


def with_(settings: Settings, **changes: Any) -> Settings:
    """The same settings but for these."""
    return settings.model_copy(update=changes)


def with_keys(settings: Settings, **changes: Any) -> Settings:
    """The same with two keys."""
    return Settings(
        _env_file=None, **{**settings.model_dump(exclude_unset=True), "api_keys": f"{KEY}, {OTHER_KEY}", **changes}
    )


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error in OpenAI's form."""
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def raw(port: int, data: bytes) -> bytes:
    """Send bytes and read until the server closes or has said everything it has to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = re.search(rb"content-length: (\d+)", head)
        return head + (await reader.readexactly(int(length[1])) if length else b"")
    finally:
        writer.close()


async def events_of(response: httpx2.Response) -> AsyncGenerator[dict[str, str], None]:
    """The events of a stream as they come; comments are left out."""
    event: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value
        elif not line and event:
            yield event
            event = {}


# --- Access


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_an_address_for_others_needs_keys(host: str) -> None:
    """Anything but the loopback refuses without MEMORA_API_KEYS, and says so."""
    with pytest.raises(SettingsError, match="MEMORA_API_KEYS"):
        Access.of(Settings(_env_file=None, host=host))
    assert Access.of(Settings(_env_file=None, host=host, api_keys="k")).keys
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "::1", "[::1]"])
def test_the_loopback_needs_none(host: str) -> None:
    """Only this machine can connect."""
    assert Access.of(Settings(_env_file=None, host=host)).is_local


@pytest.mark.usefixtures("redis")
async def test_with_keys_they_are_needed_everywhere_but_for_health_and_the_page(settings: Settings) -> None:
    """Missing, wrong and odd keys get 401 in OpenAI's form; nothing tells whether a path exists."""
    async with serve(with_keys(settings)) as serving, httpx2.AsyncClient(base_url=serving.root) as client:
        for path in ("/livez", "/readyz", "/version", "/"):
            assert (await client.get(path)).status_code == 200
        for path in ("/metrics", "/openapi.json", "/v1/models", "/v1/conversations/x", "/nothing"):
            for header in ("", KEY, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}", f"Bearer {KEY},{OTHER_KEY}"):
                response = await client.get(path, headers={"authorization": header})
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/metrics", headers={"authorization": f"bearer {OTHER_KEY}"})).status_code == 200


async def test_a_conversation_is_there_for_the_key_that_made_it(settings: Settings, redis: ArqRedis) -> None:
    """Another key gets 404 for its events, as for everything else; the owner in Redis is not the key."""
    async with serve(with_keys(settings)) as serving:
        async with serving.client() as client:
            made = await client.conversations.create()
            await ask(client, "Hello.", made.id)
        async with serving.http(headers={"authorization": f"Bearer {OTHER_KEY}"}) as other:
            assert (await other.get(f"/conversations/{made.id}/events")).status_code == 404
            assert (await other.get(f"/conversations/{made.id}/items")).status_code == 404
    owner = await command(redis, "HGET", f"memora:{{0}}:{made.id}:summary", "owner")
    assert re.fullmatch(rb"[0-9a-f]{32}", owner)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"host": "evil.example"}, 403, id="dns-rebinding"),
        pytest.param({"host": "localhost.evil.example:80"}, 403, id="a-name-that-begins-alike"),
        pytest.param({"host": "["}, 403, id="a-host-that-is-none"),
        pytest.param({"origin": "http://evil.example"}, 403, id="another-origin"),
        pytest.param({"origin": "null"}, 403, id="a-sandboxed-page"),
        pytest.param({"content-type": "text/plain"}, 415, id="a-plain-form"),
        pytest.param({"content-type": "application/x-www-form-urlencoded"}, 415, id="a-form"),
        pytest.param({"content-type": "multipart/form-data; boundary=x"}, 415, id="a-form-with-files"),
    ],
)
async def test_pages_of_other_origins_get_nothing(serving: Serving, headers: dict[str, str], status: int) -> None:
    """DNS rebinding, forms and scripts from elsewhere are refused, and no reply allows another origin."""
    reply = await raw(serving.port, request_bytes(serving.port, "POST", "/v1/responses", turn_body("Hi"), **headers))
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"access-control" not in reply.lower()


async def test_a_preflight_is_refused(serving: Serving) -> None:
    """CORS is off: no OPTIONS is answered, same origin or not."""
    async with serving.http() as client:
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        for headers in ({}, asked):
            response = await client.options("/responses", headers=headers)
            assert response.status_code in (403, 405)
            assert not [name for name in response.headers if name.startswith("access-control")]


async def test_the_local_names_are_all_fine(serving: Serving) -> None:
    """localhost, 127.0.0.1 and [::1], with any port; a page of the server itself may call it."""
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:80"):
        reply = await raw(
            serving.port, request_bytes(serving.port, "GET", "/livez", host=host, origin=f"http://{host}")
        )
        assert reply.startswith(b"HTTP/1.1 200 ")


# --- Limits


@pytest.mark.usefixtures("redis")
async def test_a_body_that_is_too_large_is_not_read(settings: Settings) -> None:
    """413 after the announced length alone, or after the first byte too many of a chunked body."""
    async with serve(with_(settings, max_body_bytes=2_000)) as serving:
        announced = request_bytes(serving.port, "POST", "/v1/responses", **{"content-length": "2001"})
        chunked = request_bytes(serving.port, "POST", "/v1/responses", **{"transfer-encoding": "chunked"})
        chunked = chunked.replace(b"content-length: 0\r\n", b"") + b"7d1\r\n" + b"x" * 2_001
        for data in (announced, chunked):
            reply = await raw(serving.port, data)
            assert reply.startswith(b"HTTP/1.1 413 ")
            assert b'"request_too_large"' in reply
            assert b"connection: close" in reply


@pytest.mark.usefixtures("redis")
async def test_who_comes_too_fast_is_told_when_to_come_again(settings: Settings) -> None:
    """Each key has a limit of its own; health is not counted."""
    async with serve(with_keys(settings, rate_limit_per_minute=3)) as serving, serving.http() as client:
        replies = [await client.get("/models") for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
        assert error_of(replies[-1])["code"] == "rate_limit_exceeded"
        assert 1 <= int(replies[-1].headers["retry-after"]) <= 60
        assert (await client.get(f"{serving.root}/livez")).status_code == 200
        other = {"authorization": f"Bearer {OTHER_KEY}"}
        assert (await client.get("/models", headers=other)).status_code == 200


def test_a_bucket_fills_evenly_and_their_number_is_bounded() -> None:
    """Sixty a minute are one a second; a hundred thousand clients cost no more memory than ten thousand."""
    now = 100.0
    limit = RateLimit(60, lambda: now)
    assert [limit.wait_seconds("a") for _ in range(60)] == [0.0] * 60
    assert limit.wait_seconds("a") == pytest.approx(1.0)
    now += 1.0
    assert limit.wait_seconds("a") == 0.0
    for number in range(100_000):
        assert limit.wait_seconds(str(number)) == 0.0
    assert len(limit._buckets) == 10_000  # it is the claim


@pytest.mark.usefixtures("redis")
async def test_more_turns_than_may_run_are_refused_and_health_goes_on(settings: Settings) -> None:
    """The second turn at the same time gets 503 with Retry-After; the first is answered."""
    async with serve(with_(settings, max_concurrent_requests=1)) as serving, serving.http() as client:
        replies = await asyncio.gather(*(client.post("/responses", json=turn_body("Hi")) for _ in range(8)))
        codes = sorted(reply.status_code for reply in replies)
        assert codes[0] == 200
        assert set(codes) <= {200, 503}
        refused = [reply for reply in replies if reply.status_code == 503]
        assert refused
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert error_of(refused[0])["code"] == "server_overloaded"
        assert (await client.post("/responses", json=turn_body("Hi"))).status_code == 200


# --- Health and metrics


async def test_a_dead_worker_is_degraded_and_a_live_one_is_not(serving: Serving) -> None:
    """Without a worker turns are still answered, so it is ready; `status` tells."""
    async with httpx2.AsyncClient(base_url=serving.root) as client:
        report = await client.get("/readyz")
        assert report.status_code == 200
        assert report.json()["status"] == "degraded"
        assert report.json()["worker"] == {"status": "down", "alive": 0}
        await serving.memora.storage.redis.set("memora:{0}:worker.0123", "x", ex=60)

        async def is_well() -> bool:
            return bool((await client.get("/readyz")).json()["status"] == "ok")

        await eventually(is_well)


async def test_a_redis_that_is_gone_or_hangs_makes_it_not_ready(settings: Settings, redis: ArqRedis) -> None:
    """503 within two seconds while Redis does not answer, 200 afterwards; alive it is all the time."""
    async with serve(settings) as serving, httpx2.AsyncClient(base_url=serving.root, timeout=5) as client:
        await command(redis, "CLIENT", "PAUSE", "3000", "ALL")
        started = asyncio.get_running_loop().time()
        report = await client.get("/readyz")
        assert asyncio.get_running_loop().time() - started < 2.0
        assert report.status_code == 503
        assert report.json()["redis"] == {"status": "down"}
        assert (await client.get("/livez")).json() == {"status": "ok"}

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await eventually(is_ready)


@pytest.mark.usefixtures("redis")
async def test_a_model_that_denies_is_told_and_does_not_take_the_server_down(settings: Settings) -> None:
    """The model is looked at with a short deadline; its state is `degraded` with 200."""
    async with (
        serve(with_(settings, openai_base_url="http://127.0.0.1:9/v1")) as serving,
        httpx2.AsyncClient(base_url=serving.root, timeout=5) as client,
    ):

        async def is_told() -> bool:
            report = await client.get("/readyz")
            assert report.status_code == 200
            return bool(report.json()["model"]["status"] == "down")

        await eventually(is_told)


async def test_metrics_count_turns_and_tell_the_lag(serving: Serving) -> None:
    """After five turns and no worker: turns, tokens by part, and how much waits for how long; no id is a label."""
    async with serving.client() as client:
        made = await client.conversations.create()
        for number in range(5):
            await ask(client, f"Sentence number {number}.", made.id)
    async with httpx2.AsyncClient(base_url=serving.root) as client:
        page = (await client.get("/metrics")).text
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert figures['memora_turns_total{outcome="completed"}'] == "5.0"
    assert figures["memora_turn_seconds_count"] == "5.0"
    assert figures["memora_fold_pending_conversations"] == "1.0"
    assert figures["memora_fold_lag_messages"] == "4.0"
    assert 0 < float(figures["memora_fold_lag_seconds"]) < 60
    assert figures["memora_fold_queue_depth"] == "1.0"
    assert figures["memora_redis_up"] == "1.0"
    asked = sum(count_text_tokens(f"Sentence number {number}.") for number in range(5))
    assert float(figures['memora_input_tokens_total{part="message"}']) >= asked
    assert float(figures['memora_input_tokens_total{part="tail"}']) > 0
    assert figures['memora_http_requests_total{method="POST",route="/v1/responses",status="200"}'] == "5.0"
    assert made.id not in page


async def test_what_memory_took_is_told(serving: Serving) -> None:
    """An answer says in `Server-Timing` how long memory took before the model was asked, plain or streaming."""
    async with serving.http() as client:
        for stream in (False, True):
            reply = await client.post("/responses", json=turn_body("A sentence.", stream=stream))
            told = re.fullmatch(r"memory;dur=(\d+\.\d\d)", reply.headers["server-timing"])
            assert told
            assert 0 < float(told[1]) < 20_000
        page = (await client.get(f"{serving.root}/metrics")).text
    assert "memora_memory_seconds_count 2.0" in page


async def test_metrics_count_folds_by_what_they_came_to(serving: Serving, redis: ArqRedis) -> None:
    """The worker is another process; from the first look on, its folds are counted as the hints tell of them."""

    async def somebody_counts() -> bool:
        return int(await command(redis, "PUBSUB", "NUMPAT")) == 1

    async with serving.client() as client, httpx2.AsyncClient(base_url=serving.root) as http:
        assert 'memora_folds_total{result="committed"} 0.0' in (await http.get("/metrics")).text
        await eventually(somebody_counts)
        made = await client.conversations.create()
        for number in range(4):
            await ask(client, f"Sentence number {number}.", made.id)
        await serving.memora.folds.fold(made.id)

        async def is_counted() -> bool:
            return 'memora_folds_total{result="committed"} 1.0' in (await http.get("/metrics")).text

        await eventually(is_counted)
        await client.conversations.delete(made.id)
    assert not [key for key in await all_keys(redis) if made.id.encode() in key]


async def test_metrics_answer_without_redis(settings: Settings, redis: ArqRedis) -> None:
    """A lag that nobody knows is NaN, not 0."""
    async with serve(settings) as serving, httpx2.AsyncClient(base_url=serving.root, timeout=5) as client:
        await command(redis, "CLIENT", "PAUSE", "2500", "ALL")
        page = (await client.get("/metrics")).text
        assert "memora_redis_up 0.0" in page
        assert "memora_fold_lag_messages NaN" in page


# --- Events


async def test_a_page_sees_a_snapshot_and_then_everything(serving: Serving) -> None:
    """Snapshot first, without the text of messages; turns, folds and the end follow as they happen."""
    async with serving.client() as client, serving.http() as http:
        made = await client.conversations.create()
        await ask(client, "My cat is called Tofu.", made.id)
        async with http.stream("GET", f"/conversations/{made.id}/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async with aclosing(events_of(response)) as events:
                snapshot = await anext(events)
                assert snapshot["event"] == "snapshot"
                assert json.loads(snapshot["data"])["message_count"] == 2
                assert "Tofu" not in snapshot["data"]
                for number in range(3):
                    await ask(client, f"Sentence number {number}.", made.id)
                    event = await anext(events)
                    assert (event["event"], json.loads(event["data"])["message_count"]) == ("turn", 4 + 2 * number)
                await serving.memora.folds.fold(made.id)
                fold = await anext(events)
                assert (fold["event"], json.loads(fold["data"])["to"]) == ("fold", 2)
                await client.conversations.delete(made.id)
                assert (await anext(events))["event"] == "deleted"
                assert [event async for event in events] == []


async def test_a_page_that_comes_back_misses_nothing(serving: Serving) -> None:
    """With Last-Event-ID the snapshot is followed by what happened since, in order; a wrong one is a 400."""
    async with serving.client() as client, serving.http() as http:
        made = await client.conversations.create()
        target = f"/conversations/{made.id}/events"
        async with http.stream("GET", target) as response, aclosing(events_of(response)) as events:
            seen = (await anext(events))["id"]
        for number in range(3):
            await ask(client, f"Sentence number {number}.", made.id)
        async with (
            http.stream("GET", target, headers={"last-event-id": seen}) as response,
            aclosing(events_of(response)) as events,
        ):
            assert (await anext(events))["event"] == "snapshot"
            counts = [json.loads((await anext(events))["data"])["message_count"] for _ in range(3)]
        assert counts == [2, 4, 6]
        for wrong in ("x", "1", "-", "1-2-3", f"{2**64}-0", "1-1 "):
            if wrong.strip() == wrong:
                assert (await http.get(target, headers={"last-event-id": wrong})).status_code == 400


async def test_open_pages_share_one_connection_and_are_bounded(settings: Settings, redis: ArqRedis) -> None:
    """Twenty pages cost Redis one connection; one more than allowed gets 503."""
    async with serve(with_(settings, max_event_streams=20)) as serving, serving.client() as client:
        made = await client.conversations.create()
        await ask(client, "Hello.", made.id)
        target = f"/conversations/{made.id}/events"
        async with serving.http(limits=httpx2.Limits(max_connections=40)) as http:
            streams = [http.stream("GET", target) for _ in range(20)]
            # Kept, because a generator that is thrown away closes its page.
            pages = [events_of(await stream.__aenter__()) for stream in streams]
            for page in pages:
                assert (await anext(page))["event"] == "snapshot"
            assert len((await command(redis, "CLIENT", "LIST", "TYPE", "pubsub")).splitlines()) == 1
            refused = await http.get(target)
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "too_many_streams"
            for page, stream in zip(pages, streams, strict=True):
                await page.aclose()
                await stream.__aexit__(None, None, None)

            async def all_closed() -> bool:
                return "memora_event_streams 0.0" in (await http.get(f"{serving.root}/metrics")).text

            await eventually(all_closed)


async def test_a_server_is_told_only_of_conversations_that_somebody_watches(serving: Serving, redis: ArqRedis) -> None:
    """However many turns and folds there are, what reaches a server is what its own pages are about."""

    async def told_of(*ids: str) -> None:
        async def is_so() -> bool:
            return set(await command(redis, "PUBSUB", "CHANNELS", "*")) == {
                f"memora:{{0}}:{conversation_id}:events".encode() for conversation_id in ids
            }

        await eventually(is_so)

    async with serving.client() as client, serving.http() as http:
        first, second = [(await client.conversations.create()).id for _ in range(2)]
        await ask(client, "Nobody watches.", first)
        await told_of()
        assert await command(redis, "PUBSUB", "NUMPAT") == 0
        async with http.stream("GET", f"/conversations/{first}/events"):
            await told_of(first)
            async with http.stream("GET", f"/conversations/{second}/events"):
                await told_of(first, second)
            await told_of(first)
        await told_of()


async def test_pages_go_on_after_redis_lost_every_connection(serving: Serving, redis: ArqRedis) -> None:
    """The hub subscribes again by itself; what happened meanwhile is told."""
    async with serving.client() as client, serving.http() as http:
        made = await client.conversations.create()
        async with (
            http.stream("GET", f"/conversations/{made.id}/events") as response,
            aclosing(events_of(response)) as events,
        ):
            await anext(events)
            await command(redis, "CLIENT", "KILL", "TYPE", "pubsub")
            await ask(client, "Still there?", made.id)
            assert (await asyncio.wait_for(anext(events), 10))["event"] == "turn"


# --- The page and the log


async def test_the_page_loads_nothing_from_elsewhere(serving: Serving) -> None:
    """No script, no address but its own; the policy allows its one style and nothing else."""
    async with httpx2.AsyncClient(base_url=serving.root) as client:
        page = await client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "<script" not in page.text
    assert not re.findall(r"""(?:src|href)=["'](?!openapi\.json)""", page.text)
    assert f"127.0.0.1:{serving.port}/v1/responses" in page.text


async def test_every_reply_has_an_id_of_its_own(serving: Serving) -> None:
    """Answers, errors, refusals and unknown paths alike; a client's own id is not taken over."""
    async with httpx2.AsyncClient(base_url=serving.root, headers={"x-request-id": "mine"}) as client:
        replies = [await client.get(path) for path in ("/livez", "/nothing", "/v1/conversations/none")]
        replies.append(await client.post("/v1/responses", content="{", headers={"content-type": "text/plain"}))
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", request_id) for request_id in ids)


@pytest.mark.usefixtures("redis")
async def test_the_log_tells_what_happened_and_nothing_that_was_said(settings: Settings) -> None:
    """One JSON line a request, with ids, status and tokens; no text, key, query or path of anybody's."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(LogFormatter(as_json=True))
    log = logging.getLogger("memora")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.DEBUG)
    try:
        async with serve(with_keys(settings)) as serving, serving.client() as client, serving.http() as http:
            made = await client.conversations.create()
            await ask(client, "My secret is Tofu.", made.id)
            await http.get("/conversations/Tofu%20cat?Tofu=1")
            await http.get("/Tofu", params={"q": "Tofu"})
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    turn = next(line for line in lines if line.get("route") == "/v1/responses")
    assert turn["conversation"] == made.id
    assert turn["status"] == 200
    assert turn["input_tokens"] > 0
    assert turn["output_tokens"] > 0
    assert turn["request_id"].startswith("req_")
    assert "Tofu" not in written.getvalue()
    assert KEY not in written.getvalue()


def test_a_log_line_for_people_is_one_line() -> None:
    """Controls in a text cannot forge another line."""
    record = logging.LogRecord("memora", logging.INFO, "", 0, "a\nb %s", ("\x1b[2J",), None)
    line = LogFormatter(as_json=False).format(record)
    assert line.endswith(r"INFO a\nb \x1b[2J")


async def test_two_applications_in_one_process_count_apart(serving: Serving) -> None:
    """Each has a registry of its own."""
    first, second = Metrics(serving.memora.storage), Metrics(serving.memora.storage)
    first.turn_failed("upstream_error")
    assert first.registry.get_sample_value("memora_turns_total", {"outcome": "upstream_error"}) == 1
    assert second.registry.get_sample_value("memora_turns_total", {"outcome": "upstream_error"}) is None
