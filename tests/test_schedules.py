"""All schedules: whatever order the steps of handlers, folds, sweeps and deletions happen in, every invariant holds.

The same schedules run against scripts from which one check was taken out, and then each time something is wrong: so
they would notice, and the check is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import pytest
from arq.connections import ArqRedis
from schedules import (
    Actors,
    Stage,
    Violation,
    append,
    begin,
    begin_again,
    commit,
    commit_one_turn,
    delete,
    explore,
    fail,
    lease_runs_out,
    load,
    load_fold,
    release,
    settle,
    sweep,
    take_back,
)

from memora.store import ConversationStore


@dataclass(frozen=True)
class Scenario:
    """Some actors, and how many turns there are before they begin."""

    turns: int
    actors: Actors


FOLD = (load_fold, commit, commit)
SMALL_FOLD = (load_fold, commit_one_turn, commit_one_turn)
FAILING_FOLD = (load_fold, fail, fail)
HANDLER = (load, append, append)
LOCKED_HANDLER = (begin, append, append)

NEVER = "if false then"
OTHER_LIFE = "if not state or life_of(state.generation) ~= life_of(generation) then"
NO_STATE = "if not state then"

SCENARIOS: Mapping[str, Scenario] = {
    "two handlers and a fold": Scenario(2, {"A": HANDLER, "B": (load, append), "fold": FOLD}),
    "two folds and a handler": Scenario(3, {"fold": SMALL_FOLD, "other": FOLD, "A": (load, append)}),
    "a fold and one that fails": Scenario(
        3, {"fold": SMALL_FOLD, "failing": FAILING_FOLD, "other": (load_fold, commit)}
    ),
    "a fold that finds nothing": Scenario(
        2, {"fold": (load_fold, commit), "idle": (load_fold, settle), "A": (load, append), "sweep": (sweep,)}
    ),
    "the id is used again": Scenario(
        2, {"deleter": (delete, begin_again), "fold": FOLD, "A": (load, append), "sweep": (sweep,)}
    ),
    "the id is used again by two handlers": Scenario(
        2, {"deleter": (delete, begin_again), "A": HANDLER, "failing": FAILING_FOLD}
    ),
    "locked handlers": Scenario(
        1, {"A": LOCKED_HANDLER, "B": (begin, append, release), "lease": (lease_runs_out,), "deleter": (delete,)}
    ),
    "the first turn of all": Scenario(
        0, {"A": LOCKED_HANDLER, "B": LOCKED_HANDLER, "deleter": (delete,), "lease": (lease_runs_out,)}
    ),
    "a message is taken back": Scenario(
        2, {"remover": (begin, take_back), "fold": (load_fold, commit), "A": (begin, append), "deleter": (delete,)}
    ),
    "a message is taken back from a fold that fails": Scenario(
        2, {"remover": (begin, take_back), "failing": FAILING_FOLD, "fold": (load_fold, commit)}
    ),
    "a message is taken back under a short lease": Scenario(
        2, {"remover": (begin, take_back), "lease": (lease_runs_out,), "A": (begin, append)}
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
async def test_every_schedule_keeps_every_invariant(redis: ArqRedis, store: ConversationStore, name: str) -> None:
    """Turns are whole, folds tile, tokens add up, and the dead leave nothing, after every step of every schedule."""
    scenario = SCENARIOS[name]
    explored = await explore(Stage(redis, store), scenario.actors, turns=scenario.turns)
    assert explored == _schedules(scenario.actors)


def test_there_are_thousands_of_schedules() -> None:
    """The scenarios are small, and all of their schedules together are many."""
    assert sum(_schedules(scenario.actors) for scenario in SCENARIOS.values()) > 5_000


def _schedules(actors: Actors) -> int:
    """In how many orders the steps of these actors can happen."""
    lengths = [len(steps) for steps in actors.values()]
    return math.factorial(sum(lengths)) // math.prod(math.factorial(length) for length in lengths)


@dataclass(frozen=True)
class Weakening:
    """A script without one of its checks or writes, and the scenario that must notice."""

    script: str
    text: str
    scenario: str
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.script}: {self.text[:50]}"


WEAKENINGS = [
    Weakening(
        "append_turn", "if state and redis.call('ZSCORE', turns, turn_id) then", "two handlers and a fold", NEVER
    ),
    Weakening(
        "append_turn",
        "if answered_in ~= '' and (not state or life_of(state.generation) ~= life_of(answered_in)) then",
        "the id is used again by two handlers",
        NEVER,
    ),
    Weakening(
        "append_turn",
        "if lock_token ~= '' and redis.call('GET', lock) ~= lock_token then return {-2} end",
        "locked handlers",
    ),
    Weakening("append_turn", "if lock_token ~= '' then redis.call('DEL', lock) end", "locked handlers"),
    Weakening("append_turn", "redis.call('ZADD', turns, count, turn_id)", "two handlers and a fold"),
    Weakening(
        "append_turn", "redis.call('ZADD', pending, 'NX', digits(now + grace_ms), id)", "two handlers and a fold"
    ),
    Weakening("append_turn", "\n  enqueue(queue, id, generation, folded)\n", "two handlers and a fold", "\n"),
    Weakening("begin_turn", "if holder and holder ~= token then", "locked handlers", NEVER),
    Weakening("release_lock", "if redis.call('GET', lock) ~= token then return 0 end", "locked handlers"),
    Weakening("commit_fold", OTHER_LIFE, "the id is used again", NO_STATE),
    Weakening("commit_fold", "if state.generation ~= generation or state", "a message is taken back", "if state"),
    Weakening("commit_fold", " or state.summarized_message_count ~= from then", "two folds and a handler", " then"),
    Weakening("commit_fold", "if known then", "two handlers and a fold", NEVER),
    Weakening("commit_fold", "FOLDS_REMEMBERED = 8", "two folds and a handler", "FOLDS_REMEMBERED = 1"),
    Weakening("commit_fold", "redis.call('ZREM', queue, job_of(id, generation, from))", "two handlers and a fold"),
    Weakening("commit_fold", "redis.call('DEL', 'arq:job:' .. job_of(id, generation, from),", "two handlers and a fold",
              "redis.call('DEL',"),
    Weakening("commit_fold", "if left_over(to) > 0 then", "two folds and a handler", NEVER),
    Weakening("commit_fold", "redis.call('ZREM', pending, id)", "two handlers and a fold"),
    Weakening("fail_fold", OTHER_LIFE, "the id is used again by two handlers", NO_STATE),
    Weakening("fail_fold", "if known_fold(summary, fold_id) then", "a fold and one that fails", NEVER),
    Weakening("fail_fold", "FOLDS_REMEMBERED = 8", "a fold and one that fails", "FOLDS_REMEMBERED = 1"),
    Weakening("fail_fold", "if not is_current then return 0 end", "a fold and one that fails"),
    Weakening("fail_fold", "state.generation == generation and", "a message is taken back from a fold that fails"),
    Weakening("settle_fold", "state.message_count ~= count", "a fold that finds nothing", "false"),
    Weakening("delete_conversation", "  forget_job(job_of(id, state[1], state[2]))", "the id is used again"),
    Weakening("delete_conversation", "take_off(pending, id)", "the id is used again", "0"),
    Weakening("delete_conversation", "summary, folds, turns, context, lock,", "the id is used again",
              "summary, turns, context, lock,"),
    Weakening("delete_conversation", "summary, folds, turns, context, lock,", "locked handlers",
              "summary, folds, turns, context,"),
    Weakening("remove_message", "'generation', new_generation, ", "a message is taken back"),
    Weakening("remove_message", "if redis.call('GET', lock) ~= lock_token then",
              "a message is taken back under a short lease", NEVER),
    Weakening("remove_message", "if position < folded then return -3 end", "a message is taken back"),
    Weakening("remove_message", "redis.call('ZREM', queue, old_job)", "a message is taken back"),
    Weakening("sweep", "if enqueue(queue, id, state[1], state[2]) then enqueued = enqueued + 1 end",
              "a fold that finds nothing"),
]  # fmt: skip


@pytest.mark.parametrize("weakening", WEAKENINGS, ids=str)
async def test_no_check_can_be_left_out(redis: ArqRedis, store: ConversationStore, weakening: Weakening) -> None:
    """Without it, at least one schedule breaks an invariant."""
    folder = resources.files("memora") / "lua"
    source = "".join((folder / f"{name}.lua").read_text("utf-8") for name in ("_prelude", weakening.script))
    assert source.count(weakening.text) == 1
    weakened = source.replace(weakening.text, weakening.instead)
    # Looks behind the door: the store has no way to be given other scripts, nor should it.
    store._scripts[weakening.script] = redis.register_script(weakened)
    scenario = SCENARIOS[weakening.scenario]
    with pytest.raises(Violation):
        await explore(Stage(redis, store), scenario.actors, turns=scenario.turns)
