"""How long does a client wait for the first word through Memora, and how long without it?

    python benchmarks/serve.py [--conversations 200] [--turns 2] [--rounds 2] [--json]

Starts `memora serve`, `memora worker`, Redis and the offline model as processes of their own. The model thinks for a
second and then says its words one by one, as models do, so that all conversations are streaming nearly all the time.
The same client streams from it directly and through Memora, in alternating rounds of one run, so that only ratios
matter. Time to first token is from the request to the first `response.output_text.delta`. Exit code 1 after any error,
or if the medians differ by more than a ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from measuring import busy_seconds, clean_environment, memora_server, process

from memora.embedded_redis import EmbeddedRedis

TURN_SECONDS = 60.0
MOST_RATIO = 1.1
FIRST_TOKEN = b'"type":"response.output_text.delta"'
END = b'"type":"response.completed"'
WORDS = 40
INSTRUCTIONS = "You are a friendly assistant."
TEXTS = (
    "I live in Taipei and my cat is called Ann.",
    "我下個月要考 TOEIC，請給我三個 B1 單字。",
    "What is the difference between journey and travel?",
    "How do I use the present perfect?",
)


@dataclass
class Waits:
    """What clients saw, in seconds, and what went wrong."""

    first_token: list[float] = field(default_factory=list)
    whole_turn: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def one_turn(http: httpx2.AsyncClient, body: dict[str, object], waits: Waits) -> None:
    """Stream one answer to its end."""
    started = time.perf_counter()
    first, tail = 0.0, b""
    try:
        async with http.stream("POST", "/responses", json=body) as reply:
            if reply.status_code != 200:
                waits.errors.append(f"status {reply.status_code}: {(await reply.aread())[:200]!r}")
                return
            async for chunk in reply.aiter_bytes():
                seen = (tail + chunk).replace(b'": ', b'":')
                if not first and FIRST_TOKEN in seen:
                    first = time.perf_counter()
                tail = seen if END in seen else seen[-64:]
    except httpx2.HTTPError as error:
        waits.errors.append(type(error).__name__)
        return
    if not first or END not in tail:
        waits.errors.append("the stream stopped before its end")
        return
    waits.first_token.append(first - started)
    waits.whole_turn.append(time.perf_counter() - started)


async def one_conversation(
    http: httpx2.AsyncClient, conversation: str | None, options: argparse.Namespace, pause: float, waits: Waits
) -> None:
    """Some turns, with a while to read each answer, from a moment of its own on."""
    for number in range(options.turns):
        await asyncio.sleep(options.think_seconds if number else pause)
        body: dict[str, object] = {
            "model": "memora-offline",
            "input": TEXTS[number % len(TEXTS)],
            "instructions": INSTRUCTIONS,
            "stream": True,
        }
        if conversation:
            body["conversation"] = conversation
        await one_turn(http, body, waits)


async def one_round(url: str, conversations: Sequence[str | None], options: argparse.Namespace, waits: Waits) -> None:
    """All conversations at once; they begin spread over the time that a turn takes."""
    dice = random.Random(len(waits.first_token))
    limits = httpx2.Limits(max_connections=len(conversations), max_keepalive_connections=len(conversations))
    headers = {"authorization": "Bearer benchmark"}
    async with (
        httpx2.AsyncClient(base_url=url, timeout=TURN_SECONDS, limits=limits, headers=headers, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for conversation in conversations:
            pause = dice.random() * (options.model_seconds + WORDS * options.word_seconds + options.think_seconds)
            tasks.create_task(one_conversation(http, conversation, options, pause, waits))


async def new_conversations(url: str, number: int) -> list[str]:
    """Ids of so many empty conversations."""
    async with httpx2.AsyncClient(base_url=url, timeout=TURN_SECONDS, trust_env=False) as http:
        return [(await http.post("/conversations", json={})).json()["id"] for _ in range(number)]


async def measure(direct_url: str, memora_url: str, options: argparse.Namespace) -> dict[str, Waits]:
    """Both ways in turn. The first round of each warms up and does not count."""
    conversations = await new_conversations(memora_url, options.conversations)
    ways: dict[str, tuple[str, Sequence[str | None]]] = {
        "directly": (direct_url, [None] * options.conversations),
        "through Memora": (memora_url, conversations),
    }
    for url, places in ways.values():
        await one_round(url, places[: options.conversations // 4], options, Waits())
    waits = {name: Waits() for name in ways}
    for _ in range(options.rounds):
        for name, (url, places) in ways.items():
            await one_round(url, places, options, waits[name])
    return waits


@contextmanager
def everything(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """The model, the server and a worker; the base URLs of the model and of the server, and the server's process."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memora-benchmark-")))
        base = clean_environment(home)
        command = ["-m", "memora.offline_model", "--scriptable", "--piece-delay-seconds", str(options.word_seconds)]
        model = stack.enter_context(process(command, base, home / "model.log"))
        assert model.stdout
        model_url = model.stdout.readline().decode().strip()
        said = {"kind": "text", "text": " ".join(f"word{number}" for number in range(WORDS))}
        rule = {"match": "answer", "delay_seconds": options.model_seconds, "fault": said}
        httpx2.post(f"{model_url.removesuffix('/v1')}/_control/faults", json=rule, trust_env=False).raise_for_status()
        redis = stack.enter_context(EmbeddedRedis(home / "data"))
        environment = base | {
            "MEMORA_REDIS_URL": redis.url,
            "OPENAI_BASE_URL": model_url,
            "OPENAI_API_KEY": "benchmark",
        }
        address, server = stack.enter_context(memora_server(environment, home / "serve.log"))
        stack.enter_context(process(["-m", "memora", "worker"], environment, home / "worker.log"))
        yield model_url, f"{address}/v1", server


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The usual ones, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p90": cuts[89] * 1e3, "p99": cuts[98] * 1e3, "max": max(seconds) * 1e3}


