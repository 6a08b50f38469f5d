"""How many memory questions could be answered from what the offline model keeps.

    python benchmarks/coverage.py DATA_DIR

Replays the MemoryBank conversations of DATA_DIR (`memorybank_en.jsonl`, `memorybank_zh-tw.jsonl`), folds four turns at
a time and keeps the last six turns word for word. A probe counts as covered if all its patterns are found in summary +
last turns, and as answered if they are found in what `answer` says. No model is asked and nothing is written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bpe_openai  # type: ignore[import-untyped]

from memora.offline_model.extractive import Utterance, answer, summarise

FILES = ("memorybank_en.jsonl", "memorybank_zh-tw.jsonl")
LAST_TURNS = 6
TURNS_PER_FOLD = 4
NO_WORD_CAP = 10**9

_ENCODING = bpe_openai.get_encoding("o200k_base")
_HAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_WORD = re.compile(r"[^\W_\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class Budget:
    """What a summary may measure; `name` is how the row is called."""

    name: str
    max_tokens: int
    max_words: int = NO_WORD_CAP


BUDGETS = (
    Budget("300 tokens", 300),
    Budget("600 tokens", 600),
    Budget("1000 tokens", 1000),
    Budget("150 words, 300 tokens (the product's default)", 300, 150),
)


@dataclass
class Tally:
    """One row: probes, and how many of them the context covers and the answer hits."""

    probes: int = 0
    covered: int = 0
    answered: int = 0

    def add(self, *, is_covered: bool, is_answered: bool) -> None:
        """Count one probe."""
        self.probes += 1
        self.covered += is_covered
        self.answered += is_answered


def count_tokens(text: str) -> int:
    """Tokens of the o200k vocabulary."""
    return len(_ENCODING.encode_ordinary(text))


def count_words(text: str) -> int:
    """A Latin word is one, two Chinese characters are one."""
    return len(_WORD.findall(text)) + (len(_HAN.findall(text)) + 1) // 2


def utterances(turns: Sequence[dict[str, Any]]) -> list[Utterance]:
    """The messages of the turns, oldest first."""
    return [Utterance(role, turn[role]) for turn in turns for role in ("user", "assistant")]


def fold_all(turns: Sequence[dict[str, Any]], budget: Budget) -> str:
    """The summary after all turns were folded, some at a time."""
    summary = ""
    for start in range(0, len(turns), TURNS_PER_FOLD):
        summary = summarise(
            summary,
            utterances(turns[start : start + TURNS_PER_FOLD]),
            max_words=budget.max_words,
            max_tokens=budget.max_tokens,
            count_tokens=count_tokens,
            count_words=count_words,
        )
    return summary


def _hits(probe: dict[str, Any], text: str) -> bool:
    return all(re.search(pattern, text, re.IGNORECASE) for pattern in probe["match_all"])


def tally(conversations: Sequence[dict[str, Any]], summarised: Callable[[list[dict[str, Any]]], str]) -> Tally:
    """Ask every probe at the end of its conversation; `summarised` makes a summary of the folded turns."""
    row = Tally()
    for conversation in conversations:
        summary = summarised(conversation["turns"][:-LAST_TURNS])
        recent = utterances(conversation["turns"][-LAST_TURNS:])
        context = " ".join([summary, *(message.content for message in recent)])
        for probe in conversation["probes"]:
            reply = answer(summary, recent, probe["question"])
            row.add(is_covered=_hits(probe, context), is_answered=_hits(probe, reply))
    return row


def _load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _everything(turns: Sequence[dict[str, Any]]) -> str:
    return " ".join(message.content for message in utterances(turns))


def rows(conversations: Sequence[dict[str, Any]]) -> dict[str, Tally]:
    """All rows of the table by name."""
    table = {"last turns alone": tally(conversations, lambda _: "")}
    for budget in BUDGETS:
        table[budget.name] = tally(conversations, partial(fold_all, budget=budget))
    return {**table, "everything": tally(conversations, _everything)}


def main() -> None:
    """Print the table of each file."""
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/coverage.py DATA_DIR")
    for name in FILES:
        print(name)
        for row_name, row in rows(_load(Path(sys.argv[1]) / name)).items():
            print(f"  {row_name:48} covered {row.covered:2}/{row.probes}  answered {row.answered:2}/{row.probes}")


if __name__ == "__main__":
    main()
