"""What is sent for an answer: always whole, always within the budget, nothing left out silently."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from any_text import said, texts
from hypothesis import assume, given
from hypothesis import strategies as st

from memora.core.conversation import Conversation, Message, Summary, absent_message
from memora.core.prompts import DEFAULT_INSTRUCTIONS, summary_message
from memora.core.tokens import Calibration, count_text_tokens, message_tokens, request_tokens
from memora.core.window import (
    BATCH_RESERVE_SHARE,
    MESSAGE_RESERVE_SHARE,
    Budget,
    Context,
    ContextTokens,
    Window,
    most_useful_messages,
    select_context,
    select_window,
    window_messages,
)
from memora.errors import ContextLengthExceeded

BUDGET = Budget(max_input_tokens=1_000, max_recent_turns=3, max_summary_tokens=300)


def turn(question: str, answer: str) -> tuple[Message, Message]:
    """A turn with its tokens counted."""
    return (
        Message("user", question, count_text_tokens(question)),
        Message("assistant", answer, count_text_tokens(answer)),
    )


def conversation(turns: list[tuple[str, str]], summary: str = "", summarized_turns: int = 0) -> Conversation:
    """A stored conversation; its tail is complete."""
    messages = [message for question, answer in turns for message in turn(question, answer)]
    text = Summary(summary, 2 * summarized_turns, version=summarized_turns) if summarized_turns else Summary()
    return Conversation("a", "g", len(messages), text, tuple(messages[2 * summarized_turns :]))


@dataclass(frozen=True)
class Case:
    """One question to a conversation."""

    conversation: Conversation
    instructions: str
    message: str
    budget: Budget

    @property
    def ceiling(self) -> int:
        """The budget in tokens as they are counted here."""
        return self.budget.calibration.budget(self.budget.max_input_tokens)

    @property
    def alone(self) -> int:
        """What instructions and message cost without anything else."""
        return request_tokens(self.instructions, [("user", self.message)])

    def select(self) -> Context:
        """The context; a question that can never be asked is another test's matter."""
        assume(self.alone <= self.ceiling)
        return select_context(self.conversation, self.instructions, self.message, self.budget)


long_texts = st.builds(lambda text, times: text * times, said, st.integers(1, 20))
budgets = st.builds(
    Budget,
    max_input_tokens=st.integers(64, 1_200),
    max_recent_turns=st.integers(0, 5),
    max_summary_tokens=st.just(300),
    summary_in_instructions=st.booleans(),
    calibration=st.builds(Calibration, st.just(1.0) | st.floats(1.0, 4.0)),
)
conversations = st.lists(st.tuples(long_texts, long_texts), max_size=5).flatmap(
    lambda turns: st.builds(conversation, st.just(turns), long_texts, st.integers(0, len(turns)))
)
cases = st.builds(Case, conversations, st.just("") | texts | st.just(DEFAULT_INSTRUCTIONS), said, budgets)


@given(cases)
def test_the_budget_holds_for_the_request_as_it_goes_out(case: Case) -> None:
    """Counted again from the texts that are sent, and scaled to the model, a request is never over the budget."""
    context = case.select()
    request = context.request
    counted = request_tokens(request.instructions, request.messages)
    assert case.budget.calibration.apply(counted) <= context.counted_input_tokens <= case.budget.max_input_tokens
    if not case.budget.summary_in_instructions:
        assert counted == context.tokens.total


@given(cases)
def test_what_is_sent_is_whole(case: Case) -> None:
    """Whole turns from the end of the history, the message last, instructions and message byte for byte."""
    context = case.select()
    request = context.request
    assert len(context.tail) % 2 == 0
    assert context.tail == case.conversation.tail[len(case.conversation.tail) - len(context.tail) :]
    assert request.messages[-1] == ("user", case.message)
    assert request.messages[len(request.messages) - 1 - len(context.tail) : -1] == tuple(
        (message.role, message.content) for message in context.tail
    )
    assert request.instructions.startswith(case.instructions)
    if not case.budget.summary_in_instructions:
        assert request.instructions == case.instructions
    assert context.messages_sent == len(request.messages)


