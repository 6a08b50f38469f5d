"""What can be set, from where, and what a wrong value says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from memora.core.conversation import Message, Summary
from memora.core.folding import FoldWork, plan_fold
from memora.core.prompts import DEFAULT_INSTRUCTIONS, fold_request
from memora.core.tokens import request_tokens
from memora.errors import SettingsError
from memora.settings import Settings, load_settings, unknown_variables, variable_of


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.env` is read where the program starts: here there is none unless a test writes one."""
    monkeypatch.chdir(tmp_path)


def refusal(**environment: str) -> str:
    """What the start says in this environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SettingsError) as refused:
            load_settings()
    return str(refused.value)


def text_of(settings: Settings, field: str) -> Any:
    """A field's value, also of a secret one."""
    value = getattr(settings, field)
    return value.get_secret_value() if isinstance(value, SecretStr) else value


@pytest.mark.parametrize(
    ("variable", "default"),
    [
        ("MEMORA_REDIS_URL", None),
        ("MEMORA_MODEL", "gpt-5-mini"),
        ("MEMORA_SUMMARY_MODEL", None),
        ("MEMORA_MAX_RECENT_TURNS", 3),
        ("MEMORA_MAX_INPUT_TOKENS", 1_000),
        ("MEMORA_MAX_SUMMARY_WORDS", 150),
        ("MEMORA_TOKEN_COUNTER", "auto"),
        ("MEMORA_MAX_SUMMARY_TOKENS", 300),
        ("MEMORA_MAX_MESSAGE_CHARS", 200_000),
        ("MEMORA_ANSWER_TIMEOUT_SECONDS", 120),
        ("MEMORA_SUMMARY_TIMEOUT_SECONDS", 60),
        ("MEMORA_FOLD_LEASE_SECONDS", 15),
        ("MEMORA_FOLD_RETRY_SECONDS", 1),
        ("MEMORA_CONVERSATION_TTL", None),
    ],
)
def test_the_defaults_are_those_of_the_contract(variable: str, default: object) -> None:
    """Section seven, line by line."""
    fields = {variable_of(field): field for field in Settings.model_fields}
    assert getattr(load_settings(), fields[variable]) == default


