"""Does a turn cost the same whatever the length of the history?

    python benchmarks/flat_cost.py [--rounds 400] [--json]

Against a private server, for histories of 10, 1,000 and 100,000 messages: the time to load a context and to append a
turn, in raw PINGs of the same connection; commands and bytes of a turn. All sizes are measured in turn within one run,
so that only ratios matter. Exit code 1 if loading or appending at the longest history costs over 1.2 times what it
costs at the shortest, or over 3 PINGs, or if a turn takes more than two commands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from arq.connections import ArqRedis

from memora.core.conversation import Conversation, Message
from memora.core.tokens import count_text_tokens
from memora.core.window import Budget, most_useful_messages, select_context
from memora.embedded_redis import EmbeddedRedis, find_engine
from memora.redis_connection import close_redis, open_redis
from memora.store import ConversationStore, Turn

SIZES = (10, 1_000, 100_000)
WINDOW_MESSAGES = 6
BUDGET = Budget(max_input_tokens=1_000, max_recent_turns=3, max_summary_tokens=300)
QUESTION = "What is the difference between journey and travel? Please give me two short examples."
ANSWER = "A journey is one trip from one place to another. Travel is going to places in general. " * 2
MOST_RATIO = 1.2
MOST_PINGS = 3.0


@dataclass(frozen=True)
class Cost:
    """Medians in microseconds."""

    load: float
    append: float
    ping: float


def question_and_answer() -> tuple[Message, Message]:
    return (
        Message("user", QUESTION, count_text_tokens(QUESTION)),
        Message("assistant", ANSWER, count_text_tokens(ANSWER)),
    )


def turn(conversation: Conversation, turn_id: str) -> Turn:
    user, assistant = question_and_answer()
    context = select_context(conversation, "Be brief.", QUESTION, BUDGET)
    return Turn(turn_id, conversation.generation, user, assistant, context, WINDOW_MESSAGES, 300, 60)


async def grow(redis: ArqRedis, store: ConversationStore, name: str, messages: int) -> Conversation:
    """A conversation of this many messages of which all but the window are folded."""
    await store.append(name, turn(Conversation(name), "first"))
    history, summary = (f"memora:{{0}}:{name}:{part}" for part in ("history", "summary"))
    records = await redis.lrange(history, 0, -1)  # type: ignore[misc]  # annotated as sync and async at once
    for _ in range((messages - 2) // 1_000):
        await redis.rpush(history, *(records * 500))  # type: ignore[misc]  # likewise
    rest = (messages - 2) % 1_000 // 2
    if rest:
        await redis.rpush(history, *(records * rest))  # type: ignore[misc]  # likewise
    text = "The user takes the TOEIC next month and likes short examples. " * 12
    fields = {"message_count": messages, "summarized_message_count": messages - WINDOW_MESSAGES, "summary": text}
    await redis.hset(summary, mapping=fields)  # type: ignore[misc]  # likewise
    return await store.load(name, most_useful_messages(BUDGET))


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await call()
    return (time.perf_counter() - started) * 1e6


async def measure(redis: ArqRedis, store: ConversationStore, rounds: int) -> dict[int, Cost]:
    """Time every size in every round, so that whatever else the machine does hits all of them alike."""
    loaded = {size: await grow(redis, store, f"size-{size}", size) for size in SIZES}
    times: dict[tuple[int, str], list[float]] = {}
    most = most_useful_messages(BUDGET)
    for number in range(rounds):
        for size, conversation in loaded.items():
            name = conversation.id
            new = turn(conversation, f"turn-{number}")
            times.setdefault((size, "ping"), []).append(await timed(redis.ping))
            times.setdefault((size, "load"), []).append(await timed(partial(store.load, name, most)))
            times.setdefault((size, "append"), []).append(await timed(partial(store.append, name, new)))
            await trim(redis, name, size)
    return {
        size: Cost(*(statistics.median(times[size, what]) for what in ("load", "append", "ping"))) for size in SIZES
    }


async def trim(redis: ArqRedis, name: str, size: int) -> None:
    """Take the appended turn off again, so that every round meets the same conversation."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.ltrim(f"memora:{{0}}:{name}:history", 0, size - 1)
        pipe.hset(f"memora:{{0}}:{name}:summary", "message_count", str(size))
        await pipe.execute()


