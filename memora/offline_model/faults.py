"""What can be made to go wrong with a reply, and which request it happens to.

Owns the kinds of faults, the checks of a scripted rule and the choice of the rule for a request. Must not touch the
wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import h11

from memora.core.prompts import LIMITS_KEY
from memora.core.text import count_words
from memora.offline_model.call import GENERATING, Call
from memora.offline_model.errors import Rejected
from memora.offline_model.reply import Draft

MATCHES: Final = frozenset({*GENERATING, "count", "models"})
"""What a rule can be about; `any` is all of them."""

MAX_DELAY_SECONDS: Final = 3600.0
_MAX_TEXT_CHARACTERS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to go wrong and its parameters, checked and complete."""

    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """When a fault happens. Without a fault it only delays the reply.

    `skip` matching requests pass first, then it happens `times` times, None for always.
    """

    match: str = "any"
    contains: str | None = None
    times: int | None = None
    skip: int = 0
    delay_seconds: float = 0.0
    fault: Fault | None = None

    def applies_to(self, call: Call) -> bool:
        """Whether the rule is about such a request."""
        if self.fault is not None and call.kind not in KINDS[self.fault.kind].reaches:
            return False
        return is_match(self.match, self.contains, call)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a reply goes out: cut after so many characters, spread over a time, or with its JSON torn."""

    cut_after_characters: int | None = None
    over_seconds: float = 0.0
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a fault can be told: a check, how to say it, and the value when it is not given."""

    is_valid: Callable[[object], bool]
    allowed: str
    default: Any


@dataclass(frozen=True, slots=True)
class Kind:
    """Which requests a kind of fault can happen to, and its parameters."""

    reaches: frozenset[str]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def is_match(match: str, contains: str | None, call: Call) -> bool:
    """Whether a request is of the kind `match` and holds the text `contains`, if one is asked for."""
    if call.kind != match if match != "any" else call.kind not in MATCHES:
        return False
    return contains is None or call.mentions(contains)


def read_rule(record: Mapping[str, Any]) -> Rule:
    """Check a rule as it comes over HTTP.

    Raises:
        Rejected: a field is unknown or has a value it cannot have.
    """
    fields = _checked(record, _RULE_FIELDS, "rule")
    return Rule(**{**fields, "fault": None if fields["fault"] is None else _read_fault(fields["fault"])})


def read_target(record: Mapping[str, Any]) -> tuple[str, str | None]:
    """Check what a hold is about: `match` and `contains`, as in a rule.

    Raises:
        Rejected: as `read_rule`.
    """
    fields = _checked(record, {name: _RULE_FIELDS[name] for name in ("match", "contains")}, "hold")
    return fields["match"], fields["contains"]


def apply_to_draft(fault: Fault, draft: Draft, call: Call) -> Draft:
    """The reply a fault makes of an honest one; the same, if it changes only how a reply goes out."""
    change = _CHANGES.get(fault.kind)
    return draft if change is None else change(draft, fault.parameters, call)


def delivery_for(fault: Fault) -> Delivery:
    """How a reply goes out under a fault."""
    make = _DELIVERIES.get(fault.kind)
    return Delivery() if make is None else make(fault.parameters)


def garbage() -> bytes:
    """Bytes that look random and are always the same: neither text nor JSON nor events."""
    return bytes((number * number * 131 + number * 89 + 0xC3) % 251 for number in range(2048))


HTML_PAGE: Final = b"""<!DOCTYPE html>
<html><head><title>Welcome</title></head>
<body><h1>Sign in to the network</h1><p>This page was not written by a model.</p></body></html>
"""


