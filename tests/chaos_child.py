"""One `memora` command as always, run by the chaos suite with three things made reachable.

- `CHAOS_LEASE_SECONDS`: how long a conversation stays locked after its server died, which is a constant otherwise.
- `CHAOS_CLOCK`: a file with one double, the seconds by which `time.time` of this process is wrong. It can be changed
  while the process runs, which is what a corrected clock or a restored virtual machine looks like from inside.
- `CHAOS_WEAKEN`: a guard that is taken out of the scripts, to see whether anybody notices.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Guard(NamedTuple):
    """A check in a script, and what stands there without it."""

    script: str
    check: str
    weakened: str


GUARDS = {
    "generation of a fold": Guard(
        "commit_fold",
        "if not state or life_of(state.generation) ~= life_of(generation) then",
        # Every fold passes for one of the present generation.
        "generation = state and state.generation\nif not state then",
    ),
    "count of a fold": Guard(
        "commit_fold",
        "if state.generation ~= generation or state.summarized_message_count ~= from then",
        "if state.generation ~= generation then",
    ),
    "turn id of an append": Guard(
        "append_turn", "if state and redis.call('ZSCORE', turns, turn_id) then", "if false then"
    ),
    "turn id of a retry": Guard(
        "begin_turn", "local stored_at = redis.call('ZSCORE', turns, turn_id)", "local stored_at = false"
    ),
    "lock of a turn": Guard(
        "append_turn", "if lock_token ~= '' and redis.call('GET', lock) ~= lock_token then", "if false then"
    ),
}


def weakened(source: str, guard: Guard) -> str:
    """A script without one of its checks.

    Raises:
        ValueError: the check is not there, so the guard has to be written down anew.
    """
    if source.count(guard.check) != 1:
        raise ValueError(f"{guard.script} has no such check any more: {guard.check}")
    return source.replace(guard.check, guard.weakened)


def _movable_clock(path: Path) -> Callable[[], float]:
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    true_time = time.time
    return lambda: true_time() + float(struct.unpack("d", offset[:8])[0])


def _prepare() -> None:
    # Before anything of memora or arq is imported, because they import the function, not the module.
    time.time = _movable_clock(Path(os.environ["CHAOS_CLOCK"]))
    from memora import conversations, store  # noqa: PLC0415  # see above

    conversations.LEASE_SECONDS = float(os.environ["CHAOS_LEASE_SECONDS"])  # type: ignore[misc]  # a constant otherwise
    if name := os.environ.get("CHAOS_WEAKEN"):
        guard, source = GUARDS[name], store.script_source

        def without_guard(script: str) -> str:
            return weakened(source(script), guard) if script == guard.script else source(script)

        store.script_source = without_guard  # type: ignore[assignment]  # the cache in front of it is not missed


if __name__ == "__main__":
    _prepare()
    from memora.__main__ import main

    sys.exit(main())
