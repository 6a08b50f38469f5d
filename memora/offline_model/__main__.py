"""`python -m memora.offline_model`: the offline model as a process; its first line of output is its URL."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Final

import anyio

from memora.offline_model.behaviour import Behaviour
from memora.offline_model.endpoint import OfflineModel

EXIT_UNREACHABLE: Final = 3


def main() -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m memora.offline_model", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--scriptable", action="store_true", help="take faults and show requests under /_control")
    parser.add_argument("--judging", action="store_true", help="judge marked requests; verdict under /_control/judge")
    parser.add_argument("--piece-delay-seconds", type=float, default=0.0, help="for each piece of a text")
    parser.add_argument("--first-seconds", type=float, default=0.0, help="to the first piece of an answer, on average")
    parser.add_argument("--reply-seconds", type=float, default=0.0, help="for a whole answer, on average")
    parser.add_argument("--summary-seconds", type=float, default=0.0, help="for a summary, on average")
    parser.add_argument("--jitter", type=float, default=0.0, help="how far these times are spread: 0.3 is ± 30 %%")
    parser.add_argument(
        "--failing-share", type=float, default=0.0, help="of the requests for a text, 0 to 1, fail once"
    )
    parser.add_argument("--seed", type=int, default=0, help="of these chances")
    options = parser.parse_args()
    model = OfflineModel(
        scriptable=options.scriptable,
        judging=options.judging,
        host=options.host,
        port=options.port,
        behaviour=Behaviour(
            first_seconds=options.first_seconds,
            reply_seconds=options.reply_seconds,
            summary_seconds=options.summary_seconds,
            jitter=options.jitter,
            failing_share=options.failing_share,
            piece_delay_seconds=options.piece_delay_seconds,
            seed=options.seed,
        ),
    )
    try:
        anyio.run(_serve, model)
    except OSError as error:
        sys.stderr.write(f"cannot listen on {options.host}:{options.port}: {error}\n")
        return EXIT_UNREACHABLE
    return 0


async def _serve(model: OfflineModel) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with model:
            sys.stdout.write(f"{model.url}\n")
            sys.stdout.flush()
            async for _ in signals:
                return


if __name__ == "__main__":
    sys.exit(main())
