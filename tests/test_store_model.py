"""The store beside a plain Python model of it: whatever happens in whatever order, both tell the same story."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from turns import MOST_MESSAGES, WINDOW_MESSAGES, fold_result, turn

from memora.core.conversation import Conversation
from memora.core.window import Window
from memora.embedded_redis import EmbeddedRedis
from memora.errors import ConversationDeleted, ConversationNotFound
from memora.fold_queue import QUEUE, job_id
from memora.redis_connection import close_redis, open_redis
from memora.store import CommitStatus, ConversationStore, FoldSnapshot, Turn

Result = TypeVar("Result")

IDS = ("a", "history")
"""One of them is named like a key of the store."""


@dataclass
class Life:
    """A conversation as a plain list, from its first turn to its deletion."""

    window: Window
    turns: list[str] = field(default_factory=list)
    folded: int = 0
    folds: list[tuple[int, int]] = field(default_factory=list)
    fold_tokens: int = 0

    @property
    def messages(self) -> int:
        return 2 * len(self.turns)

    @property
    def window_messages(self) -> int:
        return self.window.holding(self.messages - self.folded)

    @property
    def pending(self) -> int:
        return max(0, self.messages - self.window_messages - self.folded)


@dataclass(frozen=True)
class InFlight:
    """A fold between its load and its commit."""

    life: Life
    snapshot: FoldSnapshot
    fold_id: str
    folded: int


class StoreMachine(RuleBasedStateMachine):
    """Drives the real store and the model side by side."""

    def __init__(self, url: str, window: Window) -> None:
        super().__init__()
        self.window = window
        self.runner = asyncio.Runner()
        self.redis = open_redis(url)
        self.store = ConversationStore(self.redis)
        self.lives: dict[str, Life] = {}
        self.number = 0
        self.run(self.redis.flushall())

    in_flight: Bundle[InFlight] = Bundle("in_flight")
    answering: Bundle[tuple[str, Life | None, Conversation]] = Bundle("answering")

    def run(self, awaitable: Awaitable[Result]) -> Result:
        async def await_it() -> Result:
            return await awaitable

        return self.runner.run(await_it())

    def teardown(self) -> None:
        self.run(close_redis(self.redis))
        self.runner.close()

    def turn(self, conversation: Conversation, number: int | str, turn_id: str = "") -> Turn:
        most = self.window.most_messages
        return turn(conversation, number, window=self.window.messages, most_window=most, turn_id=turn_id)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    @rule(name=st.sampled_from(IDS), times=st.integers(1, 5))
    def append(self, name: str, times: int) -> None:
        for _ in range(times):
            number = self.next_number()
            conversation = self.run(self.store.load(name, MOST_MESSAGES))
            appended = self.run(self.store.append(name, self.turn(conversation, number)))
            life = self.lives.setdefault(name, Life(self.window))
            life.turns.append(f"turn-{number}")
            assert not appended.repeated
            assert appended.message_count == life.messages
            assert appended.summarized_message_count == life.folded
            assert appended.pending_messages == life.pending

    @rule(name=st.sampled_from(IDS), which=st.integers(0, 63))
    def repeat_append(self, name: str, which: int) -> None:
        life = self.lives.get(name)
        if life is None:
            return
        turn_id = life.turns[-1 - which % min(len(life.turns), 64)]
        conversation = self.run(self.store.load(name, MOST_MESSAGES))
        appended = self.run(self.store.append(name, self.turn(conversation, "again", turn_id=turn_id)))
        assert appended.repeated
        assert appended.message_count == life.messages

    @rule(target=answering, name=st.sampled_from(IDS))
    def begin_answer(self, name: str) -> tuple[str, Life | None, Conversation]:
        return name, self.lives.get(name), self.run(self.store.load(name, MOST_MESSAGES))

    @rule(begun=consumes(answering))
    def end_answer(self, begun: tuple[str, Life | None, Conversation]) -> None:
        name, life, conversation = begun
        number = self.next_number()
        if life is not None and self.lives.get(name) is not life:
            with pytest.raises(ConversationDeleted):
                self.run(self.store.append(name, self.turn(conversation, number)))
            return
        self.run(self.store.append(name, self.turn(conversation, number)))
        self.lives.setdefault(name, Life(self.window)).turns.append(f"turn-{number}")

    @rule(target=in_flight, name=st.sampled_from(IDS))
    def begin_fold(self, name: str) -> InFlight:
        snapshot = self.run(self.store.load_fold(name, most_messages=MOST_MESSAGES, window=WINDOW_MESSAGES))
        life = self.lives.get(name)
        assert (snapshot is None) == (life is None)
        if snapshot is None or life is None:
            return multiple()  # type: ignore[return-value]  # Hypothesis: adds nothing to the bundle
        assert snapshot.window_messages == life.window_messages
        assert len(snapshot.work(snapshot.window_messages).messages) == life.pending
        return InFlight(life, snapshot, f"fold-{self.next_number()}", life.folded)

    @rule(fold=in_flight, messages=st.integers(1, 3), times=st.integers(1, 2))
    def end_fold(self, fold: InFlight, messages: int, times: int) -> None:
        """Commit, perhaps twice with the same id, as a client does that lost the first reply."""
        end = min(fold.folded + 2 * messages, fold.snapshot.message_count)
        if end == fold.folded:
            return
        name, alive = fold.snapshot.conversation_id, self.lives.get(fold.snapshot.conversation_id) is fold.life
        fresh = alive and fold.life.folded == fold.folded
        expected = CommitStatus.COMMITTED if fresh else CommitStatus.STALE if alive else CommitStatus.GONE
        for _ in range(times):
            committed = self.run(
                self.store.commit_fold(
                    fold.snapshot,
                    end,
                    fold_result(),
                    fold_id=self.fold_id(fold),
                    window_messages=self.window.messages,
                    most_window_messages=self.window.most_messages,
                )
            )
            assert committed.status is expected
        if alive:
            fold.life.fold_tokens += 10
        if fresh:
            fold.life.folds.append((fold.folded, end))
            fold.life.folded = end
        if expected is CommitStatus.COMMITTED:
            assert name in self.lives

    def fold_id(self, fold: InFlight) -> str:
        """A new id for each commit of a snapshot; the same one for its repetition."""
        return f"{fold.fold_id}-{fold.life.fold_tokens}"

    @rule(fold=in_flight)
    def fail_fold(self, fold: InFlight) -> None:
        again = self.run(
            self.store.fail_fold(
                fold.snapshot,
                fold_id=f"failure-{self.next_number()}",
                reason="no luck",
                rejected=False,
                input_tokens=7,
                output_tokens=3,
                delay_seconds=0,
            )
        )
        alive = self.lives.get(fold.snapshot.conversation_id) is fold.life
        assert again == (alive and fold.life.folded == fold.folded)
        if alive:
            fold.life.fold_tokens += 10

    @rule(name=st.sampled_from(IDS))
    def settle(self, name: str) -> None:
        """A fold that finds nothing to do takes the conversation out of the outbox."""
        snapshot = self.run(self.store.load_fold(name, most_messages=MOST_MESSAGES, window=WINDOW_MESSAGES))
        life = self.lives.get(name)
        if life is None or life.pending == 0:
            assert self.run(self.store.settle_fold(name, snapshot))

    @rule()
    def sweep(self) -> None:
        self.run(self.store.sweep(most=100, again_seconds=0, lease_seconds=1))

    @rule(name=st.sampled_from(IDS))
    def delete(self, name: str) -> None:
        assert self.run(self.store.delete(name)) == (self.lives.pop(name, None) is not None)

    @rule(name=st.sampled_from(IDS), times=st.integers(2, 5))
    def delete_and_use_again(self, name: str, times: int) -> None:
        """A new life that looks much like the old one: only the generation tells them apart."""
        if name in self.lives:
            self.delete(name)
            self.append(name, times)

    @invariant()
    def histories_agree(self) -> None:
        for name in IDS:
            life = self.lives.get(name)
            if life is None:
                with pytest.raises(ConversationNotFound):
                    self.run(self.contents(name))
                continue
            contents, folds = self.run(self.contents(name))
            numbers = [turn_id.removeprefix("turn-") for turn_id in life.turns]
            assert contents == [text for n in numbers for text in (f"question {n}", f"answer {n}")]
            assert folds == life.folds
            assert [start for start, _ in folds] == [0, *(end for _, end in folds)][: len(folds)]

    async def contents(self, name: str) -> tuple[list[str], list[tuple[int, int]]]:
        messages = [message.content async for message in self.store.messages(name)]
        return messages, [(fold.start, fold.end) async for fold in self.store.folds(name)]

    @invariant()
    def figures_agree(self) -> None:
        for name, life in self.lives.items():
            inspection = self.run(self.store.inspect(name, MOST_MESSAGES))
            conversation = inspection.conversation
            assert conversation.summary.summarized_message_count == life.folded
            assert conversation.summary.version == len(life.folds)
            assert conversation.usage.fold_tokens == life.fold_tokens
            assert len(conversation.tail) == life.messages - life.folded

    @invariant()
    def outbox_and_queue_cover_what_is_pending(self) -> None:
        pending = {member.decode() for member in self.run(self.redis.zrange("memora:{0}:pending", 0, -1))}
        assert {name for name, life in self.lives.items() if life.pending} <= pending <= set(self.lives)
        jobs = {member.decode() for member in self.run(self.redis.zrange(QUEUE, 0, -1))}
        for name, life in self.lives.items():
            generation = self.run(self.store.load(name, 2)).generation
            current = job_id(name, generation, life.folded)
            assert not life.pending or current in jobs

    @invariant()
    def the_dead_leave_nothing(self) -> None:
        keys = [key.decode() for key in self.run(self.redis.keys("*"))]
        for name in set(IDS) - set(self.lives):
            assert not [key for key in keys if key.startswith((f"memora:{{0}}:{name}:", f"arq:job:fold:{name}:"))]
        assert sorted(self.lives) == sorted(self.run(self.store.conversation_ids()))


@pytest.mark.parametrize("window", [Window(6, 6), Window(6, 10)], ids=["turn by turn", "batches of three"])
def test_the_store_agrees_with_a_plain_model_of_it(redis_server: EmbeddedRedis, window: Window) -> None:
    """Appends, repetitions, fresh, stale and failed folds, deletions and new lives keep every invariant."""

    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__(redis_server.url, window)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
