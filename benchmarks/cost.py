"""What memory costs: a turn through Memora against the bare client and against doing it in the request path.

    python benchmarks/cost.py [--quick] [--json]

One run starts Redis, `memora serve`, `memora worker` and a cheap model endpoint as processes of their own and goes
through the ways of `ways.py` in turn, round after round, so that whatever else the machine does hits all of them alike.
Only ratios within the run are judged; figures are medians. The bare client and the engine run on the same event loop.

- Alone: one turn at a time at an endpoint without delay, for histories of 10 to 100,000 messages. "Before the model" is
  from the call to the arrival of the request's last byte at the endpoint.
- Sixteen conversations at once without delay: processor time of the process that answers, and turns a second.
- 200 conversations at once at a model that takes 0.3 s to its first word, 1 s to its last and 2 s for a summary, each
  ± 30 %, with a worker that folds behind them. The server again with 130: two hundred are near to what two cores carry
  with everything on them, and there the speed of the day decides.
- Tokens of 200 turns, from `economics.py`; bytes and commands at Redis.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import anyio
from economics import replay, spoken
from flat_cost import traffic
from measuring import (
    Report,
    Row,
    Target,
    busy_seconds,
    clean_environment,
    endpoint,
    memora_server,
    percentile,
    process,
    show,
)
from ways import QUESTION, Bare, Engine, Inline, Observed, Thin, Way, caught_up, copies, grow, remove, restore

from memora.bootstrap import Memora, open_memora
from memora.cli.app import MOST_YOUNG_OBJECTS
from memora.cli.runner import event_loop
from memora.core.window import select_context
from memora.embedded_redis import EmbeddedRedis
from memora.settings import Settings

WAYS: Final = ("thin", "bare", "memora", "inline", "http")
MODEL_SECONDS: Final = 1.0
"""How long the paced model takes for an answer; conversations begin spread over it."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    sizes: tuple[int, ...] = (10, 1_000, 10_000, 100_000)
    alone_rounds: int = 200
    crowd: int = 16
    crowd_turns: int = 320
    crowd_rounds: int = 5
    conversations: int = 200
    fewer_conversations: int = 130
    paced_turns: int = 3
    paced_rounds: int = 3
    talk_turns: int = 200
    endpoint_options: tuple[str, ...] = ()


QUICK: Final = Effort(
    sizes=(10, 100),
    alone_rounds=2,
    crowd=2,
    crowd_turns=4,
    crowd_rounds=1,
    conversations=2,
    fewer_conversations=1,
    paced_turns=1,
    paced_rounds=1,
    talk_turns=6,
    endpoint_options=("--first-seconds", "0.02", "--reply-seconds", "0.05", "--summary-seconds", "0.1"),
)


@dataclass
class Bench:
    """Everything that runs: the engine over two endpoints' paths, the ways, and the server's process."""

    memora: Memora
    ways: dict[str, Way]
    server: int
    body: dict[str, object]

    def cpu_seconds(self, way: str) -> float:
        """Processor time so far of the process that answers this way."""
        return busy_seconds(self.server) if way == "http" else time.process_time()


@dataclass
class Crowd:
    """Figures of many conversations at once, by round."""

    cpu_ms: list[float] = field(default_factory=list)
    turns_a_second: list[float] = field(default_factory=list)


@asynccontextmanager
async def opened(home: Path, redis_url: str, endpoint_url: str, speed: str) -> AsyncIterator[Bench]:
    """The ways at one speed of the endpoint, `instant` or `paced`."""
    model_url = f"{endpoint_url}/{speed}/v1"
    environment = clean_environment(home) | {
        "MEMORA_REDIS_URL": redis_url,
        "OPENAI_BASE_URL": model_url,
        "OPENAI_API_KEY": "benchmark",
        "MEMORA_WORKER_CONCURRENCY": "400",
    }
    settings = Settings(
        _env_file=None, redis_url=redis_url, openai_base_url=model_url, openai_api_key="benchmark", data_dir=home
    )
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(ExitStack())
        server_url, server = processes.enter_context(memora_server(environment, home / f"serve-{speed}.log"))
        memora = await stack.enter_async_context(open_memora(settings))
        template = await grow(memora, "template", 10)
        await grow(memora, "behind", 10, pending=2)
        context = select_context(template, settings.instructions_text, QUESTION, settings.budget)
        items = [{"type": "message", "role": role, "content": content} for role, content in context.request.messages]
        body = {"model": "benchmark", "instructions": context.instructions, "input": items, "stream": True}
        ways: dict[str, Way] = {
            "thin": Thin(model_url, body),
            "bare": Bare(model_url, context),
            "memora": Engine(memora),
            "inline": Inline(memora),
            "http": Thin(f"{server_url}/v1", {"model": "benchmark", "input": QUESTION, "stream": True}, remembers=True),
        }
        yield Bench(memora, ways, server, body)