def test_what_follows_from_the_defaults() -> None:
    """The same model folds, the offline one answers without a key, the persona teaches English."""
    settings = load_settings()
    assert settings.fold_model == "gpt-5-mini"
    assert settings.uses_offline_model
    assert settings.instructions_text == DEFAULT_INSTRUCTIONS
    assert (settings.budget.max_input_tokens, settings.budget.max_recent_turns) == (1_000, 3)
    assert settings.budget.max_summary_tokens == settings.fold_limits.cap.max_tokens == 300
    assert not settings.budget.summary_in_instructions


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        pytest.param("MEMORA_MAX_RECENT_TURNS", "three", "integer", id="a-word-for-a-number"),
        pytest.param("MEMORA_MAX_RECENT_TURNS", "-1", "greater than or equal to 0", id="negative-turns"),
        pytest.param("MEMORA_MAX_RECENT_TURNS", "2.5", "integer", id="half-a-turn"),
        pytest.param("MEMORA_MAX_INPUT_TOKENS", "10", "greater than or equal to 64", id="budget-too-small"),
        pytest.param("MEMORA_MAX_INPUT_TOKENS", "1e12", "integer", id="scientific"),
        pytest.param("MEMORA_MAX_SUMMARY_WORDS", "0", "greater than or equal to 10", id="no-words"),
        pytest.param("MEMORA_TOKEN_COUNTER", "remote", "'auto', 'local' or 'api'", id="unknown-counter"),
        pytest.param("MEMORA_SUMMARY_ROLE", "system", "'developer' or 'instructions'", id="unknown-role"),
        pytest.param("MEMORA_ANSWER_TIMEOUT_SECONDS", "0", "greater than 0", id="no-time-to-answer"),
        pytest.param("MEMORA_ANSWER_TIMEOUT_SECONDS", "inf", "finite", id="endless-time"),
        pytest.param("MEMORA_SUMMARY_TIMEOUT_SECONDS", "nan", "finite", id="not-a-number"),
        pytest.param("MEMORA_FOLD_LEASE_SECONDS", "0.1", "greater than or equal to 1", id="lease-too-short"),
        pytest.param(
            "MEMORA_FOLD_RETRY_SECONDS", "3600", "less than or equal to 60", id="longer-than-the-longest-wait"
        ),
        pytest.param("MEMORA_CONVERSATION_TTL", "0", "greater than or equal to 1", id="forgotten-at-once"),
        pytest.param("MEMORA_CONVERSATION_TTL", "9" * 25, "less than or equal to", id="expiry-that-overflows"),
        pytest.param("MEMORA_SHARDS", "20000", "less than or equal to 16384", id="more-shards-than-slots"),
        pytest.param("MEMORA_OFFLINE", "maybe", "boolean", id="neither-yes-nor-no"),
        pytest.param("MEMORA_MODEL", "   ", "at least 1 character", id="blank-model"),
        pytest.param("MEMORA_LANG", "fr", "en or zh-TW", id="unknown-language"),
        pytest.param("MEMORA_LOG_LEVEL", "LOUD", "'DEBUG', 'INFO'", id="unknown-log-level"),
        pytest.param("MEMORA_OPENAI_BASE_URL", "localhost:1234", "http:// or https://", id="address-without-a-scheme"),
        pytest.param("OPENAI_BASE_URL", "ftp://host", "http:// or https://", id="plain-name-of-the-address"),
        pytest.param("MEMORA_INSTRUCTIONS", "@missing.txt", "No such file", id="missing-file"),
        pytest.param("MEMORA_INSTRUCTIONS", "@.", "directory", id="a-directory-as-file"),
        pytest.param("MEMORA_INSTRUCTIONS", "a\udcff", "unicode", id="text-that-is-no-text"),
    ],
)
def test_a_wrong_value_is_one_line_with_variable_value_and_what_is_allowed(
    variable: str, value: str, allowed: str
) -> None:
    """That is all a person needs to mend it."""
    line = refusal(**{variable: value})
    assert line.startswith(f"{variable}=")
    assert allowed in line
    assert repr(value.strip())[1:-1] in line or repr(value)[1:-1] in line
    assert line.isprintable()


def test_a_value_of_many_lines_is_shown_in_one_and_cut() -> None:
    """A pasted file does not flood the terminal."""
    line = refusal(MEMORA_TOKEN_COUNTER="line\n" * 1_000)
    assert "\n" not in line
    assert len(line) < 250


def test_two_wrong_values_are_both_named() -> None:
    """Nobody has to start three times to learn of three slips."""
    line = refusal(MEMORA_SHARDS="0", MEMORA_MAX_RECENT_TURNS="x")
    assert "MEMORA_SHARDS='0'" in line
    assert "MEMORA_MAX_RECENT_TURNS='x'" in line
    assert "\n" not in line


@pytest.mark.parametrize("variable", ["MEMORA_REDIS_URL", "REDIS_URL"])
@pytest.mark.parametrize("url", ["http://:secret@host:6379", "host:6379/secret", "secret"])
def test_a_wrong_redis_url_is_named_and_never_shown(variable: str, url: str) -> None:
    """It may hold a password."""
    line = refusal(**{variable: url})
    assert line.startswith(f"{variable} ")
    assert "redis://, rediss:// or unix://" in line
    assert "secret" not in line


def test_secrets_stay_out_of_everything_that_is_printed() -> None:
    """Neither the settings nor an error about another field show the key or the password."""
    secret: dict[str, Any] = {"redis_url": "redis://:secret@host", "openai_api_key": "sk-secret"}
    settings = load_settings(**secret)
    assert "secret" not in f"{settings!r}{settings}{settings.model_dump()}{settings.model_dump_json()}"
    with pytest.raises(ValidationError) as wrong:
        Settings(**{**secret, "redis_url": "http://:secret@host"})
    assert "secret" not in str(wrong.value)
    assert "secret" not in refusal(OPENAI_BASE_URL="ftp://me:secret@host/v1")


