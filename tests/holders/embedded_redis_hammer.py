"""A process that comes and goes at a private server: `embedded_redis_hammer.py DIRECTORY SECONDS`.

Says in one line of JSON how often it came, how often it had to start the server, and how many of its increments were
acknowledged.
"""

import json
import random
import sys
import time
from pathlib import Path

import redis

from memora.embedded_redis import EmbeddedRedis


def visit(directory: Path) -> tuple[bool, int]:
    """Use the server once; whether it had to be started, and how many increments it acknowledged."""
    increments = random.randrange(8)
    with EmbeddedRedis(directory) as server, redis.Redis.from_url(server.url) as client:
        for _ in range(increments):
            client.incr("counter")
    return server.started, increments


if __name__ == "__main__":
    end = time.monotonic() + float(sys.argv[2])
    visits: list[tuple[bool, int]] = []
    while time.monotonic() < end:
        visits.append(visit(Path(sys.argv[1])))
        time.sleep(random.uniform(0, 0.03))  # away for a while, so that there is a last one out
    said = {"visits": len(visits), "starts": sum(v[0] for v in visits), "acknowledged": sum(v[1] for v in visits)}
    print(json.dumps(said), flush=True)  # noqa: T201 - the pipe to the test