async def alone(bench: Bench, effort: Effort) -> dict[tuple[str, int], list[Observed]]:
    """One turn at a time: every way, and all that have a memory at every size, in another order in each round."""
    found, dice = dict[tuple[str, int], list[Observed]](), random.Random(1)
    with_memory = [(name, size) for name in ("memora", "inline", "http") for size in effort.sizes]
    turns = [("thin", effort.sizes[0]), ("bare", effort.sizes[0]), *with_memory]
    for number in range(-1, effort.alone_rounds):
        dice.shuffle(turns)
        for name, size in turns:
            conversation = f"size-{size}"
            if name == "inline":
                await _leave_one_turn_pending(bench, conversation, size)
            observed = await bench.ways[name].turn(conversation)
            await _settle(bench, conversation, size)
            if number >= 0:
                found.setdefault((name, size), []).append(observed)
    return found


async def _leave_one_turn_pending(bench: Bench, conversation: str, size: int) -> None:
    key = f"memora:{{0}}:{conversation}:summary"
    await bench.memora.storage.redis.hset(key, "summarized_message_count", str(size - 8))  # type: ignore[misc]  # annotated as sync and async at once


async def _settle(bench: Bench, conversation: str, size: int) -> None:
    redis = bench.memora.storage.redis
    await restore(redis, conversation, size)
    await redis.hset(  # type: ignore[misc]  # annotated as sync and async at once
        f"memora:{{0}}:{conversation}:summary", mapping={"summarized_message_count": size - 6, "version": 0}
    )
    await redis.delete(f"memora:{{0}}:{conversation}:folds")


async def crowd(bench: Bench, effort: Effort) -> dict[str, Crowd]:
    """Sixteen at once. Each turn is in a conversation of its own, so that all are alike and no worker is needed."""
    found = {name: Crowd() for name in WAYS}
    redis = bench.memora.storage.redis
    names = [f"crowd-{number}" for number in range(effort.crowd_turns)]
    for number in range(-1, effort.crowd_rounds):
        for name in WAYS:
            await copies(redis, "behind" if name == "inline" else "template", names)
            cpu, started = bench.cpu_seconds(name), time.perf_counter()
            await all_turns(bench.ways[name], names, effort.crowd)
            seconds, cpu = time.perf_counter() - started, bench.cpu_seconds(name) - cpu
            if number >= 0:
                found[name].cpu_ms.append(cpu / len(names) * 1e3)
                found[name].turns_a_second.append(len(names) / seconds)
            await remove(redis, names)
    return found


async def all_turns(way: Way, names: Sequence[str], at_once: int) -> None:
    """A turn in each of these conversations, so many at once."""
    waiting = iter(names)

    async def one_after_the_other() -> None:
        for name in waiting:
            await way.turn(name)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(one_after_the_other())


async def paced(bench: Bench, ways: Sequence[str], rounds: int, effort: Effort) -> dict[str, list[float]]:
    """Seconds to the first word with many conversations at once, each taking its turns without a pause.

    The first round opens the connections of all ways and does not count. Before each round the worker has come to the
    end of the folds of the last one, so that no way is measured beside the folds of another.
    """
    found: dict[str, list[float]] = {}
    for round_number in range(-1, rounds):
        for name in ways:
            names = [f"{name}-{effort.conversations}-{number}" for number in range(effort.conversations)]
            if round_number < 0:
                await copies(bench.memora.storage.redis, "behind" if name == "inline" else "template", names)
            if name != "inline":
                await caught_up(bench.memora)
            seconds = await _paced_round(bench.ways[name], name, names, effort.paced_turns)
            if round_number >= 0:
                found.setdefault(name, []).extend(seconds)
    return found


async def _paced_round(way: Way, name: str, names: Sequence[str], turns: int) -> list[float]:
    seconds, dice = list[float](), random.Random(name)

    async def one_conversation(conversation: str, pause: float) -> None:
        await asyncio.sleep(pause)
        for _ in range(turns):
            seconds.append((await way.turn(conversation)).first_word / 1e9)

    async with asyncio.TaskGroup() as tasks:
        for conversation in names:
            tasks.create_task(one_conversation(conversation, dice.random() * MODEL_SECONDS))
    return seconds