@pytest.mark.parametrize(
    ("plain", "field", "first", "second"),
    [
        ("REDIS_URL", "redis_url", "redis://a", "redis://b"),
        ("OPENAI_API_KEY", "openai_api_key", "key-a", "key-b"),
        ("OPENAI_BASE_URL", "openai_base_url", "http://a/v1", "http://b/v1"),
    ],
)
def test_the_usual_names_are_understood_and_our_own_win(
    plain: str, field: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine set up for OpenAI and Redis works as it is, and can be told otherwise."""
    monkeypatch.setenv(plain, first)
    assert text_of(load_settings(), field) == first
    monkeypatch.setenv(f"MEMORA_{plain}", second)
    assert text_of(load_settings(), field) == second
    monkeypatch.setenv(f"MEMORA_{plain}", "")
    assert text_of(load_settings(), field) == first
    assert text_of(load_settings(**{field: second}), field) == second


def test_an_empty_value_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MEMORA_X=` in a compose file means that it is not set."""
    for field in Settings.model_fields:
        monkeypatch.setenv(variable_of(field), "")
    assert load_settings() == Settings(_env_file=None)


def test_the_env_file_is_read_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.env` of the current directory, in UTF-8, without complaint about what is not ours."""
    Path(".env").write_text(
        "MEMORA_MODEL=from-file\nMEMORA_MAX_RECENT_TURNS=5\nREDIS_URL=redis://file\nOTHER=1\nMEMORA_INSTRUCTIONS=說中文\n",
        "utf-8",
    )
    monkeypatch.setenv("MEMORA_MODEL", "from-environment")
    settings = load_settings()
    assert (settings.model, settings.max_recent_turns) == ("from-environment", 5)
    assert text_of(settings, "redis_url") == "redis://file"
    assert settings.instructions_text == "說中文"
    assert load_settings(model="from-command-line").model == "from-command-line"


@pytest.mark.parametrize("line", ["MEMORA_REDIS_URL=http://:secret@h", "REDIS_URL=http://:secret@h"])
def test_a_wrong_value_in_the_env_file_is_named(line: str) -> None:
    """Which of the two names it was is not known there, so both are said."""
    Path(".env").write_text(line, "utf-8")
    assert refusal().startswith("MEMORA_REDIS_URL (or REDIS_URL) ")
    assert "secret" not in refusal()


def test_an_env_file_that_is_no_text_is_one_line() -> None:
    """Saved as UTF-16, as some editors do."""
    Path(".env").write_bytes("MEMORA_MODEL=x".encode("utf-16"))
    assert refusal() == "the file .env is not UTF-8 text: save it again as UTF-8"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        pytest.param(
            {"MEMORA_MAX_SUMMARY_TOKENS": "1000"},
            ["MEMORA_MAX_SUMMARY_TOKENS=1000", "MEMORA_MAX_INPUT_TOKENS=1000", "larger budget"],
            id="a-summary-as-large-as-the-budget",
        ),
        pytest.param(
            {"MEMORA_INSTRUCTIONS": "word " * 1_000},
            ["MEMORA_MAX_INPUT_TOKENS=1000", "MEMORA_INSTRUCTIONS", "or more"],
            id="instructions-that-fill-the-budget",
        ),
        pytest.param(
            {"MEMORA_MAX_SUMMARY_TOKENS": "4000", "MEMORA_MAX_INPUT_TOKENS": "9000"},
            ["MEMORA_MAX_FOLD_INPUT_TOKENS=8000", "MEMORA_MAX_SUMMARY_TOKENS=4000", "or more"],
            id="a-summary-that-no-fold-can-hold",
        ),
    ],
)
def test_contradictory_settings_are_refused_together(environment: dict[str, str], words: list[str]) -> None:
    """The line names both sides and a way out."""
    line = refusal(**environment)
    assert all(word in line for word in words)
    assert "\n" not in line


def test_the_way_out_of_a_contradiction_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure that the line says is enough, and one less is not."""
    monkeypatch.setenv("MEMORA_MAX_SUMMARY_TOKENS", "4000")
    monkeypatch.setenv("MEMORA_MAX_INPUT_TOKENS", "9000")
    enough = int(refusal().split(": use ")[1].split()[0])
    assert load_settings(max_fold_input_tokens=enough).max_fold_input_tokens == enough
    with pytest.raises(SettingsError):
        load_settings(max_fold_input_tokens=enough - 1)


def test_the_smallest_allowed_fold_input_holds_a_full_summary_and_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings that are accepted make a fold send more than its cap."""
    monkeypatch.setenv("MEMORA_MAX_FOLD_INPUT_TOKENS", "1000")
    monkeypatch.setenv("MEMORA_MAX_SUMMARY_TOKENS", "600")
    enough = int(refusal().split(": use ")[1].split()[0])
    limits = load_settings(max_fold_input_tokens=enough).fold_limits
    summary = limits.cap.cut('"' * 10_000)
    messages = (Message("user", "好" * 2_000, 0), Message("assistant", "ok", 1))
    plan = plan_fold(FoldWork("a", "g", Summary(summary), messages), limits)
    assert plan is not None
    for step in plan.steps:
        asked = fold_request(summary, step.pieces, max_words=limits.cap.max_words, max_tokens=limits.cap.max_tokens)
        assert request_tokens(asked.instructions, asked.messages, limits.vocabulary) <= enough


def test_instructions_come_from_a_file() -> None:
    """`@file`, with or without a byte-order mark; text is taken as it is."""
    Path("teacher.txt").write_text("\ufeffSpeak plainly.\n說中文。\n", "utf-8")
    assert load_settings(instructions="@teacher.txt").instructions_text == "Speak plainly.\n說中文。"
    assert load_settings(instructions="Speak plainly.").instructions_text == "Speak plainly."


def test_instructions_in_another_encoding_are_refused() -> None:
    """Rather than sent as garbage."""
    Path("teacher.txt").write_bytes("說中文".encode("big5"))
    assert "not UTF-8 text" in refusal(MEMORA_INSTRUCTIONS="@teacher.txt")


@pytest.mark.parametrize(
    ("environment", "offline"),
    [
        ({}, True),
        ({"OPENAI_API_KEY": "key"}, False),
        ({"OPENAI_BASE_URL": "http://localhost:1234/v1"}, False),
        ({"OPENAI_API_KEY": "key", "MEMORA_OFFLINE": "1"}, True),
        ({"OPENAI_API_KEY": ""}, True),
    ],
)
def test_without_a_key_or_an_endpoint_the_offline_model_answers(
    environment: dict[str, str], offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it starts on a machine with nothing set up; `MEMORA_OFFLINE` asks for it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load_settings().uses_offline_model is offline


def test_each_model_is_counted_with_its_own_vocabulary() -> None:
    """The model that folds may be of another family than the one that answers."""
    settings = load_settings(model="gpt-5-mini", summary_model="gpt-4")
    assert settings.budget.vocabulary == settings.fold_limits.cap.vocabulary == "o200k_base"
    assert settings.fold_limits.vocabulary == "cl100k_base"


def test_slips_of_the_keyboard_can_be_found() -> None:
    """A variable that begins like ours and means nothing is named, others are not."""
    environment = {"MEMORA_MAX_RECENT_TURN": "4", "MEMORA_MODEL": "x", "MEMORABLE": "1", "PATH": "/"}
    assert unknown_variables(environment) == ["MEMORA_MAX_RECENT_TURN"]


def test_every_setting_is_described() -> None:
    """The table in the README is made from these."""
    assert all(field.description for field in Settings.model_fields.values())
