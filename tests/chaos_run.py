"""The chaos suite: Memora as a group of real processes, and everything that can happen to them, for so many seconds.

    python tests/chaos_run.py --seconds 600 --seed 7

Two servers, three workers and two terminal chats share one Redis, behind a proxy, and one judging model. Meanwhile
processes are killed, frozen for longer than their leases and ended, Redis is killed and started again, lines are cut,
single requests and replies are lost, clocks jump, and the model fails in every way it knows. Then the storm ends, and
without another turn everything has to drain and to agree: history, ledger, folds, summaries, judge.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from chaos_checks import Stored, faults_of, is_drained, read_stored
from chaos_child import GUARDS
from chaos_clients import ChatClient, Habits, Ledger, WebClient
from chaos_processes import Child, RedisProcess
from polling import eventually
from serving import KEY
from tcp_proxy import TcpProxy

from memora.offline_model import OfflineModel
from memora.redis_connection import close_redis, open_redis

LEASE_SECONDS = 1.5
START_SECONDS = 120.0
DRAIN_SECONDS = 60.0

ANSWER_FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "status", "status": 500},
    {"kind": "status", "status": 429, "headers": {"retry-after-ms": "50"}},
    {"kind": "status", "status": 400},
    {"kind": "reset"},
    {"kind": "close"},
    {"kind": "cut"},
    {"kind": "hang"},
    {"kind": "drip", "seconds": 3.0},
    {"kind": "garbage"},
    {"kind": "truncated_json"},
    {"kind": "html"},
    {"kind": "empty"},
    {"kind": "refusal"},
    {"kind": "incomplete"},
    {"kind": "failed"},
    {"kind": "error_event"},
    {"kind": "no_terminal"},
    {"kind": "tool_call"},
    {"kind": "no_usage"},
    {"kind": "wrong_usage"},
    {"kind": "too_long"},
)
SUMMARY_FAULTS = (*ANSWER_FAULTS, {"kind": "whitespace"}, {"kind": "reasoning"}, {"kind": "echo"})

USUAL: Mapping[str, int] = {
    "kill a worker": 6,
    "freeze a worker": 3,
    "end a worker": 2,
    "kill a server": 4,
    "freeze a server": 3,
    "end a server": 1,
    "kill a chat": 3,
    "kill Redis": 2,
    "cut all lines": 2,
    "lose replies": 4,
    "lose requests": 3,
    "spoil answers": 4,
    "spoil summaries": 4,
    "model down": 1,
    "move a clock": 2,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is made of. `events` are weights; `weakened` is a guard that is taken out of the scripts.

    What is frozen stays so for longer than any lease: long enough for somebody else to take over and to go on.
    """

    seconds: float
    seed: int
    events: Mapping[str, int] = field(default_factory=lambda: USUAL)
    pause_seconds: float = 1.2
    habits: Habits = field(default_factory=Habits)
    web_clients: int = 16
    chat_clients: int = 2
    workers: int = 3
    summary_delay_seconds: float = 0.1
    piece_delay_seconds: float = 0.005
    model_timeout_seconds: float = 6.0
    frozen_seconds: tuple[float, float] = (2.5, 6.0)
    weakened: str = ""