async def at_redis(bench: Bench, effort: Effort) -> dict[int, tuple[float, float, float]]:
    """Scripts, bytes to Redis and bytes from it of one turn of the engine, by size."""
    found = {}
    redis = bench.memora.storage.redis
    for size in effort.sizes:
        before = await traffic(redis)
        await bench.ways["memora"].turn(f"size-{size}")
        after = await traffic(redis)
        # The second look at the figures is itself one command of about a hundred bytes in and some kilobytes out.
        idle = await traffic(redis)
        await _settle(bench, f"size-{size}", size)
        calls, sent, received = (b - a - (c - b) for a, b, c in zip(before, after, idle, strict=True))
        found[size] = (float(calls), float(sent), float(received))
    return found


async def memory_of(bench: Bench, conversation: str) -> float:
    """Bytes of all keys of a conversation."""
    redis = bench.memora.storage.redis
    keys = [key async for key in redis.scan_iter(match=f"memora:{{0}}:{conversation}:*", count=10_000)]
    return float(sum([int(await redis.memory_usage(key, samples=0) or 0) for key in keys]))


async def run(effort: Effort) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="memora-cost-") as folder, ExitStack() as stack:
        home = Path(folder)
        redis = stack.enter_context(EmbeddedRedis(home / "redis"))
        environment = clean_environment(home)
        url, endpoint_pid = stack.enter_context(endpoint(environment, home / "endpoint.log", *effort.endpoint_options))
        async with opened(home, redis.url, url, "instant") as bench:
            await rows_memory(report, bench, effort)
            rows_alone(report, await alone(bench, effort), effort)
            await rows_at_redis(report, bench, effort)
            started, busy = time.perf_counter(), busy_seconds(endpoint_pid)
            rows_crowd(report, await crowd(bench, effort), effort)
            share = (busy_seconds(endpoint_pid) - busy) / (time.perf_counter() - started)
            report.notes.append(f"The endpoint was busy for {share:.0%} of the time that the crowd took.")
            await bench.memora.storage.redis.flushdb()
        async with opened(home, redis.url, url, "paced") as bench:
            worker_environment = environment | {
                "MEMORA_REDIS_URL": redis.url,
                "OPENAI_BASE_URL": f"{url}/paced/v1",
                "OPENAI_API_KEY": "benchmark",
                "MEMORA_WORKER_CONCURRENCY": "400",
            }
            with process(["-m", "memora", "worker"], worker_environment, home / "worker.log"):
                found = await paced(bench, ("thin", "bare", "memora", "http"), effort.paced_rounds, effort)
                fewer = replace(effort, conversations=effort.fewer_conversations)
                found_fewer = await paced(bench, ("memora", "http"), effort.paced_rounds, fewer)
            # Without the worker, which would take its folds away.
            found |= await paced(bench, ("inline",), 1, effort)
            rows_paced(report, found, effort)
            rows_served(report, found_fewer, fewer)
    await rows_tokens(report, effort)
    return report


def rows_alone(report: Report, found: dict[tuple[str, int], list[Observed]], effort: Effort) -> None:
    smallest = effort.sizes[0]

    def medians(size: int, figure: Callable[[Observed], int]) -> dict[str, float]:
        return {name: statistics.median(map(figure, found[name, size])) / 1e6 for name in WAYS if (name, size) in found}

    first = medians(smallest, lambda observed: observed.before_model)
    target = Target("memora/bare", _ratio(first, "memora", "bare"), 0.5)
    report.add(Row(f"before the model, {smallest:,} messages", "ms", first, target))
    for size in effort.sizes[1:]:
        values = medians(size, lambda observed: observed.before_model)
        grown = Target(f"memora/{smallest} messages", values["memora"] / first["memora"], 1.2)
        report.add(Row(f"before the model, {size:,} messages", "ms", values, grown))
    report.add(Row("whole turn, model without delay", "ms", medians(smallest, lambda seen: seen.whole)))


