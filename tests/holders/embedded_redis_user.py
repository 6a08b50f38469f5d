"""A process that uses the private server of a directory: `embedded_redis_user.py DIRECTORY`.

Stays a user until its standard input ends or a signal comes; says in lines of JSON what happened.
"""

import json
import signal
import sys
from pathlib import Path
from types import FrameType

from memora.embedded_redis import EmbeddedRedis


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201 - the pipe to the test


def leave(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    server = EmbeddedRedis(Path(sys.argv[1]))
    server.start()
    try:
        say(started=server.started)
        sys.stdin.read()
    finally:
        say(stopped=server.stop())
