"""Counting tokens: exact for the family's vocabulary, safe for the others."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

import pytest
from any_text import texts
from hypothesis import given
from hypothesis import strategies as st

from memora.core.tokens import (
    DEFAULT_VOCABULARY,
    MESSAGE_OVERHEAD_TOKENS,
    PRIMING_TOKENS,
    Calibration,
    count_text_tokens,
    fits_in_tokens,
    message_tokens,
    request_tokens,
    vocabulary_for,
)

VOCABULARIES = ("o200k_base", "cl100k_base")
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|endofprompt|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
)


@pytest.mark.parametrize(
    ("text", "o200k", "cl100k"),
    [
        pytest.param("", 0, 0, id="nothing"),
        pytest.param("hello world", 2, 2, id="latin"),
        pytest.param("tiktoken is great!", 6, 6, id="the-cookbook-example"),
        pytest.param("お誕生日おめでとう", 8, 9, id="japanese-of-the-cookbook"),
        pytest.param("antidisestablishmentarianism", 6, 6, id="a-long-word"),
        pytest.param("2 + 2 = 4", 7, 7, id="digits-and-marks"),
    ],
)
def test_the_count_is_that_of_the_published_tokenizer(text: str, o200k: int, cl100k: int) -> None:
    """These figures stand in OpenAI's own cookbook on counting tokens."""
    assert count_text_tokens(text, "o200k_base") == o200k
    assert count_text_tokens(text, "cl100k_base") == cl100k


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    ("text", "least"),
    [
        pytest.param("The user lives in Taipei and works as a nurse. " * 10, 100, id="latin"),
        pytest.param("使用者下個月要考多益，想把時態弄清楚。" * 50, 500, id="han-is-not-a-quarter-token-a-character"),
        pytest.param("사용자는 다음 달에 시험을 봅니다. " * 50, 400, id="hangul"),
        pytest.param("👩‍👩‍👧‍👦" * 50, 350, id="joined-emoji"),
        pytest.param("for (int i = 0; i < n; ++i) { sum += a[i]; }\n" * 20, 400, id="code"),
        pytest.param("a" * 100_000, 6_000, id="a-hundred-thousand-times-a"),
    ],
)
def test_no_script_is_counted_too_low(vocabulary: str, text: str, least: int) -> None:
    """A rule like four characters a token would be far below the truth."""
    assert count_text_tokens(text, vocabulary) >= least


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_the_text_of_a_special_token_is_ordinary_text(vocabulary: str, special: str) -> None:
    """It is counted as the several tokens that its letters are, and is never refused."""
    assert count_text_tokens(special, vocabulary) >= 3
    assert count_text_tokens(f"say {special} twice {special}", vocabulary) >= 8


@given(texts, st.integers(0, 80), st.sampled_from(VOCABULARIES))
def test_fitting_agrees_with_counting(text: str, limit: int, vocabulary: str) -> None:
    """Giving up early does not change the answer."""
    assert fits_in_tokens(text, limit, vocabulary) == (count_text_tokens(text, vocabulary) <= limit)


@given(texts)
def test_nothing_fits_below_zero(text: str) -> None:
    """A budget that is used up takes not even an empty text."""
    assert not fits_in_tokens(text, -1)


def test_whether_a_megabyte_fits_is_known_at_once() -> None:
    """The check of a large message costs next to nothing."""
    megabyte = "word " * 200_000
    started = perf_counter()
    assert not fits_in_tokens(megabyte, 1_000)
    assert perf_counter() - started < 0.1


def test_a_lone_surrogate_cannot_be_counted() -> None:
    """What cannot be encoded cannot be sent; the caller hears of it."""
    with pytest.raises(UnicodeEncodeError):
        count_text_tokens("\ud800")


@given(texts, st.lists(st.tuples(st.sampled_from(["user", "assistant", "developer"]), texts), max_size=5))
def test_a_request_is_the_sum_of_its_parts(instructions: str, messages: list[tuple[str, str]]) -> None:
    """Every message costs its content and the overhead; so do instructions, if there are any."""
    parts = [message_tokens(count_text_tokens(content)) for _, content in messages]
    if instructions:
        parts.append(message_tokens(count_text_tokens(instructions)))
    assert request_tokens(instructions, messages) == PRIMING_TOKENS + sum(parts)
    assert message_tokens(0) == MESSAGE_OVERHEAD_TOKENS


