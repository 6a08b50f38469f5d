"""`python -m memora.loadtest.keeper DIRECTORY PID`: clears up behind a load test that was killed.

Owns the pipe on standard input that the load test never writes to: its end means that the load test is gone. A load
test that comes to its own end stops this process before, which then does nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from memora.embedded_redis import EmbeddedRedis
from memora.errors import MemoraError

REDIS: Final = "redis"
"""Where in the directory of a load test its Redis lives."""


def main() -> None:
    """Wait, then end the model of this PID and the Redis in the directory, and remove the directory."""
    home, model = Path(sys.argv[1]), int(sys.argv[2])
    sys.stdin.buffer.read()
    with suppress(ProcessLookupError):
        os.kill(model, signal.SIGTERM)
    with suppress(MemoraError), EmbeddedRedis(home / REDIS):
        pass  # who joins a server that nobody else uses, and leaves it, shuts it down
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