class FaultBook:
    """The rules in force, in the order they were added."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._added = 0

    def add(self, rule: Rule) -> int:
        """Put a rule after the others; returns its id."""
        self._added += 1
        self._entries.append(_Entry(self._added, rule))
        return self._added

    def clear(self) -> None:
        """Forget every rule."""
        self._entries.clear()

    def choose(self, call: Call) -> tuple[int, Rule] | None:
        """The rule that happens to a request, with its id; counts the request for the rules it was weighed against."""
        for entry in self._entries:
            if entry.rule.applies_to(call) and entry.takes_one():
                return entry.id, entry.rule
        return None


@dataclass(slots=True)
class _Entry:
    id: int
    rule: Rule
    seen: int = 0

    def takes_one(self) -> bool:
        """Count a matching request; whether the rule happens to it."""
        self.seen += 1
        place = self.seen - self.rule.skip
        return place > 0 and (self.rule.times is None or place <= self.rule.times)


def _checked(record: Mapping[str, Any], allowed: Mapping[str, Parameter], subject: str) -> dict[str, Any]:
    """The fields of a record with their defaults; a field that was sent has a value it can have."""
    for name, value in record.items():
        if name not in allowed:
            names = ", ".join(sorted(allowed)) or "nothing"
            raise Rejected(400, f"A {subject} has no '{name}'; it can have {names}.", param=name)
        if not allowed[name].is_valid(value):
            raise Rejected(400, f"Invalid '{name}' of a {subject}: it has to be {allowed[name].allowed}.", param=name)
    return {name: record.get(name, parameter.default) for name, parameter in allowed.items()}


def _read_fault(record: Mapping[str, Any]) -> Fault:
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise Rejected(400, f"There is no fault {kind!r}; there are {', '.join(KINDS)}.", param="fault")
    parameters = {name: value for name, value in record.items() if name != "kind"}
    return Fault(kind, _checked(parameters, KINDS[kind].parameters, f"'{kind}' fault"))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_null(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_times(value: object) -> bool:
    return value is None or _is_count(value)


def _is_seconds(value: object) -> bool:
    return _is_positive(value) or (value == 0 and not isinstance(value, bool))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_DELAY_SECONDS


def _is_match_name(value: object) -> bool:
    return isinstance(value, str) and (value == "any" or value in MATCHES)


def _is_object_or_null(value: object) -> bool:
    return value is None or isinstance(value, dict)


def _is_anything(_: object) -> bool:
    return True


def _is_status(value: object) -> bool:
    return isinstance(value, int) and 200 <= value <= 599 and value not in {204, 205, 304}


def _are_headers(value: object) -> bool:
    if not isinstance(value, dict) or {name.lower() for name in value} & {"content-length", "transfer-encoding"}:
        return False
    try:
        h11.Response(status_code=200, headers=[(name, content) for name, content in value.items()])
    except (h11.LocalProtocolError, TypeError, UnicodeEncodeError):
        return False
    return True


_RULE_FIELDS: Final = {
    "match": Parameter(_is_match_name, f"any, {', '.join(sorted(MATCHES))}", "any"),
    "contains": Parameter(_is_text_or_null, "a string or null", None),
    "times": Parameter(_is_times, "a count or null for always", None),
    "skip": Parameter(_is_count, "a count", 0),
    "delay_seconds": Parameter(_is_seconds, f"0 to {MAX_DELAY_SECONDS:g}", 0.0),
    "fault": Parameter(_is_object_or_null, "an object with a 'kind', or null", None),
}

_STATUS_PARAMETERS: Final = {
    "status": Parameter(_is_status, "a status from 200 to 599 that has a body", 500),
    "code": Parameter(_is_text_or_null, "a string or null", None),
    "body": Parameter(_is_anything, "any JSON", None),
    "headers": Parameter(_are_headers, "an object of header names to strings, without the framing ones", {}),
}

KINDS: Final[dict[str, Kind]] = {
    "status": Kind(MATCHES, _STATUS_PARAMETERS),
    "reset": Kind(MATCHES),
    "close": Kind(MATCHES),
    "cut": Kind(MATCHES, {"after_characters": Parameter(_is_count, "a count", 10)}),
    "hang": Kind(MATCHES),
    "drip": Kind(MATCHES, {"seconds": Parameter(_is_positive, f"above 0, to {MAX_DELAY_SECONDS:g}", 40.0)}),
    "garbage": Kind(MATCHES),
    "truncated_json": Kind(MATCHES),
    "html": Kind(MATCHES),
    "wrong_usage": Kind(
        GENERATING | {"count"}, {"factor": Parameter(_is_positive, f"above 0, to {MAX_DELAY_SECONDS:g}", 1.5)}
    ),
    "empty": Kind(GENERATING),
    "whitespace": Kind(GENERATING),
    "refusal": Kind(GENERATING),
    "incomplete": Kind(GENERATING, {"reason": Parameter(_is_text, "a string", "max_output_tokens")}),
    "silent_cut": Kind(GENERATING),
    "failed": Kind(GENERATING),
    "error_event": Kind(GENERATING),
    "no_terminal": Kind(GENERATING),
    "no_usage": Kind(GENERATING),
    "tool_call": Kind(GENERATING),
    "text": Kind(GENERATING, {"text": Parameter(_is_text, "a string", "")}),
    "too_long": Kind(GENERATING, {"times": Parameter(_is_positive, f"above 0, to {MAX_DELAY_SECONDS:g}", 10)}),
    "reasoning": Kind(GENERATING),
    "echo": Kind(GENERATING),
}
"""Every fault. Those about text cannot happen to a count or a list of models, and a rule for `any` passes these by."""


def _first_half(draft: Draft) -> str:
    return draft.text[: (len(draft.text) + 1) // 2]


def _too_long(draft: Draft, parameters: Mapping[str, Any], call: Call) -> Draft:
    """The text over and over, until it has so many times the words that were allowed, or its own."""
    own_words = max(1, count_words(draft.text))
    allowed_words = call.document.get(LIMITS_KEY, {}).get("words", own_words)
    copies = math.ceil(parameters["times"] * allowed_words / own_words)
    copies = max(1, min(copies, _MAX_TEXT_CHARACTERS // (len(draft.text) + 1)))
    return replace(draft, text=" ".join([draft.text] * copies))


def _echo(draft: Draft, _: Mapping[str, Any], call: Call) -> Draft:
    lines = call.instructions.splitlines()
    headings = [line for line in lines[1:] if line.startswith("#") or line.rstrip().endswith(":")]
    return replace(draft, text="\n".join([*lines[:1], *headings, call.messages[-1][1]]))


def _silent_cut(draft: Draft, _: Mapping[str, Any], call: Call) -> Draft:
    """Half of the text, called complete, with as many output tokens as were allowed: llama.cpp's way."""
    return replace(draft, text=_first_half(draft), output_tokens=call.max_output_tokens)


