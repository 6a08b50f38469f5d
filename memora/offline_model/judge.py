"""The judge: whether every request carries its whole conversation, seen from the model's side alone.

Owns what it has been shown, what it was told of the outcome of every turn, and the verdict. It must not know how a
context is chosen or stored: a request that leaves something out is judged by what the client was told, nothing else.

A client numbers the turns of a conversation from 0, sends one at a time, tries one again under its own number, and
reports how each ended. `ok`: answered, so it has to be visible in every later request, in the summary or word for word,
exactly once and in order, unless it is one of the `gap_messages` that the reply admitted to. `failed`: refused, so it
must never be seen. `unknown`: either. Messages have to be short beside the budget: a summary cut for the sake of a
long message is taken for a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from memora.core.prompts import EXISTING_SUMMARY_KEY, LIMITS_KEY, NEW_MESSAGES_KEY, SHORTEN_KEY
from memora.core.text import count_words
from memora.core.tokens import fits_in_tokens
from memora.offline_model.call import Call
from memora.offline_model.markers import Coverage, Marker, ReadSummary, Spans, read_markers, read_summary

Outcome = Literal["ok", "failed", "unknown"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("ok", "failed", "unknown")

MAX_SHOWN_VIOLATIONS: Final = 100
MAX_WAITING_TURNS: Final = 256
"""Turns of a conversation whose outcome nobody has reported yet; gaps of older ones are no longer judged."""

ViolationKind = Literal[
    "foreign",
    "repeated",
    "out_of_order",
    "half_turn",
    "unmarked",
    "several_markers",
    "summary",
    "overflow",
    "lost",
    "failed_but_visible",
    "unreported_gap",
    "overstated_gap",
    "never_asked",
]


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. `turn` is the one it was found at, None if it is about more than one."""

    kind: ViolationKind
    conversation: str
    turn: int | None
    detail: str

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Report:
    """How a turn ended for its client."""

    marker: Marker
    outcome: Outcome
    gap_messages: int = 0