def report(waits: dict[str, Waits], options: argparse.Namespace) -> dict[str, object]:
    """All figures."""
    tables = {
        name: {"first_token_ms": percentiles(found.first_token), "turn_ms": percentiles(found.whole_turn)}
        for name, found in waits.items()
    }
    direct, memora = (table["first_token_ms"] for table in tables.values())
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "conversations": options.conversations,
        "turns": {name: len(found.first_token) for name, found in waits.items()},
        "errors": {name: found.errors[:10] for name, found in waits.items()},
        "figures": tables,
        "first_token_ratio": {name: memora[name] / direct[name] for name in direct},
    }


def show(figures: dict[str, object], waits: dict[str, Waits]) -> None:
    print(f"{figures['machine']}; {figures['conversations']} conversations at once")
    print(f"{'time to first token':<22}{'turns':>7}{'errors':>8}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name, found in waits.items():
        row = percentiles(found.first_token).values()
        cells = "".join(f"{value:>7,.0f} ms" for value in row)
        print(f"{name:<22}{len(found.first_token):>7}{len(found.errors):>8}{cells}")
    ratios = figures["first_token_ratio"]
    assert isinstance(ratios, dict)
    print(f"processor time of the server: {figures['server_cpu_ms_a_turn']:.1f} ms a turn, its start included")
    print(f"{'ratio':<37}{''.join(f'{value:>10.3f}' for value in ratios.values())}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2, help="of each conversation in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model-seconds", type=float, default=1.0, help="what the model takes before its first word")
    parser.add_argument("--word-seconds", type=float, default=0.1, help="what it takes for each word")
    parser.add_argument("--think-seconds", type=float, default=0.0, help="what a person takes to read each answer")
    parser.add_argument("--most-ratio", type=float, default=MOST_RATIO, help="of the medians")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with everything(options) as (model_url, memora_url, server):
        waits = asyncio.run(measure(model_url, memora_url, options))
        busy = busy_seconds(server)
    if not all(found.first_token for found in waits.values()):
        print({name: found.errors[:3] for name, found in waits.items()}, file=sys.stderr)
        return 1
    figures = report(waits, options) | {"server_cpu_ms_a_turn": busy / len(waits["through Memora"].first_token) * 1e3}
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures, waits)
    for name, found in waits.items():
        for error in sorted(set(found.errors))[:5]:
            print(f"{name}: {error}", file=sys.stderr)
    ratios = figures["first_token_ratio"]
    assert isinstance(ratios, dict)
    return int(any(found.errors for found in waits.values()) or ratios["p50"] > options.most_ratio)


if __name__ == "__main__":
    sys.exit(main())