_REASONING: Final = "<think>\nThe user wants something from me. Let me think about it step by step.\n</think>\n\n"
_REFUSAL: Final = "I'm sorry, but I can't help with that."

_CHANGES: Final[dict[str, Callable[[Draft, Mapping[str, Any], Call], Draft]]] = {
    "empty": lambda draft, *_: replace(draft, text=""),
    "whitespace": lambda draft, *_: replace(draft, text=" \n\t \n"),
    "refusal": lambda draft, *_: replace(draft, text=_REFUSAL, form="refusal"),
    "incomplete": lambda draft, parameters, _: replace(
        draft, text=_first_half(draft), ending="incomplete", reason=parameters["reason"]
    ),
    "silent_cut": _silent_cut,
    "failed": lambda draft, *_: replace(draft, ending="failed"),
    "error_event": lambda draft, *_: replace(draft, ending="error"),
    "no_terminal": lambda draft, *_: replace(draft, ending="none"),
    "cut": lambda draft, parameters, _: replace(draft, sent_characters=parameters["after_characters"], ending="cut"),
    "no_usage": lambda draft, *_: replace(draft, usage_factor=None),
    "wrong_usage": lambda draft, parameters, _: replace(draft, usage_factor=parameters["factor"]),
    "tool_call": lambda draft, *_: replace(draft, text='{"query":"memora"}', form="function_call"),
    "text": lambda draft, parameters, _: replace(draft, text=parameters["text"]),
    "too_long": _too_long,
    "reasoning": lambda draft, *_: replace(draft, text=_REASONING + draft.text),
    "echo": _echo,
}

_DELIVERIES: Final[dict[str, Callable[[Mapping[str, Any]], Delivery]]] = {
    "cut": lambda parameters: Delivery(cut_after_characters=parameters["after_characters"]),
    "drip": lambda parameters: Delivery(over_seconds=parameters["seconds"]),
    "truncated_json": lambda _: Delivery(is_torn=True),
}