@given(cases)
def test_every_message_is_summarized_sent_or_counted_as_gap(case: Case) -> None:
    """The three add up to the history."""
    context = case.select()
    summarized = case.conversation.summary.summarized_message_count
    assert summarized + context.gap_messages + len(context.tail) == case.conversation.message_count
    assert context.gap_messages >= 0
    assert context.tail_start == case.conversation.message_count - len(context.tail)


@given(cases)
def test_the_newest_turns_are_kept_as_far_as_they_fit(case: Case) -> None:
    """A turn is left out only if it does not fit, so nothing is left out when everything fits."""
    context = case.select()
    if not context.gap_messages:
        return
    left_out = case.conversation.tail[-len(context.tail) - 2 :][:2]
    assert context.tokens.total + sum(message_tokens(message.tokens) for message in left_out) > case.ceiling


@given(cases)
def test_the_summary_is_whole_unless_the_message_needs_its_room(case: Case) -> None:
    """If summary and message do not fit together, the message wins and a beginning of the summary is sent."""
    context = case.select()
    stored = case.conversation.summary.text
    if stored and case.alone + message_tokens(count_text_tokens(summary_message(stored))) > case.ceiling:
        assert context.summary != stored
        assert stored.startswith(context.summary)
    else:
        assert context.summary == stored
    assert (context.tokens.summary > 0) == bool(context.summary)
    sent = "\n".join((context.request.instructions, *(content for _, content in context.request.messages[:1])))
    assert not context.summary or summary_message(context.summary) in sent


@given(cases)
def test_only_a_message_that_does_not_fit_alone_is_refused(case: Case) -> None:
    """Instructions and message over the budget are an error, and nothing else is."""
    if case.alone <= case.ceiling:
        select_context(case.conversation, case.instructions, case.message, case.budget)
    else:
        with pytest.raises(ContextLengthExceeded):
            select_context(case.conversation, case.instructions, case.message, case.budget)


@given(cases)
def test_selecting_twice_gives_the_same(case: Case) -> None:
    """Building a context changes nothing."""
    first = case.select()
    assert case.select() == first
    assert case.select().request == first.request


@given(cases)
def test_a_shorter_tail_from_the_store_changes_nothing(case: Case) -> None:
    """More than the most useful messages need not be read: the rest could never be sent."""
    whole = case.select()
    most = most_useful_messages(case.budget)
    assert most % 2 == 0
    newest = replace(case.conversation, tail=case.conversation.tail[-most:])
    assert select_context(newest, case.instructions, case.message, case.budget) == whole


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param("word " * 2_000, "the message has 10,000 characters", id="ten-thousand-characters"),
        pytest.param("好" * 100_000, "the message has 100,000 characters", id="chinese"),
        pytest.param("a" * 100_000, "raise MEMORA_MAX_INPUT_TOKENS", id="a-hundred-thousand-times-a"),
        pytest.param("👩‍👩‍👧‍👦" * 500, "shorten it", id="joined-emoji"),
        pytest.param("<|endoftext|>" * 500, "shorten it", id="special-tokens"),
    ],
)
def test_a_message_over_the_budget_is_refused_with_the_remedy(message: str, words: str) -> None:
    """The error says how large it is, how much there was room for, and what to do."""
    with pytest.raises(ContextLengthExceeded) as refused:
        select_context(conversation([("hi", "hello")]), DEFAULT_INSTRUCTIONS, message, BUDGET)
    assert words in str(refused.value)
    assert "input budget of 1,000" in str(refused.value)
    assert len(str(refused.value)) < 300


def test_instructions_over_the_budget_are_named_as_the_cause() -> None:
    """No message could be sent, so the message is not to blame."""
    with pytest.raises(ContextLengthExceeded, match="MEMORA_INSTRUCTIONS"):
        select_context(conversation([]), "word " * 2_000, "hi", BUDGET)


