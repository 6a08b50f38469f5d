"""`memora` and `python -m memora`."""

from __future__ import annotations

import sys

from memora import __version__


def main() -> int:
    """Run one command. Returns the exit code."""
    if sys.argv[1:] == ["--version"]:
        # Asked by scripts and package managers: not even the command parser is loaded for it.
        sys.stdout.write(f"memora {__version__}\n")
        return 0
    try:
        from memora.cli.app import run  # noqa: PLC0415  # see above
    except KeyboardInterrupt:
        return 130
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