DIRECTED: Mapping[str, Plan] = {
    "generation of a fold": Plan(
        12.0,
        1,
        events={"lose requests": 1},
        web_clients=6,
        chat_clients=0,
        habits=Habits(turns=(5, 7), deletes=1.0, streams=0.0, leaves=0.0, pause_seconds=0.02),
        summary_delay_seconds=1.5,
    ),
    "count of a fold": Plan(
        20.0,
        1,
        events={"freeze a worker": 1},
        pause_seconds=1.5,
        web_clients=12,
        chat_clients=0,
        habits=Habits(streams=0.0, leaves=0.0, pause_seconds=0.1),
        summary_delay_seconds=1.0,
        model_timeout_seconds=30.0,
        frozen_seconds=(2.5, 3.5),
    ),
    "turn id of an append": Plan(
        15.0, 1, events={"lose replies": 1}, pause_seconds=1.0, web_clients=0, chat_clients=3, workers=1
    ),
    "turn id of a retry": Plan(
        10.0,
        1,
        events={"lose requests": 1},
        web_clients=6,
        chat_clients=0,
        workers=1,
        habits=Habits(streams=0.0, leaves=0.5),
        piece_delay_seconds=0.02,
    ),
    "lock of a turn": Plan(
        25.0,
        1,
        events={"freeze a server": 1},
        pause_seconds=2.0,
        web_clients=10,
        chat_clients=0,
        workers=1,
        habits=Habits(streams=1.0, gives_up=1.0, leaves=0.0, pause_seconds=0.05),
        piece_delay_seconds=0.1,
        model_timeout_seconds=30.0,
        frozen_seconds=(5.0, 7.0),
    ),
}
"""For each guard the traffic that needs it, so that a run without the guard goes wrong in seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: what was done, what came of it, and what is wrong, one line each."""

    tally: Mapping[str, int]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        figures = "\n".join(f"  {name:<28}{number:>8,}" for name, number in self.tally.items())
        return f"{figures}\n" + "\n".join(self.faults or ("nothing lost, nothing twice, no gap unreported",))


