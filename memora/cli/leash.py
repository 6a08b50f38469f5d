"""A command that ends with its parent: `memora up` starts its children through here.

Owns the pipe on standard input that the parent never writes to: its end means that the parent is gone, however it went.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final

_LAST_SECONDS: Final = 30.0
"""A child that has not come to its own end by then, after its parent's, is cut off."""


def main() -> None:
    """Run the command line that follows, until its end or the parent's."""
    # Imported first of all, so that the parent's end is noticed during the rest of the imports, too.
    threading.Thread(target=_watch_parent, name="leash", daemon=True).start()
    from memora.cli.app import run  # noqa: PLC0415  # heavy

    sys.exit(run(sys.argv[1:]))


def _watch_parent() -> None:
    while os.read(0, 4_096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_LAST_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
