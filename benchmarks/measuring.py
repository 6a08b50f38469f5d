"""What the benchmarks share: child processes, processor time, percentiles, and a table of rows with targets.

Owns how figures are taken and shown. Must not know what is measured.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2

from memora.embedded_redis import find_engine

ROOT: Final = Path(__file__).parents[1]
_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 15.0
_LIBRARIES: Final = ("openai", "redis", "arq")


def _machine() -> str:
    versions = " ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {versions}, {find_engine(None)}"
    )


@dataclass(frozen=True)
class Target:
    """What is asked of a row: `found` is at most the limit, or at least."""

    asked: str
    found: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """The verdict."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{self.asked} {sign} {self.limit:g}: {self.found:.2f} {'✓' if self.is_met else '✗ missed'}"


@dataclass(frozen=True)
class Row:
    """One line of a report: a figure of each way, and what is asked of it."""

    name: str
    unit: str
    values: Mapping[str, float | None]
    target: Target | None = None

    def as_record(self) -> dict[str, Any]:
        """For `--json`."""
        judged = {**asdict(self.target), "is_met": self.target.is_met} if self.target else None
        return {"name": self.name, "unit": self.unit, "values": dict(self.values), "target": judged}


@dataclass
class Report:
    """Rows by section, with what they were taken on."""

    machine: str = field(default_factory=_machine)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Take a row, and tell on stderr how far it is: a whole run takes minutes."""
        self.rows.append(row)
        values = " · ".join(f"{way} {_shown(value)}" for way, value in row.values.items())
        print(f"{_label(row)}: {values} · {row.target or ''}".rstrip(" ·"), file=sys.stderr, flush=True)

    def as_record(self) -> dict[str, Any]:
        """For `--json`."""
        return {"machine": self.machine, "rows": [row.as_record() for row in self.rows], "notes": self.notes}

    @property
    def missed(self) -> list[Row]:
        """The rows whose target was not met."""
        return [row for row in self.rows if row.target and not row.target.is_met]


def show(report: Report) -> None:
    """Print a report as a table."""
    ways = list(dict.fromkeys(way for row in report.rows for way in row.values))
    print(report.machine, end="\n\n")
    width = max(len(_label(row)) for row in report.rows)
    print(f"{'':{width}}" + "".join(f"{way:>13}" for way in ways) + "  target")
    for row in report.rows:
        cells = "".join(f"{_shown(row.values.get(way)):>13}" for way in ways)
        print(f"{_label(row):{width}}{cells}  {row.target or ''}".rstrip())
    for note in report.notes:
        print(f"\n{note}")


def _label(row: Row) -> str:
    return f"{row.name}, {row.unit}" if row.unit else row.name


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) >= 10:
        return f"{value:,.0f}"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def percentile(values: Sequence[float], share: int) -> float:
    """The value that so many of a hundred are not above."""
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0]


def clean_environment(home: Path) -> dict[str, str]:
    """The environment for a child: nothing that configures Memora, this checkout, a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMORA_", "OPENAI_", "REDIS"))}
    return kept | {"PYTHONPATH": str(ROOT), "HOME": str(home)}


@contextmanager
def process(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python child with its log in a file, stopped at the end."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=output, cwd=log.parent
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.communicate(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()


@contextmanager
def endpoint(environment: Mapping[str, str], log: Path, *options: str) -> Iterator[tuple[str, int]]:
    """The cheap model endpoint: its address and its process."""
    with process([str(ROOT / "benchmarks" / "endpoint.py"), *options], environment, log) as child:
        assert child.stdout
        yield child.stdout.readline().decode().strip(), child.pid


@contextmanager
def memora_server(environment: Mapping[str, str], log: Path) -> Iterator[tuple[str, int]]:
    """`memora serve` on a free port: its address and its process."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with process(["-m", "memora", "serve"], {**environment, "MEMORA_PORT": str(port)}, log) as child:
        wait_until_up(f"{address}/livez", child, log)
        yield address, child.pid


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers, for a bounded time."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx2.get(url, timeout=1, trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.05)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-2_000:]}")


async def until(holds: Callable[[], Awaitable[bool]], *, seconds: float = 120.0, every: float = 0.02) -> None:
    """Wait until something holds in another process.

    Raises:
        TimeoutError: it does not within this time.
    """
    with anyio.fail_after(seconds):
        while not await holds():  # noqa: ASYNC110  # there is no event in another process
            await anyio.sleep(every)


def busy_seconds(pid: int) -> float:
    """The processor time that a process has used so far; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
