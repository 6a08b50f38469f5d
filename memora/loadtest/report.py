"""What a load test came to: a record for programs, and its figures and verdicts for people.

Owns the names in the record, and what is said of a verdict. Pure; how it looks is decided where it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from memora.loadtest.histogram import Histogram
from memora.loadtest.run import Second, Seen
from memora.loadtest.words import Words

_MOST_KINDS: Final = 5
"""Kinds of errors that are named; `--json` has them all."""


def record_of(seen: Seen, about: dict[str, Any]) -> dict[str, Any]:
    """The object that `--json` writes; times in seconds."""
    return {
        **about,
        "turns": seen.turns,
        "errors": seen.failures,
        "errors_by_kind": dict(seen.errors),
        "retries": seen.retries,
        "elapsed_seconds": round(seen.elapsed, 3),
        "turns_per_second": round(seen.turns / seen.elapsed, 2) if seen.elapsed else 0.0,
        "most_at_once": seen.most_in_flight,
        "most_conversations_active": seen.most_active,
        "turns_held_back": seen.held_back,
        "gap_messages": seen.gap_messages,
        "accidents": dict(seen.accidents),
        "time_to_first_token_seconds": seen.first_piece.record(),
        "turn_seconds": seen.whole_turn.record(),
        "memory_overhead_seconds": seen.memory.record(),
        "fold_lag_messages": seen.lag_messages.record(),
        "fold_lag_seconds": seen.lag_seconds.record(),
        "lateness_seconds": seen.lateness.record(),
        "tokens": dict(seen.tokens),
        "unfolded_messages": seen.unfolded if seen.unfolded >= 0 else None,
        "audit": seen.audit,
        "judge": seen.judge,
        "ledger": seen.ledger,
        "over_time": [_second_record(second) for second in seen.in_order()],
    }


def figures_of(seen: Seen, words: Words) -> list[tuple[str, Histogram, str]]:
    """What was measured, with its unit."""
    return [
        (words.first_piece, seen.first_piece, "s"),
        (words.whole_turn, seen.whole_turn, "s"),
        (words.memory_overhead, seen.memory, "s"),
        (words.fold_lag_messages, seen.lag_messages, ""),
        (words.fold_lag_seconds, seen.lag_seconds, "s"),
        (words.lateness, seen.lateness, "s"),
    ]


def accidents_of(seen: Seen, words: Words) -> list[tuple[int, str]]:
    """How many there were of each kind of accident."""
    return [(count, words.accidents.get(name, name)) for name, count in sorted(seen.accidents.items())]


def tokens_of(seen: Seen, words: Words) -> list[tuple[int, str]]:
    """How many tokens of each kind the models read and wrote."""
    return [(count, words.tokens.get(name, name)) for name, count in seen.tokens.items()]


def verdicts_of(seen: Seen, words: Words) -> Iterator[tuple[str, str]]:
    """What was found, with a mark: ✓, ✗, or ! if nobody could look. What could not be looked at but must be is ✗."""
    unknown = "✗" if seen.is_private else "!"
    if seen.failures:
        kinds = ", ".join(f"{count:,} × {name}" for name, count in seen.errors.most_common(_MOST_KINDS))
        yield "✗", words.not_answered.format(turns=f"{seen.failures:,}", kinds=kinds)
    if seen.unfolded:
        is_known = seen.unfolded > 0
        yield ("✗", words.folds_stuck.format(messages=f"{seen.unfolded:,}")) if is_known else ("!", words.folds_unknown)
    yield _audit_verdict(seen.audit, unknown, words)
    if seen.ledger:
        differing = f"{len(seen.ledger['differences']):,}"
        is_equal = seen.ledger["ok"]
        yield ("✓", words.ledger_equal) if is_equal else ("✗", words.ledger_differs.format(conversations=differing))
    yield _judge_verdict(seen.judge, unknown, words)


def shown(value: float, unit: str) -> str:
    """A figure with its unit, three digits of it."""
    if unit != "s" or not value:
        return f"{value:,.0f}"
    return f"{value * 1e3:,.1f} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms" if value < 10 else f"{value:,.1f} s"


def _second_record(second: Second) -> dict[str, float | None]:
    return {
        "second": second.at,
        "turns": second.turns,
        "errors": second.errors,
        "in_flight": second.in_flight,
        "conversations_active": second.active,
        "fold_lag_messages": second.lag_messages,
        "fold_lag_seconds": second.lag_seconds,
    }


def _audit_verdict(audit: dict[str, Any], unknown: str, words: Words) -> tuple[str, str]:
    if audit.get("ok") is None:
        return unknown, words.not_audited.format(why=audit.get("why", words.was_stopped))
    figures = {name: f"{audit[name]:,}" for name in ("conversations", "messages", "folds")}
    if audit["ok"]:
        return "✓", words.audit_clean.format(**figures)
    return "✗", words.audit_found.format(findings=f"{len(audit['findings']):,}", **figures)


def _judge_verdict(judge: dict[str, Any], unknown: str, words: Words) -> tuple[str, str]:
    if judge.get("ok") is None:
        return unknown, words.not_judged.format(why=judge.get("why", words.was_stopped))
    figures = {"requests": f"{judge['requests']:,}", "gaps": f"{judge['gap_messages']:,}"}
    if judge["ok"]:
        return "✓", words.judge_clean.format(**figures)
    return "✗", words.judge_found.format(violations=f"{judge['violation_count']:,}", **figures)