async def commands_of_a_turn(redis: ArqRedis, store: ConversationStore, size: int) -> tuple[int, int, int]:
    """Commands sent, bytes received by the server and bytes sent by it for one load and one append."""
    name = f"size-{size}"
    before = await traffic(redis)
    conversation = await store.load(name, most_useful_messages(BUDGET))
    await store.append(name, turn(conversation, "counted"))
    after = await traffic(redis)
    # The second look at the figures is itself one command of about a hundred bytes in and some kilobytes out.
    idle = await traffic(redis)
    return tuple(b - a - (c - b) for a, b, c in zip(before, after, idle, strict=True))  # type: ignore[return-value]


async def traffic(redis: ArqRedis) -> tuple[int, int, int]:
    info = await redis.info("stats")
    clients = await redis.info("commandstats")
    calls = sum(entry["calls"] for name, entry in clients.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))
    return calls, info["total_net_input_bytes"], info["total_net_output_bytes"]


async def run(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        redis = open_redis(server.url)
        store = ConversationStore(redis)
        costs = await measure(redis, store, rounds)
        turns = {size: await commands_of_a_turn(redis, store, size) for size in SIZES}
        await close_redis(redis)
    shortest, longest = costs[SIZES[0]], costs[SIZES[-1]]
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, {find_engine(None)}",
        "rounds": rounds,
        "microseconds": {size: vars(replace(cost)) for size, cost in costs.items()},
        "pings": {
            size: {"load": cost.load / cost.ping, "append": cost.append / cost.ping} for size, cost in costs.items()
        },
        "ratio": {"load": longest.load / shortest.load, "append": longest.append / shortest.append},
        "a_turn": {
            size: dict(zip(("commands", "bytes_to_redis", "bytes_from_redis"), found, strict=True))
            for size, found in turns.items()
        },
    }


def failures(report: dict[str, Any]) -> list[str]:
    found = [
        f"{what} at the longest history costs {ratio:.2f} times as much as at the shortest"
        for what, ratio in report["ratio"].items()
        if ratio > MOST_RATIO
    ]
    for size, pings in report["pings"].items():
        found += [f"{what} at {size} costs {cost:.1f} PINGs" for what, cost in pings.items() if cost > MOST_PINGS]
    found += [
        f"a turn at {size} takes {cost['commands']} commands"
        for size, cost in report["a_turn"].items()
        if cost["commands"] > 2
    ]
    return found


def show(report: dict[str, Any]) -> None:
    print(report["machine"], f"· medians of {report['rounds']} rounds, all sizes in each round\n")
    print(
        f"{'messages':>9}  {'load µs':>8}  {'append µs':>9}  {'PING µs':>8}  {'load/PING':>9}  {'append/PING':>11}"
        f"  {'commands':>8}  {'bytes to':>8}  {'bytes from':>10}"
    )
    for size in SIZES:
        cost, pings, a_turn = report["microseconds"][size], report["pings"][size], report["a_turn"][size]
        print(
            f"{size:>9,}  {cost['load']:>8.0f}  {cost['append']:>9.0f}  {cost['ping']:>8.0f}  {pings['load']:>9.2f}"
            f"  {pings['append']:>11.2f}  {a_turn['commands']:>8}  {a_turn['bytes_to_redis']:>8,}"
            f"  {a_turn['bytes_from_redis']:>10,}"
        )
    ratio = report["ratio"]
    print(f"\n{SIZES[-1]:,} against {SIZES[0]}: load × {ratio['load']:.2f}, append × {ratio['append']:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.rounds))
    print(json.dumps(report, indent=2)) if arguments.json else show(report)
    problems = failures(report)
    for problem in problems:
        print(f"flat_cost: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
