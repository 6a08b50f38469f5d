"""`memora serve` and `memora up` as a person runs them: real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from command_line import CommandLine, wait_until

from memora.embedded_redis import EmbeddedRedis


class Running:
    """A command that runs, and what it has written so far."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self.output = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def see(self, pattern: str) -> re.Match[str]:
        """Wait until it has written this."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.output)

        match: re.Match[str] = wait_until(found, lambda: self.output)
        return match

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.child.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        code = self.child.wait(20)
        self._reading.join(5)
        return code

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.output += line.decode()


@contextmanager
def running(memora: CommandLine, *arguments: str) -> Iterator[Running]:
    """A command that runs meanwhile; it is killed at the end if it is still there."""
    child = memora.start(*arguments, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        yield Running(child)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def memora(tmp_path: Path) -> CommandLine:
    """The command line in an empty home; its warnings are not ours to judge."""
    return CommandLine(tmp_path).using(PYTHONWARNINGS="default", MEMORA_SHUTDOWN_GRACE_SECONDS="3")


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children_of(pid: int) -> dict[str, int]:
    """The processes that `memora up` has started, by name."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"\nPPid:\t(\d+)", (place / "status").read_text())
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if parent and int(parent[1]) == pid and "memora.cli.leash" in words:
            found[words[words.index("memora.cli.leash") + 1]] = int(place.name)
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_serve_says_where_it_is_and_stops_cleanly(memora: CommandLine, number: signal.Signals, code: int) -> None:
    """With nothing set up it brings Redis and a worker, says who answers, and ends without a traceback."""
    with running(memora, "serve", "--port", "0") as server:
        url = server.see(r"answers at (http://127\.0\.0\.1:\d+)\n")[1]
        server.see("the offline model answers")
        answer = httpx2.post(f"{url}/v1/responses", json={"input": "Hello.", "model": "memora"}, timeout=20)
        assert answer.status_code == 200
        wait_until(lambda: httpx2.get(f"{url}/readyz").json()["status"] == "ok", lambda: server.output)
        assert server.end(number) == code
        assert "Traceback" not in server.output
        assert "Hello." not in server.output


def test_an_open_page_does_not_hold_up_the_stop(memora: CommandLine) -> None:
    """Event streams end at once, well before the grace of answers is over."""
    with running(memora.using(MEMORA_SHUTDOWN_GRACE_SECONDS="60"), "serve", "--port", "0") as server:
        url = server.see(r"answers at (http://\S+)\n")[1]
        made = httpx2.post(f"{url}/v1/conversations", json={}, timeout=20).json()["id"]
        with httpx2.stream("GET", f"{url}/v1/conversations/{made}/events", timeout=20) as page:
            lines = page.iter_lines()
            assert "snapshot" in next(line for line in lines if line.startswith("event"))
            assert server.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "says"),
    [
        (("--host", "0.0.0.0"), {}, 2, "MEMORA_API_KEYS"),
        (("--port", "70000"), {}, 2, "--help"),
        ((), {"MEMORA_API_KEYS": " , "}, 2, "MEMORA_API_KEYS"),
        ((), {"MEMORA_REDIS_URL": "redis://127.0.0.1:9"}, 3, "Redis does not answer"),
    ],
)
def test_serve_refuses_in_one_line(
    memora: CommandLine, arguments: tuple[str, ...], environment: dict[str, str], code: int, says: str
) -> None:
    """What is wrong is said in one line, with the exit code of its kind."""
    ran = memora.using(MEMORA_PORT="0", **environment).run("serve", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_port_that_is_taken_is_named(memora: CommandLine) -> None:
    """Exit 3, and one line that says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = memora.run("serve", "--port", str(port))
    assert ran.code == 3
    assert re.fullmatch(rf"memora: cannot listen on 127\.0\.0\.1 port {port}: .*--port.*\n", ran.err)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_up_runs_everything_and_drains_in_order(memora: CommandLine, number: signal.Signals, code: int) -> None:
    """One command: a ready server with a live worker; one signal ends the server first, then the worker, then Redis."""
    with running(memora, "up", "--port", "0") as up:
        url = up.see(r"memora \| everything runs: (http://\S+)")[1]
        wait_until(lambda: httpx2.get(f"{url}/readyz").json()["status"] == "ok", lambda: up.output)
        children = children_of(up.child.pid)
        assert children.keys() == {"serve", "worker"}
        assert up.end(number) == code
        assert not [pid for pid in children.values() if is_alive(pid)]
        assert up.output.rindex("server | ") < up.output.rindex("worker | ")
        assert all(re.match(r"(redis |worker|server|memora) \| ", line) for line in up.output.splitlines())
        assert "\x1b" not in up.output
        assert "Traceback" not in up.output
    assert not list((memora.home / "data").rglob("redis.sock"))


def test_a_child_that_dies_is_started_again(memora: CommandLine) -> None:
    """Its end is told, and soon everything is well again."""
    with running(memora, "up", "--port", "0") as up:
        up.see("everything runs")
        first = children_of(up.child.pid)["worker"]
        os.kill(first, signal.SIGKILL)
        up.see(r"worker \| ended by itself with code -9\n")
        wait_until(lambda: children_of(up.child.pid).get("worker", first) != first, lambda: up.output)
        assert up.end(signal.SIGTERM) == 0


def test_children_end_with_their_parent_however_it_ends(memora: CommandLine) -> None:
    """`kill -9` of the parent leaves neither server nor worker behind; the next to come adopts the private Redis."""
    with running(memora, "up", "--port", "0") as up:
        up.see("everything runs")
        children = children_of(up.child.pid)
        up.child.kill()
        wait_until(lambda: not [pid for pid in children.values() if is_alive(pid)], lambda: up.output)
    adopted = EmbeddedRedis(memora.home / "data").start()
    assert not adopted.started
    assert adopted.stop()


def test_up_ends_when_a_child_cannot_live(memora: CommandLine) -> None:
    """A port that is taken will not be free the next time either: all ends with 1, and the reason is on the screen."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        running(memora, "up", "--port", str(taken.getsockname()[1])) as up,
    ):
        up.see(r"server \| memora: cannot listen")
        assert up.wait() == 1
        assert "the server does not stay alive" in up.output