def test_the_acceptance_story_in_numbers() -> None:
    """After the commit of turn 1, turn 5 is answered from summary, turns 2 to 4 and the question."""
    turns = [("我下個月要考 TOEIC。", "加油！"), ("present perfect?", "I have…"), ("B1 words?", "…"), ("travel?", "…")]
    before = select_context(conversation(turns), DEFAULT_INSTRUCTIONS, "我下個月要考什麼？", BUDGET)
    assert (len(before.tail), before.gap_messages, before.messages_sent) == (8, 0, 9)
    after = select_context(
        conversation(turns, "使用者下個月要考 TOEIC。", 1), DEFAULT_INSTRUCTIONS, "我下個月要考什麼？", BUDGET
    )
    assert (len(after.tail), after.gap_messages, after.messages_sent) == (6, 0, 8)
    assert [role for role, _ in after.request.messages] == ["developer", *["user", "assistant"] * 3, "user"]
    assert after.request.instructions == DEFAULT_INSTRUCTIONS


def test_pending_messages_are_sent_word_for_word_while_they_fit() -> None:
    """Nothing is hidden just because it has left the window: it leaves the context when it is in the summary."""
    twenty = conversation([(f"question {number}", f"answer {number}") for number in range(20)])
    context = select_context(twenty, "", "and now?", replace(BUDGET, max_recent_turns=1))
    assert (len(context.tail), context.gap_messages) == (40, 0)


@given(conversations, texts, budgets)
def test_the_window_is_whole_turns_and_never_more_than_asked_for(
    stored: Conversation, instructions: str, budget: Budget
) -> None:
    """Even, at most `max_recent_turns` turns, and not more than there is."""
    window = window_messages(stored.tail, stored.summary.text, instructions, budget)
    assert window % 2 == 0
    assert 0 <= window <= min(2 * budget.max_recent_turns, len(stored.tail))


@given(st.integers(0, 5), st.integers(0, 8))
def test_short_turns_fill_the_window(max_recent_turns: int, stored: int) -> None:
    """With turns of a few words the window is the setting."""
    tail = conversation([("question", "answer")] * stored).tail
    budget = replace(BUDGET, max_recent_turns=max_recent_turns)
    assert window_messages(tail, "a summary", DEFAULT_INSTRUCTIONS, budget) == 2 * min(max_recent_turns, stored)


