"""What many conversations cost one Redis, and what one worker can do.

    python benchmarks/growth.py [--quick] [--json]

Fills a private Redis with copies of a conversation of twenty turns that the engine made, to 100, 1,000 and 10,000 of
them, and looks at each size: what they take at rest, what an idle worker asks for, and what a turn with its fold costs
Redis, the process that answers and the worker. Turns go to conversations chosen at random, sixteen at once, with a real
worker behind them and a model endpoint without delay; each figure is per turn or per fold, so that the speed of the
machine matters only where time is in it. At last workers of two sizes take on a backlog.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from cost import all_turns
from measuring import Report, Row, busy_seconds, clean_environment, endpoint, process, show, until
from ways import Engine, caught_up, copies, grow

from memora.bootstrap import Memora, open_memora
from memora.cli.runner import event_loop
from memora.embedded_redis import EmbeddedRedis
from memora.fold import Folded
from memora.settings import Settings

PARTS: Final = ("history", "summary", "folds", "turns", "context", "events")
TEMPLATE_TURNS: Final = 20
AT_ONCE: Final = 16


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    sizes: tuple[int, ...] = (100, 1_000, 10_000)
    turns: int = 600
    resting_seconds: float = 5.0
    backlog: int = 600
    concurrencies: tuple[int, ...] = (10, 200)


QUICK: Final = Effort((10, 20), 20, 0.5, 20, (10,))


@dataclass(frozen=True)
class Usage:
    """What was used up to a moment."""

    redis_seconds: float
    commands: int
    bytes_in: int
    bytes_out: int
    here_seconds: float
    worker_seconds: float


async def usage(memora: Memora, worker_pid: int) -> Usage:
    """What Redis, this process and the worker have used so far."""
    redis = memora.storage.redis
    cpu, stats = await redis.info("cpu"), await redis.info("stats")
    return Usage(
        redis_seconds=cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        commands=stats["total_commands_processed"],
        bytes_in=stats["total_net_input_bytes"],
        bytes_out=stats["total_net_output_bytes"],
        here_seconds=time.process_time(),
        worker_seconds=busy_seconds(worker_pid),
    )


@contextmanager
def worker(environment: Mapping[str, str], log: Path, concurrency: int = 10) -> Iterator[int]:
    """`memora worker` with so many folds at once; its process."""
    environment = {**environment, "MEMORA_WORKER_CONCURRENCY": str(concurrency)}
    with process(["-m", "memora", "worker"], environment, log) as child:
        yield child.pid


async def make_template(memora: Memora) -> dict[str, bytes]:
    """The keys of a conversation of twenty turns, folded as far as it goes, as Redis dumps them."""
    way, redis = Engine(memora), memora.storage.redis
    for _ in range(TEMPLATE_TURNS):
        await way.turn("template")
        while isinstance(await memora.folds.fold("template"), Folded):
            pass
    return {part: await redis.dump(f"memora:{{0}}:template:{part}") for part in PARTS}


async def fill(memora: Memora, template: Mapping[str, bytes], numbers: range) -> float:
    """Add so many conversations; what each of them takes, in bytes."""
    redis = memora.storage.redis
    before = (await redis.info("memory"))["used_memory"]
    for start in range(numbers.start, numbers.stop, 100):
        async with redis.pipeline(transaction=False) as pipe:
            for number in range(start, min(start + 100, numbers.stop)):
                for part, dump in template.items():
                    pipe.restore(f"memora:{{0}}:many-{number}:{part}", 0, dump)
                pipe.zadd("memora:{0}:conversations", {f"many-{number}": number})
            await pipe.execute()
    after = (await redis.info("memory"))["used_memory"]
    return float(after - before) / len(numbers)


async def work(memora: Memora, size: int, turns: int) -> None:
    """So many turns in conversations chosen at random, none of them twice at the same time."""
    dice, way, left = random.Random(size), Engine(memora), turns
    while left:
        chosen = dice.sample(range(size), min(size, left))
        await all_turns(way, [f"many-{number}" for number in chosen], AT_ONCE)
        left -= len(chosen)


async def one_size(memora: Memora, size: int, worker_pid: int, effort: Effort) -> dict[str, float]:
    """What an idle worker asks of Redis, and what turns and their folds cost."""
    first = await usage(memora, worker_pid)
    await anyio.sleep(effort.resting_seconds)
    rested = await usage(memora, worker_pid)
    folded = await versions(memora)
    before = await usage(memora, worker_pid)
    started = time.perf_counter()
    await work(memora, size, effort.turns)
    here = time.process_time() - before.here_seconds
    await caught_up(memora)
    seconds = time.perf_counter() - started
    after = await usage(memora, worker_pid)
    folds = await versions(memora) - folded
    idle = {name: (vars(rested)[name] - vars(first)[name]) / effort.resting_seconds for name in vars(first)}
    used = {name: vars(after)[name] - vars(before)[name] - idle[name] * seconds for name in vars(first)}
    return {
        "at rest: commands a second, those in scripts too": idle["commands"],
        "at rest: Redis, ms of CPU a second": idle["redis_seconds"] * 1e3,
        "at rest: worker, ms of CPU a second": idle["worker_seconds"] * 1e3,
        "a turn and its fold: commands, those in scripts too": used["commands"] / effort.turns,
        "a turn and its fold: bytes to Redis": used["bytes_in"] / effort.turns,
        "a turn and its fold: bytes from Redis": used["bytes_out"] / effort.turns,
        "a turn and its fold: Redis, ms of CPU": used["redis_seconds"] / effort.turns * 1e3,
        "a turn: process that answers, ms of CPU": here / effort.turns * 1e3,
        "a fold: worker, ms of CPU": used["worker_seconds"] / folds * 1e3,
        "folds a turn": folds / effort.turns,
    }


async def versions(memora: Memora) -> int:
    """How many folds there are in all; asked in one go so that it costs the same before and after."""
    redis = memora.storage.redis
    ids = await redis.zrange("memora:{0}:conversations", 0, -1)
    async with redis.pipeline(transaction=False) as pipe:
        for conversation_id in ids:
            pipe.hget(f"memora:{{0}}:{conversation_id.decode()}:summary", "version")
        return sum(int(version or 0) for version in await pipe.execute())


async def backlog(memora: Memora, environment: Mapping[str, str], home: Path, effort: Effort) -> dict[str, float]:
    """Folds a second, and processor time of each, of a worker that finds many conversations waiting."""
    redis, found = memora.storage.redis, dict[str, float]()
    for concurrency in effort.concurrencies:
        await redis.flushdb()
        await grow(memora, "template", 10)
        names = [f"late-{number}" for number in range(effort.backlog)]
        await copies(redis, "template", names)
        await all_turns(Engine(memora), names, AT_ONCE)
        with worker(environment, home / f"backlog-{concurrency}.log", concurrency) as pid:
            await until(partial(_has_begun, memora, effort.backlog), every=0.005)
            first, cpu, started = await redis.zcard("memora:{0}:pending"), busy_seconds(pid), time.perf_counter()
            await caught_up(memora)
            seconds, cpu = time.perf_counter() - started, busy_seconds(pid) - cpu
        found[f"backlog, {concurrency} folds at once: folds a second"] = first / seconds
        found[f"backlog, {concurrency} folds at once: ms of CPU a fold"] = cpu / first * 1e3
    return found


async def _has_begun(memora: Memora, backlog: int) -> bool:
    """Whether a tenth of the backlog is folded: what a worker needs to start is behind it then."""
    return bool(await memora.storage.redis.zcard("memora:{0}:pending") < backlog * 0.9)


async def run(effort: Effort) -> Report:
    report, columns = Report(), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory(prefix="memora-growth-") as folder, ExitStack() as stack:
        home = Path(folder)
        redis = stack.enter_context(EmbeddedRedis(home / "redis"))
        url, _ = stack.enter_context(endpoint(clean_environment(home), home / "endpoint.log"))
        model = {"OPENAI_BASE_URL": f"{url}/instant/v1", "OPENAI_API_KEY": "benchmark"}
        environment = clean_environment(home) | model | {"MEMORA_REDIS_URL": redis.url}
        settings = Settings(
            _env_file=None,
            redis_url=redis.url,
            openai_base_url=model["OPENAI_BASE_URL"],
            openai_api_key="benchmark",
            data_dir=home,
        )
        async with open_memora(settings) as memora:
            template = await make_template(memora)
            with worker(environment, home / "worker.log") as pid:

                async def is_up() -> bool:
                    return await memora.storage.workers() > 0

                await until(is_up)
                filled = 0
                for size in effort.sizes:
                    each = await fill(memora, template, range(filled, size))
                    filled = size
                    found = await one_size(memora, size, pid, effort)
                    columns[f"{size:,}"] = {"at rest: bytes a conversation": each, **found}
            waiting = await backlog(memora, environment, home, effort)
    for name in next(iter(columns.values())):
        report.add(Row(name, "", {size: column[name] for size, column in columns.items()}))
    for name, value in waiting.items():
        report.add(Row(name, "", {"backlog": value}))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a look at whether it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = anyio.run(run, QUICK if options.quick else Effort(), backend_options=event_loop())
    print(json.dumps(report.as_record(), indent=2)) if options.json else show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
