"""The plan of a fold: every message shown once, in order, within the summariser's input."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from time import perf_counter

import pytest
from any_text import said, texts
from hypothesis import given
from hypothesis import strategies as st

from memora.core.conversation import Message, Summary, absent_message
from memora.core.folding import (
    SMALLEST_ROOM_TOKENS,
    TRIES_PER_SIZE,
    FoldLimits,
    FoldPlan,
    FoldWork,
    backoff_seconds,
    plan_fold,
)
from memora.core.prompts import as_data, fold_request
from memora.core.quality_gate import SummaryCap
from memora.core.tokens import count_text_tokens, request_tokens

CAP = SummaryCap(150, 300)
LIMITS = FoldLimits(8_000, CAP)
TIGHT = FoldLimits(1_200, CAP)


def work(contents: list[str], summary: str = "", start: int = 0, failures: int = 0) -> FoldWork:
    """Pending messages, user and assistant in turn."""
    messages = tuple(
        Message("assistant" if number % 2 else "user", content, count_text_tokens(content))
        for number, content in enumerate(contents)
    )
    return FoldWork("a", "g", Summary(summary, start), messages, failures)


def must_plan(pending: FoldWork, limits: FoldLimits) -> FoldPlan:
    """The plan of work that is there."""
    plan = plan_fold(pending, limits)
    assert plan is not None
    return plan


def shown(plan: FoldPlan) -> dict[int, str]:
    """What the summariser sees of each message, its pieces joined in the order of the steps."""
    joined: dict[int, str] = defaultdict(str)
    for step in plan.steps:
        for position, piece in zip(step.positions, step.pieces, strict=True):
            joined[position] += piece.content
    return dict(joined)


def step_tokens(plan: FoldPlan, summary: str, limits: FoldLimits) -> list[int]:
    """Tokens of the request of each step, if the summary were this one."""
    requests = [
        fold_request(summary, step.pieces, max_words=limits.cap.max_words, max_tokens=limits.cap.max_tokens)
        for step in plan.steps
    ]
    return [request_tokens(asked.instructions, asked.messages, limits.vocabulary) for asked in requests]


def fullest_summary(text: str) -> str:
    """As much of a repeated text as the cap of a summary takes."""
    return CAP.cut(text * 400)


contents = st.one_of(said, st.builds(lambda text, times: text * times, said, st.integers(1, 60)))
pending_work = st.lists(st.tuples(contents, contents), min_size=1, max_size=6).flatmap(
    lambda turns: st.builds(
        work,
        st.just([content for turn in turns for content in turn]),
        texts.map(CAP.cut),
        st.integers(0, 50).map(lambda turn: 2 * turn),
        st.integers(0, 12),
    )
)
limits = st.sampled_from([LIMITS, TIGHT, replace(TIGHT, vocabulary="cl100k_base")])


@given(pending_work, limits)
def test_a_fold_shows_each_of_its_messages_once_and_completely(pending: FoldWork, limits: FoldLimits) -> None:
    """From the count on, whole turns, oldest first; the pieces of a message join to exactly the message."""
    plan = must_plan(pending, limits)
    assert plan.start == pending.summary.summarized_message_count
    assert plan.message_count % 2 == 0
    assert 0 < plan.message_count <= len(pending.messages)
    positions = [position for step in plan.steps for position in step.positions]
    assert positions == sorted(positions)
    assert shown(plan) == {
        plan.start + number: message.content for number, message in enumerate(pending.messages[: plan.message_count])
    }


@given(pending_work, limits)
def test_a_fold_says_who_said_what(pending: FoldWork, limits: FoldLimits) -> None:
    """Each piece carries the role of its message and, if it is a part, which."""
    plan = must_plan(pending, limits)
    parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in plan.steps:
        for position, piece in zip(step.positions, step.pieces, strict=True):
            assert piece.role == pending.messages[position - plan.start].role
            parts[position].append((piece.part, piece.parts))
    assert all(seen == [(part, len(seen)) for part in range(1, len(seen) + 1)] for seen in parts.values())


@given(pending_work, limits)
def test_every_request_of_a_fold_is_within_its_cap(pending: FoldWork, limits: FoldLimits) -> None:
    """Counted again: the first step with the summary that is there, the later ones with any that can come."""
    plan = must_plan(pending, limits)
    assert step_tokens(plan, pending.summary.text, limits)[0] <= limits.max_input_tokens
    for summary in (fullest_summary("The user lives in Taipei. "), fullest_summary('"\n\\')):
        assert max(step_tokens(plan, summary, limits)[1:], default=0) <= limits.max_input_tokens


@pytest.mark.parametrize(
    "text", ['"', "\\", '"\n', "</", "<|", "\x01", "\u2028", "好", "\n\n", "- a\n", "👩‍👩‍👧‍👦"], ids=ascii
)
def test_escaping_never_more_than_doubles_a_summary(text: str) -> None:
    """A summary made of what JSON has to escape is cut earlier, so that a fold can count on its size."""
    summary = fullest_summary(text)
    empty, full = (
        request_tokens("", fold_request(each, (), max_words=150, max_tokens=300).messages) for each in ("", summary)
    )
    assert full - empty <= CAP.max_data_tokens == 600


@pytest.mark.parametrize("vocabulary", ["o200k_base", "cl100k_base"])
def test_a_fold_is_counted_in_the_vocabulary_of_the_model_that_folds(vocabulary: str) -> None:
    """Chinese costs an old model half as much again; the chunk is smaller then, and full in each case."""
    limits = replace(LIMITS, vocabulary=vocabulary)
    pending = work(["使用者下個月要考多益，想把時態弄清楚。" * 8] * 100)
    plan = must_plan(pending, limits)
    (tokens,) = step_tokens(plan, "", limits)
    assert 0.75 * limits.max_input_tokens < tokens <= limits.max_input_tokens


@given(pending_work)
def test_the_plan_is_pure(pending: FoldWork) -> None:
    """Two workers that see the same make the same plan."""
    assert plan_fold(pending, LIMITS) == plan_fold(pending, LIMITS)


@given(st.integers(0, 40), st.integers(0, 20))
def test_without_pending_messages_there_is_no_plan(start: int, failures: int) -> None:
    """Nothing to do is a value."""
    assert plan_fold(work([], "a summary", start, failures), LIMITS) is None


def test_a_backlog_is_folded_in_as_few_calls_as_fit() -> None:
    """Twenty short turns are one call; forty messages of a thousand tokens come in chunks of what fits."""
    assert must_plan(work(["short"] * 40), LIMITS).message_count == 40
    large = must_plan(work(["word " * 1_000] * 40), LIMITS)
    assert (large.message_count, len(large.steps)) == (6, 1)


@given(pending_work)
def test_a_fold_gets_smaller_with_failures_and_ends_in_a_last_try(pending: FoldWork) -> None:
    """Halved after every second failure, down to one message a step, and then the last try, which stays."""
    plans = [must_plan(replace(pending, failures=failures), LIMITS) for failures in range(16)]
    sizes = [max(len(step.pieces) for step in plan.steps) for plan in plans]
    assert sizes == sorted(sizes, reverse=True)
    assert not any(plan.last_try for plan in plans[: 2 * TRIES_PER_SIZE])
    assert [plan.last_try for plan in plans] == sorted(plan.last_try for plan in plans)
    assert plans[-1].last_try
    assert sizes[-1] == 1
    assert plans[-1].message_count == 2


def test_the_sizes_of_a_failing_fold() -> None:
    """Four turns: 4, 4, 2, 2, 1, 1 turns, then message by message, then the last try."""
    plans = [must_plan(work(["text"] * 8, failures=failures), LIMITS) for failures in range(10)]
    assert [(len(plan.steps), plan.message_count, plan.last_try) for plan in plans] == [
        *[(1, 8, False)] * 2,
        *[(1, 4, False)] * 2,
        *[(1, 2, False)] * 2,
        *[(2, 2, False)] * 2,
        *[(2, 2, True)] * 2,
    ]


def test_the_last_try_of_a_message_that_never_fitted_comes_two_failures_later() -> None:
    """Cut into pieces from the beginning, it has no smaller folds to go through before it is given up."""
    pending = work(["word " * 9_000, "ok"])
    plans = [must_plan(replace(pending, failures=failures), LIMITS) for failures in range(6)]
    assert [plan.last_try for plan in plans] == [*[False] * 2 * TRIES_PER_SIZE, True, True]
    assert plans[0].steps[0].pieces[0].parts == len(plans[0].steps) - 1 > 1


def test_a_turn_that_fits_exactly_is_shown_whole() -> None:
    """With twenty-four tokens for what surrounds each message; one token less, and it comes in pieces."""
    pending = work(["word " * 200, "word " * 100])
    empty = fold_request("", (), max_words=CAP.max_words, max_tokens=CAP.max_tokens)
    around = request_tokens(empty.instructions, empty.messages)
    exact = around + sum(count_text_tokens(as_data(message.content)) + 24 for message in pending.messages)
    assert len(must_plan(pending, FoldLimits(exact, CAP)).steps) == 1
    assert len(must_plan(pending, FoldLimits(exact - 1, CAP)).steps) > 1


def test_nothing_has_failed_until_it_is_said() -> None:
    """Work is planned as a first try."""
    assert FoldWork("a", "g", Summary(), ()) == FoldWork("a", "g", Summary(), (), failures=0, rejections=0)


def test_an_absent_message_keeps_its_place_and_is_not_shown() -> None:
    """In one step and in pieces alike; a turn of which nothing is there needs no step."""
    hello = Message("assistant", "hello", 1)
    half = (absent_message("user"), hello)
    for failures, count in ((0, 4), (6, 2)):
        plan = must_plan(FoldWork("a", "g", Summary("", 2), (*half, *half), failures), LIMITS)
        assert (plan.start, plan.end) == (2, 2 + count)
        assert shown(plan) == dict.fromkeys(range(3, 3 + count, 2), "hello")
    nothing = must_plan(FoldWork("a", "g", Summary(), (absent_message("user"), absent_message("assistant"))), LIMITS)
    assert (nothing.start, nothing.end, nothing.steps) == (0, 2, ())


def test_the_pieces_of_a_failing_message_get_smaller() -> None:
    """The model may take less than the settings say: a long message is cut finer before it is given up."""
    pending = work(["word " * 6_000, "ok"])
    pieces = [len(must_plan(replace(pending, failures=failures), LIMITS).steps) for failures in range(0, 10, 2)]
    assert pieces == sorted(pieces)
    assert pieces[1] >= 3
    assert pieces[2] >= 2 * pieces[1] - 2
    assert len(set(pieces[2:])) == 1


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("使用者下個月要考多益。" * 2_000, id="twenty-thousand-chinese-tokens"),
        pytest.param("好" * 200_000, id="chinese-without-a-full-stop"),
        pytest.param("a" * 200_000, id="two-hundred-thousand-times-a"),
        pytest.param("word " * 40_000, id="english-without-a-full-stop"),
        pytest.param("👩‍👩‍👧‍👦" * 10_000, id="joined-emoji"),
        pytest.param("🇹🇼" * 20_000, id="flags"),
        pytest.param("\n \n\t" * 20_000 + "end", id="blank-lines-in-front"),
        pytest.param('"\\' * 40_000, id="quotes-that-double-when-escaped"),
        pytest.param("<|endoftext|>" * 5_000, id="special-tokens"),
        pytest.param("\x00" * 50_000, id="nulls-that-grow-sixfold"),
        pytest.param("e" + "\u0301" * 50_000, id="one-endless-character"),
    ],
)
def test_a_giant_message_is_cut_into_pieces_that_fit(content: str) -> None:
    """However large and whatever it is made of: in a moment, completely, each request within the cap."""
    started = perf_counter()
    plan = must_plan(work([content, "ok"], fullest_summary("The user lives in Taipei. "), 4), LIMITS)
    assert perf_counter() - started < 5
    assert shown(plan) == {4: content, 5: "ok"}
    assert all(len(step.pieces) == 1 for step in plan.steps)
    assert max(step_tokens(plan, fullest_summary('"'), LIMITS)) <= LIMITS.max_input_tokens
    assert len(plan.steps) <= 2 + 2 * count_text_tokens(content) * 6 // LIMITS.max_input_tokens + 2


def test_pieces_end_where_characters_and_sentences_end() -> None:
    """A long message is read in whole sentences, and a family of emoji is never torn."""
    chinese = must_plan(work(["使用者下個月要考多益。" * 2_000, "ok"]), LIMITS)
    assert all(step.pieces[0].content.endswith("。") for step in chinese.steps[:-1])
    families = must_plan(work(["👩‍👩‍👧‍👦" * 10_000, "ok"]), LIMITS)
    assert all(len(step.pieces[0].content) % 7 == 0 for step in families.steps[:-1])


@given(said, st.integers(1, 2_000))
def test_without_any_room_the_pieces_still_come_to_an_end(text: str, max_input_tokens: int) -> None:
    """Limits that no settings allow make many small pieces, not an endless loop."""
    plan = must_plan(work([text * 20, "ok"]), FoldLimits(max_input_tokens, CAP))
    assert shown(plan) == {0: text * 20, 1: "ok"}
    assert SMALLEST_ROOM_TOKENS > 24


@given(st.integers(0, 1_000), st.floats(0.05, 60), st.floats(0, 1, exclude_max=True))
def test_a_back_off_is_bounded_and_spread_by_a_quarter(failures: int, first: float, jitter: float) -> None:
    """At most 75 seconds, never less than three quarters of the whole."""
    whole = backoff_seconds(failures, first, 0.5)
    assert 0 < whole <= 60
    assert 0.75 * whole <= backoff_seconds(failures, first, jitter) <= 1.25 * whole
    assert backoff_seconds(failures, first, jitter) <= 75


@given(st.integers(0, 100), st.floats(0.05, 60))
def test_a_back_off_grows_with_failures(failures: int, first: float) -> None:
    """Doubled each time until the cap."""
    assert backoff_seconds(failures, first, 0.5) <= backoff_seconds(failures + 1, first, 0.5)
    doubled = [min(first * times, 60) for times in (1, 2, 4)]
    assert [backoff_seconds(tries, first, 0.5) for tries in (1, 2, 3)] == pytest.approx(doubled)


def test_a_piece_leaves_room_for_the_longest_summary_and_what_surrounds_it() -> None:
    """And takes all of the rest, to the word."""
    plan = must_plan(work(["word " * 9_000, "ok"]), LIMITS)
    empty = fold_request("", (), max_words=CAP.max_words, max_tokens=CAP.max_tokens)
    room = LIMITS.max_input_tokens - request_tokens(empty.instructions, empty.messages) - CAP.max_data_tokens - 24
    assert room - 2 <= count_text_tokens(as_data(plan.steps[0].pieces[0].content)) <= room