@given(conversations, texts, budgets, st.integers(0, 500))
def test_a_larger_budget_never_narrows_the_window(
    stored: Conversation, instructions: str, budget: Budget, more: int
) -> None:
    """What stays word for word grows with the budget."""
    larger = replace(budget, max_input_tokens=budget.max_input_tokens + more)
    summary = stored.summary.text
    narrow = window_messages(stored.tail, summary, instructions, budget)
    assert narrow <= window_messages(stored.tail, summary, instructions, larger)


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(0, 90), st.integers(200, 500), st.floats(1.0, 1.5)
)
def test_once_everything_outside_the_window_is_folded_there_is_no_gap(
    turn_words: list[int], summary_words: int, max_input_tokens: int, factor: float
) -> None:
    """That is what the window is for: with a message of an eighth of the budget, nothing is left out."""
    budget = Budget(max_input_tokens, 5, 300, calibration=Calibration(factor))
    stored = conversation([("word " * words, "answer") for words in turn_words])
    summary = "word " * summary_words
    window = window_messages(stored.tail, summary, "Be brief.", budget)
    newest = stored.tail[len(stored.tail) - window :]
    folded = replace(stored, summary=Summary(summary, stored.message_count - window, 1), tail=newest)
    message = "word " * (budget.local_tokens // MESSAGE_RESERVE_SHARE - message_tokens(1))
    assert message_tokens(count_text_tokens(message)) <= budget.local_tokens // MESSAGE_RESERVE_SHARE
    context = select_context(folded, "Be brief.", message, budget)
    assert context.gap_messages == 0
    assert not window or context.summary == summary


def test_turns_gather_and_leave_the_window_together() -> None:
    """With a window of three and batches of two, the window holds up to four turns, and the fifth makes two leave."""
    window = Window(messages=6, most_messages=8)
    assert [window.holding(2 * turns) for turns in range(7)] == [6, 6, 6, 6, 8, 6, 6]


@given(conversations, texts, budgets)
def test_without_batches_the_window_does_not_grow(stored: Conversation, instructions: str, budget: Budget) -> None:
    """Both marks are those of `window_messages`."""
    fewest = window_messages(stored.tail, stored.summary.text, instructions, budget)
    assert select_window(stored.tail, stored.summary.text, instructions, budget) == Window(fewest, fewest)


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(0, 90), st.integers(200, 900), st.integers(1, 5)
)
def test_a_batch_that_gathers_costs_no_gap(
    turn_words: list[int], summary_words: int, max_input_tokens: int, fold_batch_turns: int
) -> None:
    """What the window holds fits beside a message of an eighth of the budget, and of a quarter where it has grown."""
    budget = Budget(max_input_tokens, 2, 300, fold_batch_turns=fold_batch_turns)
    stored = conversation([("word " * words, "answer") for words in turn_words])
    summary = "word " * summary_words
    window = select_window(stored.tail, summary, "Be brief.", budget)
    assert window.messages <= window.most_messages <= 2 * budget.most_recent_turns
    held = window.holding(stored.message_count)
    newest = stored.tail[max(0, stored.message_count - held) :]
    folded = replace(stored, summary=Summary(summary, stored.message_count - len(newest), 1), tail=newest)
    share = BATCH_RESERVE_SHARE if len(newest) > window.messages else MESSAGE_RESERVE_SHARE
    message = "word " * (budget.local_tokens // share - message_tokens(1))
    assert select_context(folded, "Be brief.", message, budget).gap_messages == 0


def test_messages_that_were_not_even_read_are_counted_as_gap() -> None:
    """The store reads only the end of a long tail; the gap counts all that is left out."""
    read = conversation([(f"question {number}", "answer") for number in range(125)])
    stored = replace(read, message_count=100_000, summary=Summary("A summary.", 20_000, 7))
    context = select_context(stored, "", "and now?", BUDGET)
    assert len(context.tail) > 50
    assert context.gap_messages == 80_000 - len(context.tail)
    assert context.tail_start == 100_000 - len(context.tail)


@given(st.lists(st.tuples(long_texts, long_texts), min_size=1, max_size=5), texts, budgets)
def test_a_growing_summary_only_narrows_the_window(
    turns: list[tuple[str, str]], instructions: str, budget: Budget
) -> None:
    """Room that the summary takes is not given to turns as well."""
    tail = conversation(turns).tail
    wide = window_messages(tail, "", instructions, budget)
    assert window_messages(tail, "The user lives in Taipei. " * 10, instructions, budget) <= wide


def test_messages_counted_for_another_model_family_are_counted_again() -> None:
    """After a change of model the budget holds from the first request on, whatever the stored counts say."""
    text = "我下個月要考多益，所以每天晚上都在背單字。" * 4
    old, new = "o200k_base", "cl100k_base"
    tail = tuple(Message(role, text, count_text_tokens(text, old)) for role in ("user", "assistant") * 6)
    conversation = Conversation("talk", "life", len(tail), tail=tail)
    budget = Budget(max_input_tokens=1_000, max_recent_turns=6, max_summary_tokens=300, vocabulary=new)
    context = select_context(conversation, "", "好嗎？", budget)
    assert context.gap_messages
    assert request_tokens("", context.request.messages, new) == context.counted_input_tokens <= 1_000


@pytest.mark.parametrize(
    ("tokens", "window"),
    [(747, Window(2, 4)), (748, Window(2, 2)), (872, Window(2, 2)), (873, Window(0, 0))],
)
def test_an_eighth_is_left_to_the_message_and_a_quarter_beside_a_batch(tokens: int, window: Window) -> None:
    """Of a thousand tokens, three start the reply, and a turn may take the rest but for that."""
    older = (Message("user", "old", 0), Message("assistant", "old", 0)) if tokens < 800 else ()
    overhead = message_tokens(0) * (2 + len(older))
    newest = (*older, Message("user", "new", tokens - overhead), Message("assistant", "new", 0))
    budget = replace(BUDGET, max_recent_turns=1, fold_batch_turns=2)
    assert select_window(newest, "", "", budget) == window


def test_less_than_eight_tokens_of_a_summary_are_not_sent() -> None:
    """The beginning of a summary that says nothing costs room for nothing."""
    stored = replace(conversation([]), message_count=2, summary=Summary("word" + " word" * 50, 2, 1))
    sent = [
        count_text_tokens(select_context(stored, "", "hi", replace(BUDGET, max_input_tokens=most)).summary)
        for most in range(60, 200)
    ]
    assert min(tokens for tokens in sent if tokens) == 8
    assert sent == sorted(sent)
    assert sent[0] == 0


def test_a_phase_is_named_by_the_place_of_its_message_in_the_request() -> None:
    """Behind a summary, and without the absent ones, which are not sent."""
    tail = (
        absent_message("user"),
        Message("assistant", "hello", 1, phase="commentary"),
        Message("user", "more", 1),
        Message("assistant", "yes", 1, phase="final_answer"),
    )
    stored = Conversation("a", "g", 6, Summary("Ann likes cats.", 2, 1, 5), tail)
    for in_instructions, phases in (
        (False, ((1, "commentary"), (3, "final_answer"))),
        (True, ((0, "commentary"), (2, "final_answer"))),
    ):
        context = select_context(stored, "", "hi", replace(BUDGET, summary_in_instructions=in_instructions))
        assert context.request.phases == phases
        assert [context.request.messages[place][1] for place, _ in phases] == ["hello", "yes"]


@pytest.mark.parametrize(("turns", "batch", "most"), [(3, 1, 252), (200, 1, 400), (3, 200, 404)])
def test_as_many_messages_are_read_as_could_be_sent_or_kept(turns: int, batch: int, most: int) -> None:
    """At four tokens a message, and one turn more; or all that the window may hold, if that is more."""
    assert most_useful_messages(replace(BUDGET, max_recent_turns=turns, fold_batch_turns=batch)) == most
    assert most_useful_messages(replace(BUDGET, max_input_tokens=1_004)) == 252


def test_what_is_not_asked_for_is_off() -> None:
    """Without a word about batches turns leave one by one, and an empty context costs what starts the reply."""
    assert Budget(1_000, 3, 300).most_recent_turns == 3
    assert Budget(1_000, 3, 300, fold_batch_turns=4).most_recent_turns == 6
    assert ContextTokens().total == 3


def test_the_budget_is_used_to_the_last_token() -> None:
    """A message that fits exactly is sent, and so are a summary that does and the beginning of one that does not."""
    message, summary = "word" + " word" * 20, "word" + " word" * 50
    alone = request_tokens("Be brief.", [("user", message)])
    select_context(conversation([]), "Be brief.", message, replace(BUDGET, max_input_tokens=alone))
    with pytest.raises(ContextLengthExceeded, match="the message has 104 characters, more than the 20 tokens"):
        select_context(conversation([]), "Be brief.", message, replace(BUDGET, max_input_tokens=alone - 1))

    stored = replace(conversation([]), message_count=2, summary=Summary(summary, 2, 1))
    whole = alone + message_tokens(count_text_tokens(summary_message(summary)))
    for most, words in ((whole, 51), (whole - 1, 50), (whole - 20, 31)):
        context = select_context(stored, "Be brief.", message, replace(BUDGET, max_input_tokens=most))
        assert (context.tokens.total, len(context.summary.split())) == (most, words)


def test_a_turn_that_fits_exactly_is_sent() -> None:
    """One token less, and it is a gap."""
    stored = conversation([("an older question", "and its answer"), ("question", "answer")])
    newest = sum(message_tokens(message.tokens) for message in stored.tail[2:])
    exact = request_tokens("", [("user", "hi")]) + newest
    for most, sent in ((exact, 2), (exact - 1, 0)):
        context = select_context(stored, "", "hi", replace(BUDGET, max_input_tokens=most))
        assert (len(context.tail), context.gap_messages) == (sent, 4 - sent)


def test_instructions_are_to_blame_if_they_leave_room_for_nothing() -> None:
    """With a single token left, it is the message that is too long."""
    empty = request_tokens("Be brief.", [("user", "")])
    for most, words in ((empty - 1, "MEMORA_INSTRUCTIONS"), (empty, "MEMORA_INSTRUCTIONS"), (empty + 1, "1 tokens")):
        with pytest.raises(ContextLengthExceeded, match=words):
            select_context(conversation([]), "Be brief.", "two words", replace(BUDGET, max_input_tokens=most))