class Chaos:
    """One run: the processes, the clients and the storm."""

    def __init__(self, plan: Plan, directory: Path, model: OfflineModel, redis: RedisProcess, proxy: TcpProxy) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._model = model
        self._redis = redis
        self._proxy = proxy
        self._done: Counter[str] = Counter()
        self._is_over = False
        self.ledger = Ledger(model.judge)
        self.ports = [_free_port() for _ in range(2)]
        environment = {
            "CHAOS_LEASE_SECONDS": str(LEASE_SECONDS),
            "CHAOS_WEAKEN": plan.weakened,
            "MEMORA_REDIS_URL": proxy.url,
            "MEMORA_FOLD_LEASE_SECONDS": "1",
            "MEMORA_FOLD_RETRY_SECONDS": "0.1",
            "MEMORA_ANSWER_TIMEOUT_SECONDS": str(plan.model_timeout_seconds),
            "MEMORA_SUMMARY_TIMEOUT_SECONDS": str(plan.model_timeout_seconds),
            "MEMORA_SHUTDOWN_GRACE_SECONDS": "2",
            "MEMORA_TOKEN_COUNTER": "local",
            "MEMORA_API_KEYS": KEY,
            "OPENAI_BASE_URL": model.url,
            "OPENAI_API_KEY": "test-key-0123",
        }

        def child(name: str, *arguments: str, **more: str) -> Child:
            return Child(name, list(arguments), {**environment, **more}, directory)

        self._auditor = child("audit", "audit", "--json", MEMORA_REDIS_URL=redis.url)
        self.workers = [child(f"worker-{number}", "worker") for number in range(plan.workers)]
        self.servers = [child(f"server-{port}", "serve", MEMORA_PORT=str(port)) for port in self.ports]
        self.chats = [child(f"chat-{number}", "chat") for number in range(plan.chat_clients)]

    async def run(self) -> Outcome:
        """The whole of it; every process is gone afterwards."""
        try:
            for process in (*self.workers, *self.servers):
                process.start()
            await self._all_serve()
            await self._talk_in_the_storm()
            return await self._judge()
        finally:
            for process in (*self.workers, *self.servers, *self.chats, self._auditor):
                process.send(signal.SIGCONT)
                process.kill()

    async def _talk_in_the_storm(self) -> None:
        limits = httpx2.Limits(max_connections=200, max_keepalive_connections=50)
        async with httpx2.AsyncClient(limits=limits, trust_env=False, verify=False) as http:
            clients: list[WebClient | ChatClient] = [
                WebClient(http, self.ports, self.ledger, self._plan.habits, self._rng_for(f"web {number}"))
                for number in range(self._plan.web_clients)
            ]
            clients += [ChatClient(chat, self.ledger, self._rng_for(chat.name)) for chat in self.chats]
            async with asyncio.TaskGroup() as tasks:
                for client in clients:
                    tasks.create_task(client.talk(lambda: self._is_over))
                await self._storm()
                self._is_over = True

    async def _storm(self) -> None:
        """One thing after the other, some of them lasting; to one process, one at a time."""
        deadline = time.monotonic() + self._plan.seconds
        names, weights = list(self._plan.events), list(self._plan.events.values())
        self._spare_folds()
        async with asyncio.TaskGroup() as lasting:
            while time.monotonic() < deadline:
                name = self._rng.choices(names, weights)[0]
                lasting.create_task(self._happen(name))
                await asyncio.sleep(self._plan.pause_seconds * self._rng.uniform(0.2, 1.8))
        self._model.clear_faults()
        self._spare_folds()
        for process in (*self.workers, *self.servers, *self.chats):
            process.move_clock(0.0)

    async def _happen(self, name: str) -> None:
        happening, _, kind = name.partition(" a ")
        pool = {"worker": self.workers, "server": self.servers, "chat": self.chats}.get(kind, [])
        if happening in _TO_PROCESSES:
            free = [child for child in (pool or [*self.workers, *self.servers]) if not child.busy]
            if not free:
                return
            child = self._rng.choice(free)
            child.busy = True
            try:
                await _TO_PROCESSES[happening](self, child)
            finally:
                child.busy = False
        else:
            await _TO_THE_REST[name](self)
        self._done[name] += 1

    async def _kill(self, child: Child) -> None:
        child.send(signal.SIGKILL)
        await self._come_back(child)

    async def _end(self, child: Child) -> None:
        await child.end(signal.SIGTERM)
        await self._come_back(child)

    async def _come_back(self, child: Child) -> None:
        """Start again what has ended; a chat is started by the one who sits in front of it."""
        if child.process is None or child in self.chats:
            return
        await asyncio.to_thread(child.process.wait)
        await asyncio.sleep(self._rng.uniform(0, 0.5))
        child.start()
        # A process that has not come up yet would be killed again before it has done anything.
        await asyncio.sleep(3.0)

    async def _freeze(self, child: Child) -> None:
        child.send(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(*self._plan.frozen_seconds))
        child.send(signal.SIGCONT)

    async def _move(self, child: Child) -> None:
        child.move_clock(self._rng.choice((-86_400.0, -3_600.0, -7.0, 7.0, 3_600.0, 86_400.0)))
        await asyncio.sleep(self._rng.uniform(1, 5))

    async def _kill_redis(self) -> None:
        await self._redis.kill()
        await asyncio.sleep(self._rng.uniform(0, 0.7))
        self._redis.start()

    async def _cut_lines(self) -> None:
        self._proxy.cut_lines()

    async def _lose_replies(self) -> None:
        self._proxy.lose_reply_to(self._rng.choice((b"[#", b"[#", b"EVALSHA")), self._rng.randint(1, 2))

    async def _lose_requests(self) -> None:
        self._proxy.lose_request_with(self._rng.choice((b"[#", b"EVALSHA", b"arq")), self._rng.randint(1, 3))

    async def _spoil_answers(self) -> None:
        self._model.add_fault(self._rng.choice(ANSWER_FAULTS), match="answer", times=self._rng.randint(1, 6))

    async def _spoil_summaries(self) -> None:
        match = self._rng.choice(("summary", "summary", "summary", "shorten"))
        self._model.add_fault(self._rng.choice(SUMMARY_FAULTS), match=match, times=self._rng.randint(1, 4))
        self._spare_folds()

    def _spare_folds(self) -> None:
        """Folds take their time again; the rules that were there come first."""
        if self._plan.summary_delay_seconds:
            self._model.add_fault(match="summary", delay_seconds=self._plan.summary_delay_seconds)

    async def _model_down(self) -> None:
        await self._model.stop()
        await asyncio.sleep(self._rng.uniform(0.5, 2.0))
        await self._model.start()

    async def _all_serve(self) -> None:
        async with httpx2.AsyncClient(trust_env=False, verify=False) as http:

            async def answer() -> bool:
                try:
                    replies = [await http.get(f"http://127.0.0.1:{port}/livez") for port in self.ports]
                except httpx2.TransportError:
                    return False
                return all(reply.status_code == 200 for reply in replies)

            await eventually(answer, seconds=START_SECONDS)

    async def _judge(self) -> Outcome:
        redis = open_redis(self._redis.url)
        try:
            stopped = time.monotonic()
            faults: list[str] = []
            try:
                await eventually(lambda: is_drained(redis), seconds=DRAIN_SECONDS)
            except AssertionError:
                faults.append(f"not drained {DRAIN_SECONDS:.0f} s after the last turn")
            drained = time.monotonic() - stopped
            newest = {life.conversation_id: life for life in self.ledger.lives}
            stored = {
                conversation_id: await read_stored(redis, conversation_id)
                for conversation_id, life in newest.items()
                if not life.is_deleted
            }
        finally:
            await close_redis(redis)
        faults += await self._audit()
        verdict = self._model.judge.verdict()
        faults += [str(violation) for violation in verdict["violations"]]
        faults += [fault for name, found in stored.items() for fault in faults_of(newest[name], found)]
        return Outcome(self._tally(stored, verdict, drained), tuple(faults))

    async def _audit(self) -> list[str]:
        """What `memora audit` finds."""
        self._auditor.start(with_pipes=True)
        said = json.loads(await asyncio.to_thread(self._auditor.output))
        return [] if said["ok"] else [str(finding) for finding in said["findings"]] or ["the audit is not ok"]

    def _tally(self, stored: Mapping[str, Stored], verdict: Mapping[str, Any], drained: float) -> dict[str, int]:
        kills = sum(number for name, number in self._done.items() if name.startswith("kill "))
        return {
            "turns answered": self.ledger.counts["ok"],
            "turns failed": self.ledger.counts["failed"],
            "turns unknown": self.ledger.counts["unknown"],
            "tries again": self.ledger.counts["retries"],
            "conversations": len(self.ledger.lives),
            "conversations deleted": self.ledger.counts["deleted"],
            "gap messages, all reported": self.ledger.counts["gap_messages"],
            "requests judged": verdict["requests"],
            "summary requests judged": verdict["folds"],
            "folds committed": sum(len(found.folds) for found in stored.values()),
            "folds failed": sum(found.number("fold_failures") for found in stored.values()),
            "conflicts caught": sum(found.number("fold_conflicts") for found in stored.values()),
            "process kills": kills,
            "replies lost": self._proxy.lost_replies,
            "requests lost": self._proxy.lost_requests,
            **{f"· {name}": number for name, number in sorted(self._done.items())},
            "seconds to drain": round(drained),
        }

    def _rng_for(self, name: str) -> random.Random:
        return random.Random(f"{self._plan.seed} {name}")


