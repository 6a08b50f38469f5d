"""What a load test came to, as a record for programs and as lines for people.

Owns the names of the figures and how they are said. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memora.loadtest.histogram import Histogram
from memora.loadtest.run import Seen


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
        "most_at_once": seen.most_at_once,
        "gap_messages": seen.gap_messages,
        "accidents": dict(seen.accidents),
        "time_to_first_token_seconds": seen.first_piece.record(),
        "turn_seconds": seen.whole_turn.record(),
        "memory_overhead_seconds": seen.memory.record(),
        "fold_lag_messages": seen.lag_messages.record(),
        "fold_lag_seconds": seen.lag_seconds.record(),
        "tokens": dict(seen.tokens),
        "audit": seen.audit,
        "judge": seen.judge,
        "ledger": seen.ledger,
    }


def lines_of(seen: Seen) -> Iterator[str]:
    """The same as a table and two verdicts."""
    yield (
        f"{seen.turns:,} turns in {seen.elapsed:,.0f} s ({seen.turns / max(seen.elapsed, 1e-9):.1f} a second), "
        f"{seen.failures:,} errors, {seen.retries:,} retries, at most {seen.most_at_once:,} at once"
    )
    if seen.accidents:
        yield "accidents: " + ", ".join(f"{count:,} {name}" for name, count in sorted(seen.accidents.items()))
    yield f"{'':<24}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    for name, histogram, unit in figures_of(seen):
        cells = "".join(f"{shown(value, unit):>10}" for value in histogram.record().values())
        yield f"{name:<24}{cells}"
    if seen.tokens:
        yield "tokens: " + ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in seen.tokens.items())
    for name, count in seen.errors.most_common(5):
        yield f"✗ {count:,} × {name}"
    yield from (f"{mark} {text}" for mark, text in verdicts_of(seen))


def figures_of(seen: Seen) -> list[tuple[str, Histogram, str]]:
    """What was measured, with its unit."""
    return [
        ("time to first token", seen.first_piece, "s"),
        ("whole turn", seen.whole_turn, "s"),
        ("memory overhead", seen.memory, "s"),
        ("fold lag, messages", seen.lag_messages, ""),
        ("fold lag, seconds", seen.lag_seconds, "s"),
    ]


def verdicts_of(seen: Seen) -> Iterator[tuple[str, str]]:
    """What the audit and the judge say, with a mark: ✓, ✗, or ! if they could not look."""
    audit, judge = seen.audit, seen.judge
    if audit.get("ok") is None:
        yield "!", f"not audited: {audit.get('why', 'the run was stopped')}"
    else:
        looked = f"{audit['conversations']:,} conversations, {audit['messages']:,} messages, {audit['folds']:,} folds"
        found = f"{len(audit['findings']):,} findings in {looked}"
        yield ("✓", f"audit clean: {looked}") if audit["ok"] else ("✗", f"audit: {found}")
    if seen.ledger:
        turns = "the histories hold every answered turn, and no other"
        wrong = f"{len(seen.ledger['differences']):,} histories differ from what their clients know"
        yield ("✓", f"ledger equal: {turns}") if seen.ledger["ok"] else ("✗", f"ledger: {wrong}")
    if judge.get("ok") is None:
        yield "!", f"not judged: {judge.get('why', 'the run was stopped')}"
    else:
        saw = f"{judge['requests']:,} requests to the model, {judge['gap_messages']:,} messages in reported gaps"
        wrong = f"{judge['violation_count']:,} violations in {saw}"
        clean = f"judge clean: every earlier turn visible exactly once, in order, in {saw}"
        yield ("✓", clean) if judge["ok"] else ("✗", f"judge: {wrong}")


def shown(value: float, unit: str) -> str:
    """A figure with its unit, three digits of it."""
    if unit != "s" or not value:
        return f"{value:,.0f}"
    return f"{value * 1e3:,.1f} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms" if value < 10 else f"{value:,.1f} s"
