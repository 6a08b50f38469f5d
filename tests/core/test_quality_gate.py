"""What may become the summary: replies as real models give them."""

from __future__ import annotations

from time import perf_counter

import pytest
from any_text import texts
from hypothesis import given, settings
from hypothesis import strategies as st

from memora.core.prompts import (
    SHORTEN_INSTRUCTIONS,
    SUMMARISER_INSTRUCTIONS,
    Piece,
    as_data,
    fold_request,
    summary_message,
)
from memora.core.quality_gate import (
    Accepted,
    Rejected,
    SummaryCap,
    TooLong,
    Verdict,
    is_empty_reply,
    is_trivial,
    judge_shortened,
    judge_summary,
)

CAP = SummaryCap(max_words=150, max_tokens=300)
TALK = (
    Piece("user", "I live in Taipei and I take the TOEIC next month."),
    Piece("assistant", "Good luck! Practise a little every day."),
)
TALK_ZH = (
    Piece("user", "我住在台北，下個月要考多益。"),
    Piece("assistant", "加油！每天練習一點點就好。"),
)
GREETING = (Piece("user", "hi"), Piece("assistant", "Hello! How can I help you today?"))
RICH = "The user is called Ann, lives in Taipei with two cats, works as a nurse, and takes the TOEIC in May. " * 4
SUMMARY = "The user lives in Taipei and takes the TOEIC next month."
SUMMARY_ZH = "使用者住在台北，下個月要考多益。"


