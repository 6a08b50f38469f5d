"""The settings: read from the environment and `.env`, checked as a whole, explained when wrong.

Owns names, defaults and limits; the table in the README is made from here. Must not open anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from memora.core.folding import LONGEST_BACKOFF_SECONDS, SMALLEST_ROOM_TOKENS, FoldLimits
from memora.core.prompts import DEFAULT_INSTRUCTIONS, fold_request
from memora.core.quality_gate import SummaryCap
from memora.core.tokens import count_text_tokens, message_tokens, request_tokens, vocabulary_for
from memora.core.window import Budget
from memora.errors import SettingsError

PREFIX: Final = "MEMORA_"

_SMALLEST_CONVERSATION_TOKENS: Final = 32
"""A budget must leave at least this much beside the instructions, or nobody can say anything."""

_CENTURY_SECONDS: Final = 3_155_760_000
"""Redis cannot store an expiry that overflows; nobody means a longer one."""

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Settings(BaseSettings):
    """All settings. A field `max_recent_turns` is read from `MEMORA_MAX_RECENT_TURNS`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        env_file=".env",
        env_file_encoding="utf-8",
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        str_strip_whitespace=True,
        populate_by_name=True,
    )

    redis_url: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("MEMORA_REDIS_URL", "REDIS_URL"),
        description="Where conversations live: `redis://`, `rediss://`, `unix://`. None: a private server of your own",
    )
    redis_server: Path | None = Field(
        None, description="The server program for the private Redis, instead of the bundled one"
    )
    data_dir: Path | None = Field(
        None, description="Where the private Redis keeps its data. None: the user's data directory"
    )
    shards: int = Field(1, ge=1, le=16_384, description="Hash tags that conversations are spread over")
    openai_api_key: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("MEMORA_OPENAI_API_KEY", "OPENAI_API_KEY"),
        description="The key for the model. None: the offline model",
    )
    openai_base_url: str | None = Field(
        None,
        validation_alias=AliasChoices("MEMORA_OPENAI_BASE_URL", "OPENAI_BASE_URL"),
        description="Another endpoint that speaks the Responses API",
    )
    offline: bool = Field(default=False, description="Use the offline model even if there is a key")
    model: str = Field("gpt-5-mini", min_length=1, description="The model that answers")
    summary_model: str | None = Field(
        None, min_length=1, description="The model that folds. None: the one that answers"
    )
    instructions: str | None = Field(None, description="Replaces the default persona: text, or `@file`")
    summary_role: Literal["developer", "instructions"] = Field(
        "developer", description="How the summary is sent; `instructions` is for servers that reject the developer role"
    )
    max_recent_turns: int = Field(3, ge=0, le=1_000, description="Turns that stay word for word")
    fold_batch_turns: int = Field(
        1,
        ge=1,
        le=1_000,
        description="Turns that leave the window, and are folded, together, if the budget allows",
    )
    max_input_tokens: int = Field(1_000, ge=64, le=10_000_000, description="Ceiling on the whole input of one answer")
    max_summary_words: int = Field(
        150, ge=10, le=100_000, description="Cap of the summary; two CJK characters are a word"
    )
    max_summary_tokens: int = Field(300, ge=16, le=1_000_000, description="Hard cap of a stored summary")
    max_fold_input_tokens: int = Field(
        8_000, ge=1_000, le=10_000_000, description="Ceiling on the input of one summary call"
    )
    max_message_chars: int = Field(200_000, ge=1, le=10_000_000, description="Larger messages are refused at once")
    token_counter: Literal["auto", "local", "api"] = Field(
        "auto", description="Count locally, by the endpoint, or locally with the endpoint asked near the edge"
    )
    answer_timeout_seconds: Seconds = Field(120.0, description="Total deadline of one answer")
    summary_timeout_seconds: Seconds = Field(60.0, description="Total deadline of one summary call")
    fold_lease_seconds: Annotated[float, Field(ge=1, le=3_600)] = Field(
        15.0, description="How soon another worker takes over the fold of a dead one"
    )
    fold_retry_seconds: Annotated[float, Field(ge=0.05, le=LONGEST_BACKOFF_SECONDS)] = Field(
        1.0, description="First back-off of a failed fold"
    )
    worker_concurrency: int = Field(20, ge=1, le=1_000, description="Folds one worker runs at the same time")
    conversation_ttl: int | None = Field(
        None, ge=1, le=_CENTURY_SECONDS, description="Seconds after its last turn that a conversation is forgotten"
    )
    api_keys: SecretStr | None = Field(
        None,
        description="Keys of the HTTP API, separated by commas. None: only this machine may connect, without a key",
    )
    host: str = Field("127.0.0.1", min_length=1, description="Where the HTTP API listens")
    port: int = Field(8000, ge=0, le=65_535, description="Port of the HTTP API; 0 takes a free one")
    turn_wait_seconds: Seconds = Field(30.0, description="How long a turn waits for another one of its conversation")
    shutdown_grace_seconds: Annotated[float, Field(ge=0, le=3_600)] = Field(
        20.0, description="How long running answers may take to finish when the server stops"
    )
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1_024, description="Larger requests to the HTTP API are refused")
    max_concurrent_requests: int = Field(
        512, ge=1, le=100_000, description="Requests the HTTP API works on at the same time; more get 503"
    )
    max_event_streams: int = Field(256, ge=0, le=100_000, description="Open event streams; more get 503")
    rate_limit_per_minute: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests a minute of one key, or of one address where no keys are set"
    )
    lang: str | None = Field(None, description="Language of the terminal: `en` or `zh-TW`. None: by locale")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "WARNING", description="What the log on stderr shows"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto",
        description="Form of the server's log. `auto`: text on a terminal, else, or with a log level, JSON lines",
    )

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: SecretStr | None) -> SecretStr | None:
        schemes = ("redis://", "rediss://", "unix://")
        if url is not None and not url.get_secret_value().startswith(schemes):
            raise ValueError("must start with redis://, rediss:// or unix://")
        return url

    @field_validator("openai_base_url")
    @classmethod
    def _http_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return url

    @field_validator("lang")
    @classmethod
    def _known_language(cls, lang: str | None) -> str | None:
        if lang is not None and not lang.lower().replace("_", "-").startswith(("en", "zh")):
            raise ValueError("must be en or zh-TW")
        return lang

    @field_validator("instructions")
    @classmethod
    def _from_file(cls, value: str | None) -> str | None:
        if value is None or not value.startswith("@"):
            return value
        try:
            return Path(value[1:]).expanduser().read_text("utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ValueError(f"cannot read the file: {reason}") from None

    @model_validator(mode="after")
    def _budgets_agree(self) -> Settings:
        if self.max_summary_tokens >= self.max_input_tokens:
            raise ValueError(
                f"MEMORA_MAX_SUMMARY_TOKENS={self.max_summary_tokens} fills the whole input budget of "
                f"MEMORA_MAX_INPUT_TOKENS={self.max_input_tokens}: use a smaller summary or a larger budget"
            )
        least = message_tokens(count_text_tokens(self.instructions_text)) + _SMALLEST_CONVERSATION_TOKENS
        if least > self.max_input_tokens:
            raise ValueError(
                f"MEMORA_MAX_INPUT_TOKENS={self.max_input_tokens} leaves no room beside the instructions: "
                f"use {least} or more, or shorter MEMORA_INSTRUCTIONS"
            )
        empty = fold_request("", (), max_words=self.max_summary_words, max_tokens=self.max_summary_tokens)
        used = request_tokens(empty.instructions, empty.messages, self.fold_limits.vocabulary)
        fold = used + self.fold_limits.cap.max_data_tokens + SMALLEST_ROOM_TOKENS
        if fold > self.max_fold_input_tokens:
            raise ValueError(
                f"MEMORA_MAX_FOLD_INPUT_TOKENS={self.max_fold_input_tokens} cannot hold a summary of "
                f"MEMORA_MAX_SUMMARY_TOKENS={self.max_summary_tokens} and new messages: use {fold} or more"
            )
        return self

    @property
    def uses_offline_model(self) -> bool:
        """Whether answers and summaries come from the offline model."""
        return self.offline or (self.openai_api_key is None and self.openai_base_url is None)

    @property
    def instructions_text(self) -> str:
        """What the answering model is told."""
        return DEFAULT_INSTRUCTIONS if self.instructions is None else self.instructions

    @property
    def fold_model(self) -> str:
        """The model that summarizes."""
        return self.summary_model or self.model

    @property
    def budget(self) -> Budget:
        """The limits of an answer's context."""
        return Budget(
            max_input_tokens=self.max_input_tokens,
            max_recent_turns=self.max_recent_turns,
            max_summary_tokens=self.max_summary_tokens,
            vocabulary=vocabulary_for(self.model),
            summary_in_instructions=self.summary_role == "instructions",
            fold_batch_turns=self.fold_batch_turns,
        )

    @property
    def fold_limits(self) -> FoldLimits:
        """The limits of a fold."""
        cap = SummaryCap(self.max_summary_words, self.max_summary_tokens, vocabulary_for(self.model))
        return FoldLimits(self.max_fold_input_tokens, cap, vocabulary_for(self.fold_model))


def load_settings(**overrides: Any) -> Settings:
    """Read the settings; `overrides` are what the command line says.

    Raises:
        SettingsError: one line that names the variable, the value and what is allowed.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(dict(problem)) for problem in error.errors())) from None
    except UnicodeDecodeError:
        raise SettingsError("the file .env is not UTF-8 text: save it again as UTF-8") from None
    except OSError as error:
        raise SettingsError(f"the file .env cannot be read: {error.strerror}") from None


def variable_of(field: str) -> str:
    """The environment variable a field is read from."""
    return PREFIX + field.upper()


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that begin like ours and mean nothing to us: most likely a slip of the keyboard."""
    known = {variable_of(field) for field in Settings.model_fields}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def settings_table() -> str:
    """All settings as a Markdown table: variable, default, what it does."""
    rows = [
        f"| `{variable_of(name)}` | {_shown_default(field.default)} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(("| setting | default | |", "|---|---|---|", *rows))


def _shown_default(default: object) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"{default:,}" if isinstance(default, int) else f"`{default}`"


_SECRETS: Final = ("redis_url", "openai_api_key", "api_keys")
_PLAIN_NAMES: Final = ("REDIS_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL")


def _explain(problem: dict[str, Any]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    field = str(problem["loc"][0]).lower().removeprefix(PREFIX.lower())
    variable = _variable_in_use(field)
    if field in _SECRETS:
        return f"{variable} has a value that cannot be used (not shown): {_lower_first(message)}"
    value = _PASSWORD_IN_URL.sub("//***@", str(problem["input"]))
    return f"{variable}={value[:80]!r} is not allowed: {_lower_first(message)}"


_PASSWORD_IN_URL: Final = re.compile("//[^/@]*@")


def _variable_in_use(field: str) -> str:
    """The name the user set: some fields answer to two, and `.env` does not tell which."""
    variable, plain = variable_of(field), field.upper()
    if plain not in _PLAIN_NAMES or os.environ.get(variable):
        return variable
    return plain if os.environ.get(plain) else f"{variable} (or {plain})"


def _lower_first(message: str) -> str:
    return message[:1].lower() + message[1:]
