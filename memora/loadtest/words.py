"""What the report of a load test says to a person: a catalogue, of which the command line has one for each language.

Owns the names of the words. Must not hold the words themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Words:
    """Words in braces are filled in. `accidents` and `tokens` say what the names in the record mean."""

    language: str
    title: str
    setting: str
    private_server: str
    result: str
    at_once: str
    held_back: str
    accidents_line: str
    accidents: Mapping[str, str]
    tokens_line: str
    tokens: Mapping[str, str]

    # --- figures
    first_piece: str
    whole_turn: str
    memory_overhead: str
    fold_lag_messages: str
    fold_lag_seconds: str
    lateness: str
    latency_note: str
    lateness_note: str

    # --- verdicts
    not_answered: str
    folds_stuck: str
    folds_unknown: str
    audit_clean: str
    audit_found: str
    not_audited: str
    ledger_equal: str
    ledger_differs: str
    judge_clean: str
    judge_found: str
    not_judged: str
    was_stopped: str

    # --- tiles and charts of the page
    turns_answered: str
    errors: str
    turns_a_second: str
    in_flight: str
    active: str
    most_in_flight: str
    most_active: str
    held_back_tile: str
    first_piece_median: str
    memory_median: str
    retries: str
    in_gaps: str
    tokens_tile: str
    percentiles: str
    latency_by_percentile: str
    first_piece_over_time: str
    at_once_over_time: str
    turns_over_time: str
    turns: str
    messages: str
    seconds: str
    nothing_to_show: str
