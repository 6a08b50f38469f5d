"""Every order in which the steps of several actors can happen to one conversation, run against a real server.

An actor is a sequence of steps, and a step is one call of the store: one script, so nothing can come between. `explore`
runs all interleavings, depth first: every beginning of a schedule is run and checked once, and what follows from it
starts from the server restored key by key. The ledger holds what the actors were told; `check` says what must then be
in Redis, and nothing else may be.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Protocol

from arq.connections import ArqRedis
from turns import MOST_MESSAGES, message, turn

from memora.core.conversation import Conversation
from memora.core.tokens import count_text_tokens
from memora.errors import ConversationDeleted, ConversationLocked, MemoraError, MessageSummarized
from memora.fold_queue import QUEUE, job_id
from memora.store import BegunTurn, Busy, CommitStatus, ConversationStore, FoldResult, FoldSnapshot

ID: Final = "talk"
WINDOW: Final = 2
"""One turn, so that the second turn of a conversation already makes the first one wait for a fold."""

_LEASE_SECONDS: Final = 600.0

_KEYS: Final = {
    part: f"memora:{{0}}:{ID}:{part}" for part in ("history", "summary", "folds", "turns", "context", "lock", "events")
}
_PENDING: Final = "memora:{0}:pending"
_CONVERSATIONS: Final = "memora:{0}:conversations"

_LOOK: Final = """
local readers = {string = {'GET'}, list = {'LRANGE', 0, -1}, hash = {'HGETALL'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'},
  stream = {'XRANGE', '-', '+'}}
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local reader = readers[redis.call('TYPE', key).ok]
  local value = redis.call(reader[1], key, unpack(reader, 2))
  found[#found + 1] = {key, value, redis.call('DUMP', key), redis.call('PEXPIRETIME', key)}
end
return found
"""
_TURN_BACK: Final = """
redis.call('FLUSHALL')
for i = 1, #ARGV, 3 do
  redis.call('RESTORE', ARGV[i], math.max(tonumber(ARGV[i + 2]), 0), ARGV[i + 1], 'ABSTTL')
end
"""


class Violation(AssertionError):
    """A schedule after which something is not as it must be; names the schedule."""


@dataclass(frozen=True)
class Ledger:
    """What the actors were told so far, and what they hold in hand; never changed, only replaced.

    A life of the conversation ends with its deletion, and a generation also when a message is taken back. All but
    `life`, `generation`, `dead`, `lock` and `hands` is about this life: `turns` in the order in which they were
    acknowledged, `stored` each turn id with the message count it led to, `folds` the first answer to each fold.
    """

    life: int = 0
    generation: int = 0
    dead: frozenset[str] = frozenset()
    lock: str = ""
    hands: Mapping[str, Hand] = field(default_factory=dict)
    turns: tuple[str, ...] = ()
    stored: Mapping[str, int] = field(default_factory=dict)
    context_position: int | None = None
    removed: frozenset[str] = frozenset()
    folded: int = 0
    folds: Mapping[str, CommitStatus] = field(default_factory=dict)
    failures: Mapping[str, bool] = field(default_factory=dict)
    failures_since_commit: int = 0
    newly_summarized: int = 0

    @property
    def message_count(self) -> int:
        """How long the history must be."""
        return 2 * len(self.turns)

    @property
    def pending(self) -> int:
        """How many messages must wait for a fold."""
        return max(0, self.message_count - WINDOW - self.folded)

    def hand(
        self, conversation: Conversation | None = None, snapshot: FoldSnapshot | None = None, lock: str = ""
    ) -> Hand:
        """What is loaded now."""
        return Hand(self.life, self.generation, conversation, snapshot, lock)

    def gives(self, name: str, hand: Hand) -> Ledger:
        """Put something into an actor's hand."""
        return replace(self, hands={**self.hands, name: hand})

    def grows(self, turn_id: str, turns: Sequence[str]) -> Ledger:
        """Turns were stored."""
        grown = (*self.turns, *turns)
        return replace(self, turns=grown, stored={**self.stored, turn_id: 2 * len(grown)})


@dataclass(frozen=True)
class Hand:
    """What an actor has loaded, of which life and generation, and under which lock."""

    life: int
    generation: int
    conversation: Conversation | None = None
    snapshot: FoldSnapshot | None = None
    lock: str = ""


class Step(Protocol):
    """One step of an actor: does it and says what the actors know afterwards, or raises AssertionError."""

    __name__: str

    def __call__(self, stage: Stage, ledger: Ledger, name: str) -> Awaitable[Ledger]: ...


Actors = Mapping[str, Sequence[Step]]


class Picture:
    """Everything in Redis at one moment, to be looked at and to be put back."""

    def __init__(self, found: Sequence[Any]) -> None:
        self.values: dict[str, Any] = {key.decode(): _text(value) for key, value, _, _ in found}
        self.dumps = [part for key, _, dumped, expires_at in found for part in (key, dumped, expires_at)]

    def mapping(self, key: str) -> dict[str, str]:
        """A hash, or the scores of a sorted set."""
        flat = self.values.get(key, [])
        return dict(zip(flat[::2], flat[1::2], strict=True))


class Stage:
    """The emptied server on which schedules are run."""

    def __init__(self, redis: ArqRedis, store: ConversationStore) -> None:
        self.redis = redis
        self.store = store
        self._look = redis.register_script(_LOOK)
        self._turn_back = redis.register_script(_TURN_BACK)

    async def look(self) -> Picture:
        """What there is."""
        return Picture(await self._look())

    async def turn_back(self, picture: Picture) -> None:
        """Make everything as it was."""
        await self._turn_back(args=picture.dumps)


async def explore(stage: Stage, actors: Actors, *, turns: int) -> int:
    """Run every schedule of these actors over a conversation with so many turns; how many there were.

    Raises:
        Violation: after one of them something is not as it must be.
    """
    await stage.redis.flushall()
    ledger = Ledger()
    for name in [f"before {number}" for number in range(turns)]:
        ledger, _ = await _take(stage, load, (), ledger, name)
        ledger, _ = await _take(stage, append, (), ledger, name)
    return await _descend(stage, actors, (), ledger, await stage.look())


async def _descend(stage: Stage, actors: Actors, path: tuple[str, ...], ledger: Ledger, before: Picture) -> int:
    """Run every schedule that begins with this path, the names of the actors so far; it has been run already."""
    schedules, is_as_before = 0, True
    for name, steps in actors.items():
        if path.count(name) == len(steps):
            continue
        if not is_as_before:
            await stage.turn_back(before)
        is_as_before = False
        told, picture = await _take(stage, steps[path.count(name)], path, ledger, name)
        schedules += await _descend(stage, actors, (*path, name), told, picture)
    return schedules or 1


async def _take(stage: Stage, step: Step, path: tuple[str, ...], ledger: Ledger, name: str) -> tuple[Ledger, Picture]:
    """Take one step, and look at everything after it."""
    try:
        told = await step(stage, ledger, name)
        picture = await stage.look()
        check(picture, told)
    except (AssertionError, MemoraError) as error:
        order = " | ".join((*path, f"{name}: {step.__name__}"))
        raise Violation(f"after {order}: {type(error).__name__}: {error}") from error
    return told, picture


# What an actor can do. A step that has become pointless, because an earlier one was refused, does nothing. An operation
# that is new to the store gets its step here, and a scenario in test_schedules.py.


async def load(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A handler without a lock loads what it answers from."""
    return ledger.gives(name, ledger.hand(await stage.store.load(ID, MOST_MESSAGES)))


async def begin(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A handler takes the lock and loads what it answers from."""
    begun = await stage.store.begin_turn(
        ID, lock_token=name, lease_seconds=_LEASE_SECONDS, turn_id=name, most_messages=MOST_MESSAGES, may_begin=True
    )
    if ledger.lock:
        assert isinstance(begun, Busy), "two handlers hold the lock"
        return ledger
    assert isinstance(begun, BegunTurn), "a lock that nobody holds is refused"
    return replace(ledger, lock=name).gives(name, ledger.hand(begun.conversation, lock=name))


async def append(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A handler stores its turn; a second time, as a client does that lost the reply."""
    hand = ledger.hands.get(name)
    if hand is None or hand.conversation is None:
        return ledger
    is_gone = hand.conversation.exists and hand.generation != ledger.generation
    is_known = name in ledger.turns
    is_locked_out = bool(hand.lock) and hand.lock != ledger.lock
    new = turn(hand.conversation, name, window=WINDOW, turn_id=name)
    try:
        appended = await stage.store.append(ID, replace(new, lock_token=hand.lock))
    except ConversationDeleted:
        assert is_gone, "a turn is told that its conversation was deleted"
        return ledger
    except ConversationLocked:
        assert is_locked_out, "a turn that holds its lock is told that it has lost it"
        assert not is_known, "a turn that is stored is told that it has lost its lock"
        return ledger
    assert not is_gone, "a turn of another generation is accepted"
    assert appended.repeated == is_known, "a repetition is not told from a new turn"
    if not is_known:
        assert not is_locked_out, "a turn is stored without its lock"
        assert name not in ledger.dead, "a turn that was deleted is back"
        ledger = replace(
            ledger.grows(name, [name]),
            context_position=ledger.message_count,
            newly_summarized=ledger.newly_summarized + appended.newly_summarized_messages,
            lock="" if hand.lock else ledger.lock,
        )
    figures = (appended.message_count, appended.summarized_message_count, appended.pending_messages)
    assert figures == (ledger.message_count, ledger.folded, ledger.pending)
    return ledger


async def release(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A handler gives its lock back, whoever holds it by now."""
    await stage.store.release_lock(ID, name)
    return replace(ledger, lock="" if ledger.lock == name else ledger.lock)


async def lease_runs_out(stage: Stage, ledger: Ledger, name: str) -> Ledger:  # noqa: ARG001  # a step like the others
    """The holder of the lock is silent for too long."""
    await stage.redis.delete(_KEYS["lock"])
    return replace(ledger, lock="")


async def load_fold(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A fold loads what it starts from."""
    snapshot = await stage.store.load_fold(ID, most_messages=MOST_MESSAGES, window=WINDOW)
    return ledger.gives(name, ledger.hand(snapshot=snapshot))


async def commit_one_turn(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A fold of the oldest turn commits; a second time, as a client does that lost the reply."""
    return await _commit(stage, ledger, name, most_messages=2)


async def commit(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A fold of everything that waits commits; a second time, as a client does that lost the reply."""
    return await _commit(stage, ledger, name, most_messages=MOST_MESSAGES)


async def _commit(stage: Stage, ledger: Ledger, name: str, *, most_messages: int) -> Ledger:
    hand = ledger.hands.get(name)
    if hand is None or hand.snapshot is None:
        return ledger
    work = hand.snapshot.work(WINDOW)
    messages = work.messages[:most_messages]
    if not messages:
        return ledger
    start = work.summary.summarized_message_count
    text = work.summary.text + _shown([message.content for message in messages])
    result = FoldResult(text, count_text_tokens(text), "some-model", 7, 3, 0.25)
    end = start + len(messages)
    committed = await stage.store.commit_fold(hand.snapshot, end, result, fold_id=name, window_messages=WINDOW)
    if hand.life != ledger.life:
        assert committed.status is CommitStatus.GONE, f"a fold of another life is {committed.status}"
        return ledger
    is_fresh = (hand.generation, start) == (ledger.generation, ledger.folded)
    fresh = CommitStatus.COMMITTED if is_fresh else CommitStatus.STALE
    expected = ledger.folds.get(name, fresh)
    assert committed.status is expected, f"a fold that must be {expected} is {committed.status}"
    if name not in ledger.folds:
        ledger = replace(ledger, folds={**ledger.folds, name: expected})
        if expected is CommitStatus.COMMITTED:
            ledger = replace(ledger, folded=end, failures_since_commit=0)
    figures = (committed.summarized_message_count, committed.version, committed.pending_messages)
    assert figures == (ledger.folded, _commits(ledger), ledger.pending)
    return ledger


async def fail(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A fold comes to nothing; a second time, as a client does that lost the reply."""
    hand = ledger.hands.get(name)
    if hand is None or hand.snapshot is None or not hand.snapshot.work(WINDOW).messages:
        return ledger
    tokens: dict[str, int] = {"input_tokens": 7, "output_tokens": 3}
    again = await stage.store.fail_fold(
        hand.snapshot, fold_id=name, reason="no luck", rejected=True, **tokens, delay_seconds=1
    )
    start = hand.snapshot.summary.summarized_message_count
    assert again == ((hand.generation, start) == (ledger.generation, ledger.folded))
    if hand.life == ledger.life and name not in ledger.failures:
        since = ledger.failures_since_commit + int(again)
        return replace(ledger, failures={**ledger.failures, name: again}, failures_since_commit=since)
    return ledger


async def settle(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """A fold that has found nothing to do takes the conversation out of the outbox."""
    hand = ledger.hands[name]
    if hand.snapshot and hand.snapshot.work(WINDOW).messages:
        return ledger
    settled = await stage.store.settle_fold(ID, hand.snapshot)
    seen = (hand.snapshot.message_count, hand.snapshot.summary.summarized_message_count) if hand.snapshot else None
    is_same = seen == (ledger.message_count, ledger.folded) and hand.generation == ledger.generation
    assert settled == (is_same or not ledger.turns), "a fold settles what it has not seen"
    return ledger


async def sweep(stage: Stage, ledger: Ledger, name: str) -> Ledger:  # noqa: ARG001  # a step like the others
    """The job is lost and the fold overdue: the sweep has to notice."""
    await stage.redis.zadd(_PENDING, {ID: 0}, xx=True)
    for job in await stage.redis.zrange(QUEUE, 0, -1):
        await stage.redis.delete(f"arq:job:{job.decode()}")
    await stage.redis.delete(QUEUE)
    swept = await stage.store.sweep(most=10, again_seconds=5, lease_seconds=1)
    expected = int(ledger.pending > 0)
    assert (swept.due, swept.enqueued, swept.dropped) == (expected, expected, 0)
    return ledger


async def delete(stage: Stage, ledger: Ledger, name: str) -> Ledger:  # noqa: ARG001  # a step like the others
    """The conversation is deleted."""
    deleted = await stage.store.delete(ID)
    assert deleted == bool(ledger.turns or ledger.lock)
    dead = ledger.dead.union(ledger.turns)
    return Ledger(life=ledger.life + 1, generation=ledger.generation + 1, dead=dead, hands=ledger.hands)


async def begin_again(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """The id is used again, for a history that looks just like the old one."""
    turns = ("again 0", "again 1")
    messages = [message(role, text) for number in turns for role, text in zip(_ROLES, _texts(number), strict=True)]
    await stage.store.import_messages(
        ID, messages, import_id=name, generation="", window_messages=WINDOW, lock_token=""
    )
    return ledger.grows(name, turns)


async def take_back(stage: Stage, ledger: Ledger, name: str) -> Ledger:
    """The oldest question that no summary stands for, as far as this actor knows, is taken back, under its lock."""
    hand = ledger.hands.get(name)
    if hand is None or hand.conversation is None or not hand.conversation.exists:
        return ledger
    position = hand.conversation.summary.summarized_message_count
    is_gone, is_locked_out = hand.generation != ledger.generation, hand.lock != ledger.lock
    is_summarized = position < ledger.folded
    try:
        await stage.store.remove_message(ID, hand.conversation.generation, position, lock_token=hand.lock)
    except ConversationDeleted:
        assert is_gone
        return ledger
    except ConversationLocked:
        assert is_locked_out
        return ledger
    except MessageSummarized:
        assert is_summarized
        return ledger
    assert (is_gone, is_locked_out, is_summarized) == (False, False, False)
    removed = ledger.removed | {_texts(ledger.turns[position // 2])[0]}
    return replace(ledger, generation=ledger.generation + 1, removed=removed, lock="")


# What must be true after every step.

_ROLES: Final = ("user", "assistant")


def check(picture: Picture, ledger: Ledger) -> None:
    """Compare all there is with what the ledger says there must be.

    Raises:
        AssertionError: something is missing, too much or different.
    """
    lock = {_KEYS["lock"]} if ledger.lock else set()
    assert picture.values.get(_KEYS["lock"], "") == ledger.lock
    if not ledger.turns:
        assert set(picture.values) == lock, "a key is left of a conversation that is gone"
        return
    state = picture.mapping(_KEYS["summary"])
    job = job_id(ID, state["generation"], ledger.folded)
    _check_keys(set(picture.values), ledger, job, lock)
    _check_history(picture, state, ledger)
    _check_folds(picture, state, ledger)
    _check_figures(state, ledger)
    assert list(picture.mapping(_CONVERSATIONS)) == [ID]
    assert list(picture.mapping(_PENDING)) == [ID] * bool(ledger.pending), "the outbox is not what is pending"
    assert list(picture.mapping(QUEUE)) == [job] * bool(ledger.pending), "the queue is not what is pending"
    _check_events(picture, ledger)


def _check_keys(keys: set[str], ledger: Ledger, job: str, lock: set[str]) -> None:
    expected = {_KEYS[part] for part in ("history", "summary", "turns", "events")} | {_CONVERSATIONS} | lock
    expected |= {_KEYS["folds"]} if ledger.folded else set()
    expected |= {_KEYS["context"]} if ledger.context_position is not None else set()
    expected |= {_PENDING, QUEUE, f"arq:job:{job}"} if ledger.pending else set()
    assert keys == expected


def _check_history(picture: Picture, state: Mapping[str, str], ledger: Ledger) -> None:
    records = [json.loads(record) for record in picture.values[_KEYS["history"]]]
    texts = [text for name in ledger.turns for text in _texts(name)]
    contents = [record["content"] for record in records]
    assert contents == ["" if text in ledger.removed else text for text in texts], "the history is not what was told"
    assert [record["role"] for record in records] == [*_ROLES] * len(ledger.turns)
    assert int(state["message_count"]) == len(records)
    assert {turn_id: int(count) for turn_id, count in picture.mapping(_KEYS["turns"]).items()} == ledger.stored
    if ledger.context_position is not None:
        assert json.loads(picture.values[_KEYS["context"]])["position"] == ledger.context_position


def _check_folds(picture: Picture, state: Mapping[str, str], ledger: Ledger) -> None:
    entries = [json.loads(entry) for entry in picture.values.get(_KEYS["folds"], [])]
    assert int(state["summarized_message_count"]) == ledger.folded <= ledger.message_count
    ends = [0, *(entry["to"] for entry in entries)]
    assert [entry["from"] for entry in entries] == ends[:-1], "the folds do not tile"
    assert all(start < end for start, end in pairwise(ends))
    assert ends[-1] == ledger.folded
    assert [entry["version"] for entry in entries] == [*range(1, len(entries) + 1)]
    assert int(state["version"]) == len(entries) == _commits(ledger)
    contents = [json.loads(record)["content"] for record in picture.values[_KEYS["history"]]]
    assert state["summary"] == _shown(contents[: ledger.folded]), "the summary is not of the messages it stands for"
    assert not entries or entries[-1]["summary"] == state["summary"]
    assert int(state["summary_tokens"]) == count_text_tokens(state["summary"])


def _check_figures(state: Mapping[str, str], ledger: Ledger) -> None:
    answers = sum(turn_id in ledger.turns for turn_id in ledger.stored)
    tries = len(ledger.folds) + len(ledger.failures)
    expected = {
        "answer_input_tokens": 10 * answers,
        "answer_output_tokens": 5 * answers,
        "fold_input_tokens": 7 * tries,
        "fold_output_tokens": 3 * tries,
        "fold_conflicts": len(ledger.folds) - _commits(ledger),
        "fold_failures": ledger.failures_since_commit,
        "fold_rejections": ledger.failures_since_commit,
    }
    assert {name: int(state.get(name, 0)) for name in expected} == expected
    if answers == len(ledger.stored):
        assert int(state["seen_summarized_message_count"]) == ledger.newly_summarized


def _check_events(picture: Picture, ledger: Ledger) -> None:
    told = Counter(json.loads(fields[1])["type"] for _, fields in picture.values[_KEYS["events"]])
    expected = Counter(
        turn=len(ledger.stored),
        fold=_commits(ledger),
        conflict=len(ledger.folds) - _commits(ledger),
        retry=sum(ledger.failures.values()),
        removed=len(ledger.removed),
    )
    assert told == expected


def _commits(ledger: Ledger) -> int:
    return sum(status is CommitStatus.COMMITTED for status in ledger.folds.values())


def _texts(name: str) -> tuple[str, str]:
    return f"question {name}", f"answer {name}"


def _shown(contents: Sequence[str]) -> str:
    """What the summariser of these tests makes of messages: whoever reads it knows what was shown, and how often."""
    return "".join(f"[{content}]" for content in contents)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else [_text(item) for item in value]