@dataclass(slots=True)
class _Conversation:
    """What is known of one conversation. Every set is kept as spans, so it grows with the failures, not the turns.

    `passed_over` are turns that a request left out without their being in a gap; `gaps` are, by turn, what its
    requests left out between the summary and the tail, until the client says what it was told.
    """

    tag: str
    asked: Spans = field(default_factory=Spans)
    outcomes: dict[Outcome, Spans] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, Spans()))
    visible: Spans = field(default_factory=Spans)
    passed_over: Spans = field(default_factory=Spans)
    spoilt: Spans = field(default_factory=Spans)
    noted_messages: int = 0
    gaps: dict[int, tuple[Spans, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a run of messages shows: whole turns in order, and the question of a turn whose answer did not follow."""

    turns: tuple[int, ...]
    open_turn: int | None


class Judge:
    """Reads every request of a model in judging mode. One event loop uses it."""

    def __init__(self) -> None:
        self._conversations: dict[str, _Conversation] = {}
        self._counts: Counter[str] = Counter()
        self._violations: list[Violation] = []

    def read(self, call: Call) -> str | None:
        """Judge a request for a text; returns what the model says to it, None if it carries no marker at all."""
        reply = _READERS[call.kind](self, call)
        if reply is None:
            self._counts["unmarked_requests"] += 1
        return reply

    def spoil(self, call: Call, said: str) -> None:
        """Note that an answer goes out without its marker, so that its turn is no half one when it comes back."""
        for marker in read_markers(call.question) if call.kind == "answer" else ():
            if marker not in read_markers(said):
                conversation = self._conversation(marker.tag)
                conversation.spoilt = conversation.spoilt.with_number(marker.turn)

    def report(self, report: Report) -> None:
        """Take down how a turn ended. Reported again, the later outcome counts."""
        tag, turn = report.marker
        conversation = self._conversation(tag)
        one = Spans.between(turn, turn + 1)
        for outcome, turns in conversation.outcomes.items():
            conversation.outcomes[outcome] = turns.union(one) if outcome == report.outcome else turns.difference(one)
        gaps = conversation.gaps.pop(turn, ())
        if report.outcome == "failed" and turn in conversation.visible:
            self._object("failed_but_visible", tag, turn, "the client was told that nothing was stored")
        if report.outcome == "ok":
            self._counts["gap_messages"] += report.gap_messages
            self._judge_gap(conversation, report, gaps)

    def verdict(self) -> dict[str, Any]:
        """Everything so far, as JSON."""
        violations = [*self._violations, *self._losses()]
        count = self._counts["violations"] + len(violations) - len(self._violations)
        return {
            "ok": not count,
            "requests": self._counts["requests"],
            "folds": self._counts["folds"],
            "unmarked_requests": self._counts["unmarked_requests"],
            "conversations": len(self._conversations),
            "markers": sum(len(conversation.asked) for conversation in self._conversations.values()),
            "reported": {
                outcome: sum(len(conversation.outcomes[outcome]) for conversation in self._conversations.values())
                for outcome in OUTCOMES
            },
            "gap_messages": self._counts["gap_messages"],
            "violations": [violation.shown() for violation in violations[:MAX_SHOWN_VIOLATIONS]],
            "violation_count": count,
        }

    def _read_answer_call(self, call: Call) -> str | None:
        spoken = [message for message in call.messages if message[0] in {"user", "assistant"}]
        asked = read_markers(call.question)
        if not asked:
            earlier = _tag(read_summary(call.summary), spoken)
            if earlier is not None:
                self._object("unmarked", earlier, None, "the current message has no marker, and earlier ones have")
            return None
        if len(asked) > 1:
            self._object("several_markers", asked[0].tag, asked[0].turn, "the current message has more than one")
        tag, turn = asked[0]
        conversation = self._conversation(tag)
        self._counts["requests"] += 1
        coverage = self._settled(conversation, self._summary(conversation, call.summary), turn)
        shown = self._follow(conversation, spoken[:-1] if spoken[-1][0] == "user" else spoken, None)
        if shown.open_turn is not None:
            self._object("half_turn", tag, shown.open_turn, f"its answer is missing from the request of turn {turn}")
        self._judge_order(conversation, coverage, (*shown.turns, turn))
        self._note_missing(conversation, coverage.turns, Spans.of(shown.turns), turn)
        conversation.asked = conversation.asked.with_number(turn)
        return f"{asked[0]} I have read this and the {len(coverage.turns) + len(shown.turns)} turns before it."

    def _read_summary_call(self, call: Call) -> str | None:
        messages = [
            (item["role"], item["content"]) for item in call.document[NEW_MESSAGES_KEY] if not _is_later_part(item)
        ]
        existing = read_summary(call.document[EXISTING_SUMMARY_KEY])
        tag = _tag(existing, messages)
        if tag is None:
            return None
        conversation = self._conversation(tag)
        self._counts["folds"] += 1
        before = self._summary(conversation, call.document[EXISTING_SUMMARY_KEY])
        shown = self._follow(conversation, messages, before)
        self._judge_order(conversation, before, shown.turns)
        covered = before.turns.union(Spans.of(shown.turns))
        conversation.visible = conversation.visible.union(covered)
        conversation.passed_over = conversation.passed_over.union(Spans.between(0, covered.stop).difference(covered))
        if shown.open_turn is not None and len(messages) > 1:
            self._object("half_turn", tag, shown.open_turn, "a fold ends between its question and its answer")
        return self._written(Coverage(tag, covered, shown.open_turn, before.noted_messages), call)

    def _read_shorten_call(self, call: Call) -> str | None:
        read = read_summary(call.document[SHORTEN_KEY])
        if read.coverage is None:
            return None
        return self._written(replace(read.coverage, noted_messages=read.noted_messages), call)

    def _written(self, coverage: Coverage, call: Call) -> str:
        limits, text = call.document[LIMITS_KEY], str(coverage)
        if count_words(text) > limits["words"] or not fits_in_tokens(text, limits["tokens"]):
            self._object("overflow", coverage.tag, None, "too many turns failed for a summary to name the others")
        return text

    def _summary(self, conversation: _Conversation, text: str) -> Coverage:
        """What a summary covers. One that a note was added to has no half turn: the note stands for the other half."""
        read = read_summary(text)
        coverage = read.coverage or Coverage(conversation.tag)
        if read.fault:
            self._object("summary", conversation.tag, None, f"{read.fault}: {text[:200]!r}")
        if coverage.tag != conversation.tag:
            self._object("foreign", conversation.tag, None, f"the summary is of conversation {coverage.tag}")
            return Coverage(conversation.tag)
        if coverage.half is not None and read.noted_messages > coverage.noted_messages:
            coverage = replace(coverage, turns=coverage.turns.with_number(coverage.half), half=None)
        conversation.noted_messages = max(conversation.noted_messages, read.noted_messages)
        return replace(coverage, noted_messages=read.noted_messages)

    def _settled(self, conversation: _Conversation, coverage: Coverage, turn: int) -> Coverage:
        if coverage.half is None:
            return coverage
        self._object("half_turn", conversation.tag, coverage.half, f"the summary sent with turn {turn} ends inside it")
        return replace(coverage, half=None)

    def _follow(
        self, conversation: _Conversation, messages: Sequence[tuple[str, str]], before: Coverage | None
    ) -> _Shown:
        """The turns of a run of messages. `before` is the summary in front of them if they are to be folded."""
        turns: list[int] = []
        open_turn = before.half if before else None
        may_lack_question = bool(before and before.noted_messages)
        for role, content in messages:
            turn = self._own_turn(conversation, role, content)
            if role == "user":
                if open_turn is not None:
                    self._object("half_turn", conversation.tag, open_turn, "its question is followed by another")
                open_turn = turn
            elif open_turn is not None and (turn == open_turn or (turn is None and open_turn in conversation.spoilt)):
                turns.append(open_turn)
                open_turn = None
            elif open_turn is not None or not may_lack_question:
                self._object("half_turn", conversation.tag, turn, "an answer does not follow its question")
                open_turn = None
        return _Shown(tuple(turns), open_turn)

    def _own_turn(self, conversation: _Conversation, role: str, content: str) -> int | None:
        """The number in a message, None if there is none of this conversation."""
        markers = read_markers(content)
        own = [marker.turn for marker in markers if marker.tag == conversation.tag]
        for marker in markers:
            if marker.tag != conversation.tag:
                self._object("foreign", conversation.tag, None, f"{marker} is of another conversation")
        if len(own) > 1:
            self._object("several_markers", conversation.tag, own[0], f"one message of the {role} has {len(own)}")
        if not markers and role == "user":
            self._object("unmarked", conversation.tag, None, f"a message of the user has no marker: {content[:80]!r}")
        return own[0] if own else None

    def _judge_order(self, conversation: _Conversation, coverage: Coverage, turns: Iterable[int]) -> None:
        seen, last = coverage.turns, coverage.turns.stop - 1
        for turn in turns:
            if turn in seen:
                self._object("repeated", conversation.tag, turn, "it is in the request twice")
            elif turn < last:
                self._object("out_of_order", conversation.tag, turn, f"it comes after turn {last}")
            seen, last = seen.with_number(turn), max(last, turn)

    def _note_missing(self, conversation: _Conversation, covered: Spans, tail: Spans, turn: int) -> None:
        """Sort what a request does not show into what was passed over and what only a gap can explain."""
        visible = covered.union(tail)
        missing = Spans.between(0, turn).difference(visible)
        gap = missing.intersection(Spans.between(covered.stop, tail.first if tail.pairs else turn))
        conversation.visible = conversation.visible.union(visible)
        conversation.passed_over = conversation.passed_over.union(missing.difference(gap))
        for failed in visible.intersection(conversation.outcomes["failed"]).pairs:
            self._object("failed_but_visible", conversation.tag, failed[0], f"seen in the request of turn {turn}")
        conversation.gaps[turn] = tuple(dict.fromkeys((*conversation.gaps.get(turn, ()), gap)))
        while len(conversation.gaps) > MAX_WAITING_TURNS:
            conversation.gaps.pop(next(iter(conversation.gaps)))

    def _judge_gap(self, conversation: _Conversation, report: Report, gaps: Sequence[Spans]) -> None:
        """Compare what the client was told with what was left out: of one of the tries, as only one was answered."""
        tag, turn = report.marker
        if turn not in conversation.asked:
            self._object("never_asked", tag, turn, "it was answered without the model")
        certain = [2 * len(gap.intersection(conversation.outcomes["ok"])) for gap in gaps]
        possible = [2 * len(gap.difference(conversation.outcomes["failed"])) for gap in gaps]
        least = min((count - conversation.noted_messages for count in certain), default=0)
        if report.gap_messages < least:
            self._object("unreported_gap", tag, turn, f"{least} messages left out, {report.gap_messages} reported")
        elif gaps and report.gap_messages > max(possible):
            self._object("overstated_gap", tag, turn, f"{max(possible)} left out, {report.gap_messages} reported")

    def _losses(self) -> list[Violation]:
        return [
            Violation("lost", conversation.tag, lost.first, f"answered, and passed over by a later request: {lost}")
            for conversation in self._conversations.values()
            if (lost := conversation.passed_over.intersection(conversation.outcomes["ok"])).pairs
            and len(lost) > conversation.noted_messages
        ]

    def _conversation(self, tag: str) -> _Conversation:
        return self._conversations.setdefault(tag, _Conversation(tag))

    def _object(self, kind: ViolationKind, tag: str, turn: int | None, detail: str) -> None:
        self._counts["violations"] += 1
        if len(self._violations) < MAX_SHOWN_VIOLATIONS:
            self._violations.append(Violation(kind, tag, turn, detail))


_READERS: Final = {
    "answer": Judge._read_answer_call,  # noqa: SLF001 - a table of the class's own methods
    "summary": Judge._read_summary_call,  # noqa: SLF001 - likewise
    "shorten": Judge._read_shorten_call,  # noqa: SLF001 - likewise
}


def _is_later_part(item: Mapping[str, Any]) -> bool:
    """Whether it is a piece of a long message, and not the first one, which carries the marker."""
    return not str(item.get("part", "1/1")).startswith("1/")


def _tag(existing: ReadSummary, messages: Iterable[tuple[str, str]]) -> str | None:
    if existing.coverage is not None:
        return existing.coverage.tag
    return next((marker.tag for _, content in messages for marker in read_markers(content)), None)