_TO_PROCESSES: dict[str, Callable[[Chaos, Child], Awaitable[None]]] = {
    "kill": Chaos._kill,
    "end": Chaos._end,
    "freeze": Chaos._freeze,
    "move": Chaos._move,
}
_TO_THE_REST: dict[str, Callable[[Chaos], Awaitable[None]]] = {
    "kill Redis": Chaos._kill_redis,
    "cut all lines": Chaos._cut_lines,
    "lose replies": Chaos._lose_replies,
    "lose requests": Chaos._lose_requests,
    "spoil answers": Chaos._spoil_answers,
    "spoil summaries": Chaos._spoil_summaries,
    "model down": Chaos._model_down,
}


async def run_chaos(plan: Plan, directory: Path) -> Outcome:
    """Run a plan in an empty directory whose path is short enough for a socket."""
    redis = RedisProcess(directory)
    redis.start()
    try:
        model = OfflineModel(scriptable=True, judging=True, piece_delay_seconds=plan.piece_delay_seconds)
        async with model, TcpProxy(redis.url) as proxy:
            chaos = Chaos(plan, directory, model, redis, proxy)
            return await chaos.run()
    finally:
        await redis.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    """Run once and print the tally. Returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python tests/chaos_run.py", description=main.__doc__)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--plan", choices=DIRECTED, help="traffic that needs one guard, instead of everything")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="keep everything in this directory, of a short path")
    parser.add_argument("--weaken", default="", choices=("", *GUARDS), help="take one guard out of the scripts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memora-chaos-") as directory:
        plan = DIRECTED.get(options.plan, Plan(60.0, 1))
        plan = replace(plan, seed=options.seed, seconds=options.seconds or plan.seconds, weakened=options.weaken)
        outcome = asyncio.run(run_chaos(plan, options.logs or Path(directory)))
    sys.stdout.write(f"{outcome}\n")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
