"""What a client asks for: a request body, checked and understood.

Owns the shapes of the API's requests and the recognition of Memora's own summary calls. Pure; must not answer anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from memora.core.prompts import EXISTING_SUMMARY_KEY, LIMITS_KEY, NEW_MESSAGES_KEY, SHORTEN_KEY, SUMMARY_FENCE
from memora.offline_model.errors import Rejected

CallKind = Literal["answer", "summary", "shorten", "count", "models", "unknown"]
GENERATING: Final[frozenset[str]] = frozenset({"answer", "summary", "shorten"})

MODEL_NAME: Final = "memora-offline"
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `messages` are `(role, content)`, oldest first; `document` is the JSON of a summary call."""

    kind: CallKind
    settings: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[tuple[str, str], ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The name the client gave the model; any name will do."""
        return str(self.settings.get("model") or MODEL_NAME)

    @property
    def instructions(self) -> str:
        """The instructions, "" if there are none."""
        return str(self.settings.get("instructions") or "")

    @property
    def is_stream(self) -> bool:
        """Whether the reply shall come as events."""
        return bool(self.settings.get("stream"))

    @property
    def max_output_tokens(self) -> int | None:
        """Where the reply has to be cut off, None for nowhere."""
        limit = self.settings.get("max_output_tokens")
        return None if limit is None else int(limit)

    @property
    def question(self) -> str:
        """The newest thing the user said, "" if there is none."""
        return next((content for role, content in reversed(self.messages) if role == "user"), "")

    @property
    def dialogue(self) -> list[tuple[str, str]]:
        """What user and assistant said before the question, oldest first."""
        spoken = [message for message in self.messages if message[0] in {"user", "assistant"}]
        asked_at = max((place for place, (role, _) in enumerate(spoken) if role == "user"), default=len(spoken))
        return spoken[:asked_at]

    @property
    def summary(self) -> str:
        """The conversation summary the request carries for its answer, "" if it carries none."""
        carriers = [content for role, content in self.messages if role in {"developer", "system"}]
        return next(filter(None, map(_fenced_summary, [*reversed(carriers), self.instructions])), "")

    def mentions(self, fragment: str) -> bool:
        """Whether a text of the request holds `fragment`, however it was escaped on its way."""
        texts = (self.instructions, *(content for _, content in self.messages), *_strings(self.document))
        return any(fragment in text for text in texts)


def read_call(body: bytes) -> Call:
    """Understand the body of `POST /v1/responses`.

    Raises:
        Rejected: the body is not what the API allows, or asks for state, which is not kept here.
    """
    settings = read_object(body)
    _check_settings(settings)
    if settings.get("input") in (None, "", []):
        raise Rejected(400, "Missing required parameter: 'input'.", code="missing_required_parameter", param="input")
    messages = _messages(settings["input"])
    kind, document = _recognise(messages)
    return Call(kind, settings, messages, document)


def read_count_call(body: bytes) -> Call:
    """Understand the body of `POST /v1/responses/input_tokens`, where the input may be missing.

    Raises:
        Rejected: as `read_call`.
    """
    settings = read_object(body)
    _check_settings(settings)
    return Call("count", settings, _messages(settings.get("input") or []))


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        Rejected: it is not one.
    """
    try:
        value = _decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise Rejected(400, f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(value, dict):
        raise Rejected(400, "The body of the request has to be a JSON object.")
    return value


def _decode(text: str) -> Any:
    """Strict JSON: no NaN and, by its UnicodeEncodeError (a ValueError), no lone surrogate, which nobody can count."""
    value = json.loads(text, parse_constant=_no_constant)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_metadata(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(content, str) for content in value.values())


_SETTING_CHECKS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "model": (_is_text, "a string"),
    "instructions": (_is_text, "a string"),
    "stream": (_is_flag, "true or false"),
    "max_output_tokens": (_is_positive, "an integer above 0"),
    "temperature": (_is_number, "a number"),
    "top_p": (_is_number, "a number"),
    "metadata": (_is_metadata, "an object of strings"),
}

_STATEFUL_SETTINGS: Final = ("conversation", "previous_response_id")


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name in _STATEFUL_SETTINGS:
        if settings.get(name) is not None:
            message = f"The offline model keeps no state: leave '{name}' out and send the whole context as 'input'."
            raise Rejected(400, message, code="unsupported_parameter", param=name)
    for name, (is_valid, allowed) in _SETTING_CHECKS.items():
        if settings.get(name) is not None and not is_valid(settings[name]):
            raise Rejected(400, f"Invalid '{name}': it has to be {allowed}.", code="invalid_type", param=name)


def _messages(given: object) -> tuple[tuple[str, str], ...]:
    if isinstance(given, str):
        return (("user", given),)
    if not isinstance(given, list):
        raise _invalid_input("it has to be a string or a list of items")
    return tuple(_message(item) for item in given)


def _message(item: object) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise _invalid_input("every item has to be an object")
    kind = item.get("type") or "message"
    if kind != "message":  # a tool call or a piece of reasoning: costs tokens, says nothing here
        return str(kind), json.dumps(item, ensure_ascii=False)
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid_input(f"the role of a message is one of {', '.join(sorted(_ROLES))}")
    return role, _content(item.get("content"))


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid_input("the content of a message is a string or a list of parts")
    return "".join(map(_part, content))


def _part(part: object) -> str:
    if isinstance(part, dict):
        for kind, text_field in _TEXT_PARTS.items():
            if part.get("type") == kind and isinstance(part.get(text_field), str):
                return str(part[text_field])
    raise _invalid_input("the offline model reads text parts only")


def _invalid_input(problem: str) -> Rejected:
    return Rejected(400, f"Invalid 'input': {problem}.", code="invalid_value", param="input")


def _recognise(messages: tuple[tuple[str, str], ...]) -> tuple[CallKind, Mapping[str, Any]]:
    role, content = messages[-1]
    document = _document(content) if role == "user" else {}
    if not _has_limits(document):
        return "answer", {}
    if _is_text(document.get(SHORTEN_KEY)):
        return "shorten", document
    if _is_text(document.get(EXISTING_SUMMARY_KEY)) and _are_messages(document.get(NEW_MESSAGES_KEY)):
        return "summary", document
    return "answer", {}


def _document(content: str) -> Mapping[str, Any]:
    if not content.startswith("{"):
        return {}
    try:
        value = _decode(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _has_limits(document: Mapping[str, Any]) -> bool:
    limits = document.get(LIMITS_KEY)
    return isinstance(limits, dict) and all(_is_positive(limits.get(name)) for name in ("words", "tokens"))


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict) and _is_text(item.get("role")) and _is_text(item.get("content")) for item in value
    )


def _fenced_summary(text: str) -> str:
    lines = text.split("\n")
    opening, closing = f"<{SUMMARY_FENCE}>", f"</{SUMMARY_FENCE}>"
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if (before.strip(), after.strip()) == (opening, closing):
            return _string(line)
    return ""


def _string(literal: str) -> str:
    try:
        value = _decode(literal)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _strings(value: object) -> list[str]:
    """Every string inside a decoded JSON value."""
    found, waiting = [], [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, str):
            found.append(current)
        elif isinstance(current, Mapping):
            waiting.extend(current.values())
        elif isinstance(current, list):
            waiting.extend(current)
    return found
