"""A cue: what to look for in a text, compiled late and looked for only where it can be.

Must not know what is looked for; each file has the cues of its own matter.
"""

from __future__ import annotations

import re
from functools import cached_property


class Cue:
    """Words to look for: `anywhere`, and `chinese` ones only where the text is not plain ASCII.

    Kept apart because trying the Chinese ones at every letter of an English text takes about as long as the rest.
    Compiled when first looked for, because compiling all of them would slow down every start of the program.
    """

    def __init__(self, anywhere: str, chinese: str = "", *, is_case_sensitive: bool = False) -> None:
        self._anywhere_source = anywhere
        self._chinese_source = chinese
        self._flags = re.NOFLAG if is_case_sensitive else re.IGNORECASE

    def is_in(self, comparable: str) -> bool:
        """Whether the text gives the cue."""
        if self._anywhere.search(comparable):
            return True
        return bool(self._chinese_source) and not comparable.isascii() and self._chinese.search(comparable) is not None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Both together, for where the cue stands and not only whether."""
        return re.compile("|".join(filter(None, (self._anywhere_source, self._chinese_source))), self._flags)

    @cached_property
    def _anywhere(self) -> re.Pattern[str]:
        return re.compile(self._anywhere_source, self._flags)

    @cached_property
    def _chinese(self) -> re.Pattern[str]:
        return re.compile(self._chinese_source, self._flags)