def judge(reply: str, existing: str = "", talk: tuple[Piece, ...] = TALK, *, strict: bool = True) -> Verdict:
    """The verdict under the default caps."""
    return judge_summary(reply, existing, talk, CAP, strict=strict)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(SUMMARY, id="english"),
        pytest.param(SUMMARY_ZH, id="chinese"),
        pytest.param("- Lives in Taipei\n- Takes the TOEIC next month", id="bullet-list"),
        pytest.param("**Facts:** lives in Taipei.\n\n**Goals:** TOEIC next month.", id="bold-headings"),
        pytest.param("The user asked nothing new.", id="nothing-new-was-asked"),
        pytest.param("Notes on the user: lives in Taipei, TOEIC next month.", id="the-word-user-with-a-colon"),
        pytest.param("User: lives in Taipei; takes the TOEIC next month.", id="one-line-that-begins-with-user"),
        pytest.param(
            "The assistant said it cannot help with visas; the user lives in Taipei.", id="tells-of-a-refusal"
        ),
        pytest.param("The user has none of the books.", id="holds-the-word-none"),
        pytest.param("The user asked what the `<think>` tag does.", id="tells-of-a-reasoning-tag"),
        pytest.param("The user shows code:\n```\nprint(1)\n```\nIt works.", id="code-block-inside"),
        pytest.param("Limits of the trial were discussed.", id="begins-with-a-word-of-our-frame"),
        pytest.param("Summary of the trip: the user goes to Tainan.", id="begins-with-summary-of-something"),
        pytest.param("The user's message was <|endoftext|>, typed by hand.", id="special-token-in-text"),
        pytest.param("The user likes 👩‍👩‍👧‍👦 emoji.", id="joined-emoji"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_good_summary_is_accepted_unchanged(reply: str, strict: bool) -> None:
    """Not a character is touched."""
    assert judge(reply, strict=strict) == Accepted(reply)


EMPTY = {
    "nothing": "",
    "spaces": "   ",
    "line-feed": "\n",
    "zero-width-space": "\u200b",
    "byte-order-mark": "\ufeff",
    "variation-selector": "\ufe0f",
    "none": "NONE",
    "none-with-a-dot": "none.",
    "none-in-bold": "**None**",
    "none-in-quotes": '"None"',
    "null": "null",
    "not-applicable": "N/A",
    "empty-in-brackets": "(empty)",
    "empty-in-chinese": "（空）",
    "nothing-in-chinese": "無",
    "no-summary-in-chinese": "沒有摘要。",
    "dash": "-",
    "dots": "...",
    "bare-fence": "```\n```",
    "fence-with-a-language": "```markdown\n\n```",
    "fence-on-one-line": "``````",
    "none-in-a-fence": "```text\nNONE\n```",
    "label-alone": "Summary:",
    "label-and-none": "Summary: None",
    "chinese-label-and-empty": "摘要：（空）",
    "empty-json": '{"summary": ""}',
    "no-new-information": "No new information.",
    "null-character": "\x00",
    "lone-surrogate": "\ud800",
    "reasoning-and-nothing": "<think>Let me see.</think>",
}


@pytest.mark.parametrize("reply", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("strict", [True, False])
def test_an_empty_reply_is_rejected(reply: str, strict: bool) -> None:
    """A word for nothing is nothing, whatever is around it; no second try makes it a summary."""
    assert judge(reply, strict=strict) == Rejected("empty")
    assert judge(reply, RICH, strict=strict) == Rejected("empty")


@pytest.mark.parametrize("reply", ["NONE", "（空）", "", "```\n```", "-"])
def test_emptiness_is_seen_without_a_conversation(reply: str) -> None:
    """The same rule for whoever asks only that."""
    assert is_empty_reply(reply)
    assert not is_empty_reply(SUMMARY_ZH)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(f"<think>The user says…</think>\n\n{SUMMARY}", id="closed-block"),
        pytest.param(f"<THINK>a</THINK>{SUMMARY}<reasoning>b\nc</reasoning>", id="two-kinds-of-blocks"),
        pytest.param(f"<thinking>a <think> b</thinking>\n{SUMMARY}", id="another-tag-inside"),
        pytest.param(f"[THINK]plan[/THINK]{SUMMARY}", id="square-brackets"),
        pytest.param(f"Summary: {SUMMARY}", id="label"),
        pytest.param(f"**Summary:** {SUMMARY}", id="bold-label"),
        pytest.param(f"## Updated summary\n\n{SUMMARY}", id="heading"),
        pytest.param(f"Here is the updated summary:\n\n{SUMMARY}", id="introduction"),
        pytest.param(f"摘要：{SUMMARY}", id="chinese-label"),
        pytest.param(f"【更新後的摘要】：\n{SUMMARY}", id="chinese-label-in-brackets"),
        pytest.param(f"```\n{SUMMARY}\n```", id="fence"),
        pytest.param(f"```markdown\n{SUMMARY}\n```", id="fence-with-a-language"),
        pytest.param(f"```{SUMMARY}```", id="fence-on-one-line"),
        pytest.param(f"Summary:\n```text\n{SUMMARY}\n```", id="label-and-fence"),
        pytest.param(f'{{"summary": "{SUMMARY}"}}', id="json-object"),
        pytest.param(f'```json\n{{"new_summary": "{SUMMARY}"}}\n```', id="json-object-in-a-fence"),
        pytest.param(f"\n\n  {SUMMARY}  \n", id="blanks-around"),
        pytest.param(f"\ufeff\x00{SUMMARY}\ud83d", id="characters-no-summary-needs"),
    ],
)
def test_what_wraps_a_summary_is_taken_off(reply: str) -> None:
    """Reasoning blocks, labels, fences and JSON around a good summary do not spoil it."""
    assert judge(reply) == Accepted(SUMMARY)


