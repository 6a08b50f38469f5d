"""Token arithmetic: what a text, a message and a whole request cost, and how far to trust that.

Owns counting with the model family's own vocabulary and the calibration of it against what providers report. Must not
decide what is sent, and never asks anybody.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, Final

DEFAULT_VOCABULARY: Final = "o200k_base"

MESSAGE_OVERHEAD_TOKENS: Final = 4
"""Role and separators around each message. OpenAI's own recipe says 3 and 1 for a name; local templates differ."""

PRIMING_TOKENS: Final = 3
"""What every request carries to start the reply, by the same recipe."""

_OLD_VOCABULARIES: Final = {
    "gpt-4o": DEFAULT_VOCABULARY,
    "gpt-4.": DEFAULT_VOCABULARY,
    "gpt-4": "cl100k_base",
    "gpt-3.5": "cl100k_base",
    "gpt-35": "cl100k_base",
}
"""Model name prefixes, longest meaning first; every other model is counted with the newest vocabulary."""

VOCABULARIES: Final = frozenset((DEFAULT_VOCABULARY, *_OLD_VOCABULARIES.values()))
"""All that tokens are counted with."""

_MAX_CALIBRATION: Final = 4.0
_CALIBRATION_DECAY: Final = 0.1


def vocabulary_for(model: str) -> str:
    """The vocabulary a model's tokens are counted with; unknown models get the newest, and are calibrated."""
    name = model.rsplit("/", 1)[-1].lower().removeprefix("ft:")
    matches = (vocabulary for prefix, vocabulary in _OLD_VOCABULARIES.items() if name.startswith(prefix))
    return next(matches, DEFAULT_VOCABULARY)


def count_text_tokens(text: str, vocabulary: str = DEFAULT_VOCABULARY) -> int:
    """Tokens of a text; text that spells a special token counts as the ordinary text it is.

    Raises:
        UnicodeEncodeError: the text holds a lone surrogate.
    """
    return int(_tokenizer(vocabulary).count(text))


def fits_in_tokens(text: str, limit: int, vocabulary: str = DEFAULT_VOCABULARY) -> bool:
    """Whether a text has at most `limit` tokens; gives up counting beyond it, so a megabyte costs next to nothing."""
    return limit >= 0 and _tokenizer(vocabulary).count_till_limit(text, limit) is not None


def message_tokens(content_tokens: int) -> int:
    """Tokens a message of this content adds to a request."""
    return content_tokens + MESSAGE_OVERHEAD_TOKENS


def request_tokens(instructions: str, messages: Iterable[tuple[str, str]], vocabulary: str = DEFAULT_VOCABULARY) -> int:
    """Input tokens of a whole request of `(role, content)` messages, instructions and every overhead included."""
    contents = [instructions] if instructions else []
    contents += [content for _, content in messages]
    return PRIMING_TOKENS + sum(message_tokens(count_text_tokens(content, vocabulary)) for content in contents)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens a model really sees for each one counted here, never less than 1.

    It rises at once, so that the budget holds from the next request on, and comes down slowly.
    """

    factor: float = 1.0

    def observe(self, counted: int, actual: int) -> Calibration:
        """Learn from one request that was counted as `counted` and reported as `actual`."""
        if counted <= 0 or actual <= 0:
            return self
        seen = min(max(actual / counted, 1.0), _MAX_CALIBRATION)
        if seen >= self.factor:
            return Calibration(seen)
        return Calibration(self.factor + (seen - self.factor) * _CALIBRATION_DECAY)

    def apply(self, counted: int) -> int:
        """What the model is expected to count."""
        return ceil(counted * self.factor - 1e-9)

    def budget(self, tokens: int) -> int:
        """How many locally counted tokens fit into `tokens` of the model's."""
        counted = int(tokens / self.factor) + 1
        while counted > 0 and self.apply(counted) > tokens:
            counted -= 1
        return counted


@cache
def _tokenizer(vocabulary: str) -> Any:
    return _bindings().tokenizer_for_encoding(vocabulary)


@cache
def _bindings() -> Any:
    """The compiled part of `bpe_openai`, alone.

    Importing the package costs half a second and 149 MB, because it also builds Python tables nobody reads here; the
    extension costs a tenth of both. That is why the package is pinned exactly.
    """
    package = importlib.util.find_spec("bpe_openai")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("bpe_openai is not installed: install memora again")
    spec = importlib.machinery.PathFinder.find_spec("_bindings", list(package.submodule_search_locations))
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("bpe_openai has no compiled part for this platform")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