@pytest.mark.parametrize(
    ("model", "vocabulary"),
    [
        ("gpt-5-mini", "o200k_base"),
        ("gpt-4o", "o200k_base"),
        ("gpt-4o-mini-2024-07-18", "o200k_base"),
        ("gpt-4.1-nano", "o200k_base"),
        ("gpt-4.5-preview", "o200k_base"),
        ("o3", "o200k_base"),
        ("gpt-4", "cl100k_base"),
        ("gpt-4-turbo", "cl100k_base"),
        ("gpt-3.5-turbo", "cl100k_base"),
        ("gpt-35-turbo", "cl100k_base"),
        ("openai/gpt-4", "cl100k_base"),
        ("ft:gpt-3.5-turbo-0125:org::abc", "cl100k_base"),
        ("GPT-4", "cl100k_base"),
        ("my-local-7b", "o200k_base"),
        ("", "o200k_base"),
    ],
)
def test_a_model_is_counted_with_its_family(model: str, vocabulary: str) -> None:
    """Old families have their own vocabulary; every unknown model gets the newest."""
    assert vocabulary_for(model) == vocabulary
    assert DEFAULT_VOCABULARY == "o200k_base"


calibrations = st.builds(Calibration, st.floats(1.0, 4.0))
counts = st.integers(1, 10_000_000)


@given(calibrations, st.integers(0, 10_000_000))
def test_what_the_budget_allows_is_never_over_it(calibration: Calibration, tokens: int) -> None:
    """Counted here and scaled up again, the local ceiling is at most the real one, and it wastes nothing."""
    local = calibration.budget(tokens)
    assert calibration.apply(local) <= tokens
    assert calibration.apply(local + 1) > tokens


@given(calibrations, st.integers(-10, 10_000_000), st.integers(-10, 100_000_000))
def test_a_factor_stays_between_one_and_four(calibration: Calibration, counted: int, actual: int) -> None:
    """Whatever a provider reports, counting never gets cheaper than local and never absurdly dear."""
    assert 1.0 <= calibration.observe(counted, actual).factor <= 4.0


@given(calibrations, counts, counts)
def test_it_rises_at_once(calibration: Calibration, counted: int, actual: int) -> None:
    """After one report above the expectation, the same request is expected to cost what it cost."""
    learned = calibration.observe(counted, actual)
    assert learned.apply(counted) >= min(actual, 4 * counted) - 1
    if calibration.apply(counted) < actual <= 4 * counted:
        assert learned.apply(counted) == actual


@given(st.floats(1.5, 4.0), counts)
def test_it_comes_down_slowly(factor: float, counted: int) -> None:
    """One cheap request does not undo what a dear one taught; many do."""
    once = Calibration(factor).observe(counted, counted)
    assert 1.0 < once.factor < factor
    assert once.factor > 1 + (factor - 1) * 0.85
    many = once
    for _ in range(100):
        many = many.observe(counted, counted)
    assert many.factor < 1.01


@pytest.mark.parametrize(("counted", "actual"), [(0, 100), (100, 0), (-5, 100), (100, -5), (0, 0)])
def test_it_ignores_nonsense(counted: int, actual: int) -> None:
    """A provider that reports no usage teaches nothing."""
    assert Calibration(1.5).observe(counted, actual) == Calibration(1.5)


def test_counting_does_not_import_the_slow_package() -> None:
    """Only the compiled part is loaded: the package around it costs half a second of a start."""
    program = (
        "import sys\nfrom memora.core.tokens import count_text_tokens\nassert count_text_tokens('hello world') == 2\n"
        "print(sorted(name for name in sys.modules if name.startswith('bpe_openai')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


def test_what_a_request_costs_beyond_its_texts() -> None:
    """Three tokens start the reply and four surround each message; instructions are one, if there are any."""
    assert request_tokens("", []) == 3
    assert request_tokens("", [("user", "hi")]) == 3 + (4 + 1)
    assert request_tokens("hi", [("user", "hi"), ("assistant", "hi")]) == 3 + 3 * (4 + 1)