def test_a_label_takes_nothing_with_it() -> None:
    """Bullets, quotes and bold words behind a label stay."""
    assert judge("Summary:\n- Lives in Taipei\n- TOEIC next month") == Accepted("- Lives in Taipei\n- TOEIC next month")
    assert judge('Summary: "Ann" is the user.') == Accepted('"Ann" is the user.')
    assert judge("Summary: **Ann** is the user.") == Accepted("**Ann** is the user.")


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param("<think>The user lives in Taipei, so I should", id="never-closed"),
        pytest.param(f"so I should say it.</think>\n{SUMMARY}", id="only-a-closing-tag"),
        pytest.param(f"<think>a</think>{SUMMARY}<think>but", id="a-second-one-is-open"),
        pytest.param(f"<think>a</reasoning>{SUMMARY}", id="closed-by-another"),
        pytest.param(f"<think>a<think>b</think>c</think>{SUMMARY}", id="nested"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_unfinished_reasoning_is_rejected(reply: str, strict: bool) -> None:
    """Where the reasoning ends is not known, so nothing of the reply can be trusted."""
    assert judge(reply, strict=strict) == Rejected("unfinished reasoning")


ECHO_PROMPT = "an echo of the prompt"
ECHO_MESSAGES = "an echo of the messages"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        pytest.param(
            fold_request(RICH, TALK, max_words=150, max_tokens=300).messages[0][1], ECHO_PROMPT, id="the-data"
        ),
        pytest.param(SUMMARISER_INSTRUCTIONS, ECHO_PROMPT, id="the-instructions"),
        pytest.param(SHORTEN_INSTRUCTIONS, ECHO_PROMPT, id="the-instructions-to-shorten"),
        pytest.param(summary_message(RICH), ECHO_PROMPT, id="the-frame-of-a-context"),
        pytest.param("Existing summary:\nThe user…\nNew messages:\nuser: hi", ECHO_PROMPT, id="headings"),
        pytest.param("### New messages\n\nI live in Taipei", ECHO_PROMPT, id="markdown-heading"),
        pytest.param("existing_summary: Ann lives in Taipei.", ECHO_PROMPT, id="a-key-as-heading"),
        pytest.param("現有摘要：無\n新訊息：我住在台北", ECHO_PROMPT, id="chinese-headings"),
        pytest.param('{"role": "user", "content": "I live in Taipei"}', ECHO_PROMPT, id="a-message-record"),
        pytest.param('[{"role":"assistant","content":"ok"}]', ECHO_PROMPT, id="message-records"),
        pytest.param("</conversation_summary>", ECHO_PROMPT, id="our-fence"),
        pytest.param(
            "user: I live in Taipei and I take the TOEIC next month.\nassistant: Good luck!",
            ECHO_MESSAGES,
            id="transcript",
        ),
        pytest.param(
            "**User:** I live in Taipei\n\n**Assistant:** Practise a little every day.", ECHO_MESSAGES, id="bold-marks"
        ),
        pytest.param(
            "- **User**: I live in Taipei\n- **Assistant**: Good luck!", ECHO_MESSAGES, id="bold-marks-in-a-list"
        ),
        pytest.param("[USER] I live in Taipei\n[ASSISTANT] Good luck!", ECHO_MESSAGES, id="bracketed-marks"),
        pytest.param("使用者：我住在台北，下個月要考多益。\n助理：加油！", ECHO_MESSAGES, id="chinese-transcript"),
        pytest.param("user: I take the TOEIC next month.", ECHO_MESSAGES, id="a-single-message"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_an_echo_is_rejected(reply: str, reason: str, strict: bool) -> None:
    """Our frame, or the messages with their role marks, are no summary, however often they come."""
    assert judge(reply, talk=TALK + TALK_ZH, strict=strict) == Rejected(reason)


def test_role_marks_before_own_words_are_only_suspicious() -> None:
    """A model that always writes so is tried once more and then believed: losing the messages is worse."""
    reply = "User: wants to pass an exam in May.\nAssistant: proposed to practise daily."
    assert judge(reply) == Rejected(ECHO_MESSAGES)
    assert judge(reply, strict=False) == Accepted(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "I'm sorry, but I can't help with that.",
        "I’m sorry, I cannot summarize this.",
        "Sorry, I am not able to do this.",
        "I cannot assist with that request.",
        "I can't provide a summary of this conversation.",
        "I am unable to process this.",
        "As an AI language model, I do not have access to earlier messages.",
        "很抱歉，我無法協助處理這個請求。",
        "抱歉，無法提供摘要。",
        "我无法提供帮助。",
        "對不起，我不能幫你。",
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_refusal_is_rejected(reply: str, strict: bool) -> None:
    """A polite no is no summary."""
    assert judge(reply, strict=strict) == Rejected("a refusal")


@pytest.mark.parametrize(
    "reply", [SUMMARY, "NONE", "", "no meaningful information", "user: hi\nassistant: hello", "<think>", "x" * 10_000]
)
def test_trivial_messages_leave_a_rich_summary_as_it_is(reply: str) -> None:
    """Whatever the model makes of "hi" and "hello", what was known stays, and the count may move."""
    assert judge(reply, RICH, GREETING) == Accepted(RICH)


@pytest.mark.parametrize("reply", ["NONE", "", "（空）", "user: hi\nassistant: Hello! How can I help you today?"])
def test_a_conversation_that_begins_with_greetings_moves_on(reply: str) -> None:
    """There is nothing to say yet, and a model that says so is right: no fold has to fail over it."""
    assert judge(reply, "", GREETING) == Accepted("So far there were only greetings.")
    chinese = (Piece("user", "你好！"), Piece("assistant", "您好，有什麼可以幫您？"))
    assert judge(reply, "", chinese) == Accepted("目前只有問候。")


def test_a_summary_of_greetings_in_words_is_taken() -> None:
    """A sentence is better than our note."""
    assert judge("The user said hello.", "", GREETING) == Accepted("The user said hello.")


def test_an_old_summary_over_a_lowered_cap_is_shortened_even_for_greetings() -> None:
    """The cap holds for what is kept, too."""
    assert judge("NONE", RICH * 10, GREETING) == TooLong(RICH * 10)


@pytest.mark.parametrize(
    "text",
    [
        "hi",
        "Hello!!",
        "heya",
        "",
        "ok",
        "OK 👍",
        "thanks",
        "Thank you!",
        "👍",
        "...",
        "你好",
        "好的～",
        "嗯嗯嗯",
        "謝謝！",
    ],
)
def test_a_greeting_or_a_nod_is_trivial(text: str) -> None:
    """Nothing that a summary would have to keep."""
    assert is_trivial(text)


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "No.",
        "對",
        "不",
        "hi, I am Ann",
        "42",
        "ok, book it",
        "我是小明",
        "嗯，下週三",
        "okapi",
        "thanks to Ann I passed",
    ],
)
def test_what_may_decide_something_is_not_trivial(text: str) -> None:
    """A yes answers a question that may be in the summary already; names and numbers are facts."""
    assert not is_trivial(text)


@pytest.mark.parametrize(
    ("reply", "existing", "talk", "reason"),
    [
        pytest.param(
            SUMMARY, SUMMARY_ZH, TALK_ZH, "in another language than the conversation", id="chinese-to-english"
        ),
        pytest.param("The user is Ann.", RICH, TALK, "most of the existing summary is gone", id="shrunk"),
    ],
)
def test_what_is_only_suspicious_is_rejected_once(
    reply: str, existing: str, talk: tuple[Piece, ...], reason: str
) -> None:
    """A second reply like that is believed: a doubtful summary beats losing the messages."""
    assert judge(reply, existing, talk) == Rejected(reason)
    assert judge(reply, existing, talk, strict=False) == Accepted(reply)


@pytest.mark.parametrize(
    ("reply", "existing", "talk"),
    [
        pytest.param("使用者要考 TOEIC Listening and Reading。", "", TALK_ZH, id="chinese-with-english-names"),
        pytest.param(SUMMARY, "", TALK + TALK_ZH, id="mixed-conversation"),
        pytest.param("The user is Ann.", "The user is called Ann.", TALK, id="a-short-summary-may-shrink"),
    ],
)
def test_what_is_usual_is_not_suspicious(reply: str, existing: str, talk: tuple[Piece, ...]) -> None:
    """The first try is not wasted on ordinary replies."""
    assert judge(reply, existing, talk) == Accepted(reply)


def test_a_reply_over_the_cap_is_too_long() -> None:
    """It would do but for its length, in words or in tokens; the text comes along, cleaned."""
    many_words = "The user likes tea. " * 50
    many_tokens = "使用者喜歡喝茶。" * 60
    assert judge(f"Summary: {many_words}") == TooLong(many_words.strip())
    assert judge(many_tokens, talk=TALK_ZH) == TooLong(many_tokens)


def test_a_shortened_summary_is_taken_if_it_is_one() -> None:
    """Shorter, whole and within the cap."""
    long = "The user likes tea. The user lives in Taipei. " * 20
    short = "The user likes tea and lives in Taipei. " * 6
    assert judge_shortened(short, long, CAP) == short.strip()


@pytest.mark.parametrize(
    "reply", [*EMPTY.values(), "I'm sorry, I can't help.", "<think>", "OK", "好的", SUMMARY_ZH, RICH * 9]
)
def test_a_useless_attempt_to_shorten_is_replaced_by_a_cut(reply: str) -> None:
    """Then the long summary is cut after a sentence."""
    long = "The user likes tea. The user lives in Taipei. " * 20
    cut = judge_shortened(reply, long, CAP)
    assert long.startswith(cut)
    assert cut.endswith(".")
    assert CAP.fits(cut)
    assert len(cut) > 400


caps = st.builds(SummaryCap, st.integers(10, 200), st.integers(16, 400), st.sampled_from(["o200k_base", "cl100k_base"]))
pieces = st.lists(st.builds(Piece, st.sampled_from(["user", "assistant"]), texts), min_size=1, max_size=4)
replies = st.one_of(texts, st.builds(lambda text, times: text * times, texts, st.integers(1, 40)), st.text(max_size=20))


@given(replies, texts, pieces, caps, st.booleans())
def test_what_is_accepted_says_something_within_the_cap(
    reply: str, existing: str, shown: list[Piece], cap: SummaryCap, strict: bool
) -> None:
    """Whatever a model sends, no empty and no oversized summary is stored, and what is stored can be encoded."""
    verdict = judge_summary(reply, existing, shown, cap, strict=strict)
    if isinstance(verdict, Accepted):
        assert cap.fits(verdict.text)
        assert not is_empty_reply(verdict.text)
        assert as_data(verdict.text).encode()
    if isinstance(verdict, TooLong):
        assert not cap.fits(verdict.text)


@given(replies, replies.filter(lambda text: text.strip() and not any("\ud800" <= c <= "\udfff" for c in text)), caps)
def test_a_shortened_summary_fits_and_is_never_nothing(reply: str, long: str, cap: SummaryCap) -> None:
    """Where there was a summary there is one afterwards."""
    short = judge_shortened(reply, long, cap)
    assert cap.fits(short)
    assert short.strip()


@settings(max_examples=5)
@given(replies, caps)
def test_a_hundred_folds_of_a_model_that_only_appends_stay_within_the_cap(addition: str, cap: SummaryCap) -> None:
    """The size of a summary has a bound, whatever the model does."""
    summary = ""
    for _ in range(100):
        verdict = judge_summary(f"{summary} {addition}", summary, TALK, cap, strict=False)
        if isinstance(verdict, Accepted):
            summary = verdict.text
        elif isinstance(verdict, TooLong):
            summary = judge_shortened(verdict.text, verdict.text, cap)
        assert cap.fits(summary)


ADVERSARIAL = [
    *(
        "嗯",
        "<think>",
        "</think>",
        "<think><reasoning><analysis>",
        "`",
        "```\n",
        "user:",
        "user:\n",
        "[USER]",
        "# ",
        "*",
    ),
    *(
        '"role"',
        '{"a":',
        "summary ",
        "new new ",
        "摘要",
        "hi",
        "hi ",
        "haha",
        "sorry ",
        ".",
        "…",
        "\n",
        " ",
        "\u200b",
        "'a-",
    ),
]


@pytest.mark.parametrize("phrase", ADVERSARIAL, ids=ascii)
def test_no_reply_makes_the_gate_slow(phrase: str) -> None:
    """A hundred thousand characters of anything, with or without an end that does not match, are judged at once."""
    reply = phrase * (100_000 // len(phrase))
    started = perf_counter()
    judge_summary(reply + "x", "", TALK, CAP)
    judge_summary("x" + reply, RICH, TALK, CAP)
    is_trivial(reply + "x")
    assert perf_counter() - started < 3


def test_a_greeting_that_the_model_finds_nothing_in_moves_the_count() -> None:
    """However wordy the assistant's "how can I help" is; a blank reply is still no summary."""
    pieces = (Piece("user", "hi"), Piece("assistant", "Hello! Tell me something about yourself, and ask me later."))
    cap = SummaryCap(max_words=150, max_tokens=300)
    assert isinstance(judge_summary("NONE", "", pieces, cap), Accepted)
    assert judge_summary("（空）", "The user lives in Taipei.", pieces, cap) == Accepted("The user lives in Taipei.")
    assert isinstance(judge_summary(" ", "", pieces, cap), Rejected)


def test_the_caps_hold_to_the_word_and_the_token() -> None:
    """What is exactly as long as it may be fits, one more does not."""
    assert SummaryCap(max_words=3, max_tokens=300).fits("one two three")
    assert not SummaryCap(max_words=3, max_tokens=300).fits("one two three four")
    assert SummaryCap(max_words=150, max_tokens=3).fits("one two three")
    assert not SummaryCap(max_words=150, max_tokens=3).fits("one two three four")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([f"User: {TALK[0].content}", "Nothing else."], "an echo of the messages"),
        ([f"User: {TALK[0].content}", "Nothing else.", "Really."], ""),
        ([f"User: {TALK[0].content}", *["Something of its own."] * 4], ""),
        (["User: likes cats.", "Assistant: likes dogs.", "Both like birds.", "And fish."], "an echo of the messages"),
        (["User: likes cats.", "Assistant: likes dogs.", "Both like birds.", "And fish.", "And more."], ""),
        (["User: likes cats.", "Both like birds."], ""),
    ],
)
def test_a_reply_is_an_echo_if_half_of_its_lines_are(lines: list[str], reason: str) -> None:
    """Copied after a role mark, or at least two in the form of a script; a line of it in a summary is none."""
    text = "\n".join(lines)
    assert judge(text) == (Rejected(reason) if reason else Accepted(text))