def rows_crowd(report: Report, found: dict[str, Crowd], effort: Effort) -> None:
    cpu = {name: statistics.median(crowd.cpu_ms) for name, crowd in found.items()}
    rates = {name: statistics.median(crowd.turns_a_second) for name, crowd in found.items()}
    pairs = zip(found["memora"].turns_a_second, found["bare"].turns_a_second, strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    name = f"turns a second, {effort.crowd} conversations"
    report.add(Row(name, "1/s", rates, Target("memora/bare", ratio, 3.0, at_least=True)))
    report.add(Row("processor time a turn", "ms", cpu))
    on_one_core = {name: 1e3 / value if value else None for name, value in cpu.items()}
    report.add(Row("turns a second that one core would do", "1/s", on_one_core))


def rows_paced(report: Report, found: dict[str, list[float]], effort: Effort) -> None:
    for share, most in ((50, 1.10), (99, 1.16)):
        values = {name: percentile(seconds, share) for name, seconds in found.items()}
        name = f"first word, {effort.conversations} conversations, p{share}"
        report.add(Row(name, "s", values, Target("memora/thin", _ratio(values, "memora", "thin"), most)))
    rows_served(report, found, effort)


def rows_served(report: Report, found: dict[str, list[float]], effort: Effort) -> None:
    for share in (50, 99):
        values = {name: percentile(found[name], share) for name in ("memora", "http")}
        served = Target("http/memora", _ratio(values, "http", "memora"), 1.5)
        report.add(Row(f"… through the server, {effort.conversations} conversations, p{share}", "s", values, served))


async def rows_memory(report: Report, bench: Bench, effort: Effort) -> None:
    for size in effort.sizes:
        await grow(bench.memora, f"size-{size}", size)
        memory = await memory_of(bench, f"size-{size}")
        report.add(Row(f"memory of {size:,} messages", "bytes", {"memora": memory}))


async def rows_at_redis(report: Report, bench: Bench, effort: Effort) -> None:
    traffic_of = await at_redis(bench, effort)
    for place, unit, most in ((0, "scripts", 2.0), (1, "bytes to Redis", 4_000.0), (2, "bytes from Redis", 4_000.0)):
        figures = [found[place] for found in traffic_of.values()]
        name = f"Redis a turn, {effort.sizes[-1]:,} messages"
        report.add(Row(name, unit, {"memora": figures[-1]}, Target("at every size", max(figures), most)))


async def rows_tokens(report: Report, effort: Effort) -> None:
    """The default, in which the summary alone is half as large as the window, and settings that save tokens.

    Whatever is folded when, the summary goes into every context: beside three short turns no policy can reach the
    target against a window that never holds more than three turns. So it is asked of three turns and up to seven that
    gather behind them, against that window; and of ten turns and one that may wait, against the ten.
    """
    talks = [spoken(effort.talk_turns)]
    (default,) = await replay(talks, batches=(1,), budgets=(1_000,))
    (gathered,) = await replay(talks, batches=(8,), budgets=(4_000,))
    (batches,) = await replay(talks, batches=(2,), budgets=(4_000,), recent_turns=10)
    beside = default.answer_tokens / default.window_alone
    for talk, setting, window, name in (
        (default, "three recent turns, folds of 1", default.window_alone, ""),
        (gathered, "three recent turns, folds of 8", gathered.window_sent, "memora/window as sent"),
        (batches, "ten recent turns, folds of 2", batches.window_alone, "memora/window alone"),
    ):
        target = Target(name, talk.tokens_in / window, 1.45) if name else None
        report.add(Row(f"tokens, {talk.turns} turns, {setting}", "", {"memora": talk.tokens_in}, target))
        report.notes.append(
            f"Tokens, {setting}: {talk.tokens_in / talk.window_alone:.2f} of the window alone, "
            f"{talk.tokens_in / talk.window_sent:.2f} of the window as sent; full history "
            f"{talk.full_history / talk.window_alone:.1f}; markers missing from a request: {talk.markers_missing}; "
            f"messages in a gap: {talk.gap_messages}."
        )
    report.notes.append(
        f"Beside three recent turns, answers with a summary take {beside:.2f} before anything is folded."
    )


def _ratio(values: Mapping[str, float], above: str, below: str) -> float:
    return values[above] / values[below]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a look at whether it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # As in the product's own processes, for all ways that run in this one.
    gc.freeze()
    gc.set_threshold(MOST_YOUNG_OBJECTS)
    report = anyio.run(run, QUICK if options.quick else Effort(), backend_options=event_loop())
    print(json.dumps(report.as_record(), indent=2)) if options.json else show(report)
    return int(bool(report.missed) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