@pytest.mark.parametrize(("length", "is_refusal"), [(299, True), (300, False)])
def test_only_a_short_reply_is_a_refusal(length: int, is_refusal: bool) -> None:
    """A long one that begins with an apology tells something."""
    reply = "I'm sorry, I cannot help. ".ljust(length, "x")
    assert isinstance(judge(reply), Rejected) == is_refusal


@pytest.mark.parametrize(
    ("existing", "reply", "is_suspicious"), [(60, 11, True), (60, 12, False), (59, 1, False), (61, 12, True)]
)
def test_most_of_a_rich_summary_is_four_fifths(existing: int, reply: int, is_suspicious: bool) -> None:
    """Of sixty tokens and more; unless it is said otherwise, a verdict is a strict one."""
    before, after = ("word" + " word" * (tokens - 1) for tokens in (existing, reply))
    verdict = judge_summary(after, before, TALK, CAP)
    assert verdict == (Rejected("most of the existing summary is gone") if is_suspicious else Accepted(after))


@pytest.mark.parametrize(
    ("talk", "reply", "is_suspicious"),
    [
        ("天" * 7 + "abc", "abcdefghij", True),
        ("天" * 6 + "abcd", "abcdefghij", False),
        ("天" * 7 + "abc", "天" + "a" * 19, False),
        ("天" * 7 + "abc", "天" + "a" * 20, True),
    ],
)
def test_a_chinese_conversation_has_a_summary_with_some_chinese(talk: str, reply: str, is_suspicious: bool) -> None:
    """Seven tenths make a conversation Chinese, and a twentieth is some."""
    verdict = judge(reply, "", (Piece("user", talk),))
    assert verdict == (Rejected("in another language than the conversation") if is_suspicious else Accepted(reply))


@pytest.mark.parametrize("reply", ['{"摘要": "使用者住在台北。"}', '{"the_summary": "使用者住在台北。"}'])
def test_a_summary_in_an_object_is_taken_out(reply: str) -> None:
    """By the name of its only key, in either language."""
    assert judge(reply, talk=TALK_ZH) == Accepted("使用者住在台北。")


@pytest.mark.parametrize("reply", ["{the user lives in Taipei}", '{"city": "Taipei"}', '{"summary": "a", "b": "c"}'])
def test_what_only_looks_like_an_object_stays_as_it_is(reply: str) -> None:
    """Nobody knows what part of it would be the summary."""
    assert judge(reply) == Accepted(reply)


def test_a_shortened_summary_must_be_shorter_and_no_script() -> None:
    """By one word at least; otherwise the long one is cut, as for a reply in the form of a script."""
    cap = SummaryCap(max_words=4, max_tokens=300)
    assert judge_shortened("five six seven eight", "one two three. four five", cap) == "five six seven eight"
    assert judge_shortened("six seven eight nine ten", "one two three. four five", cap) == "one two three."
    script = "User: cats.\nAssistant: dogs."
    assert judge_shortened(script, "one two three. four five", cap) == "one two three."
