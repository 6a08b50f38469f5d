"""`memora loadtest`: many conversations at once against a server, and a verdict.

Owns what is said meanwhile and at the end, and the exit code: 1 for a turn without an answer, a finding or a violation.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import anyio
from pydantic import SecretStr

from memora import __version__
from memora.cli.exit import Exit
from memora.cli.progress import Progress
from memora.cli.runner import Signals, run_command
from memora.cli.texts import Texts, texts_for
from memora.errors import CallerError, StoreUnavailable
from memora.loadtest.client import Client
from memora.loadtest.page import page_of
from memora.loadtest.plan import Load
from memora.loadtest.private import Pace, private_ground
from memora.loadtest.report import lines_of, record_of
from memora.loadtest.run import Faults, Run, Seen
from memora.records import encoded
from memora.settings import Settings, load_settings

_KEY_VARIABLE: Final = "MEMORA_LOADTEST_KEY"


class WrongTarget(CallerError):
    """The load test must not, or cannot, be run against this server."""

    code = "wrong_target"


class ServerUnreachable(StoreUnavailable):
    """The server under test does not answer."""

    code = "server_unreachable"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asks for."""

    load: Load
    faults: Faults
    pace: Pace
    workers: int
    url: str | None
    remote: bool
    as_json: bool
    html: str | None


def run(**wishes: Any) -> int:
    """Run a load test. Returns the exit code."""
    return run_command(partial(_run, Wishes(**wishes)), as_json=bool(wishes["as_json"]))


async def _run(wishes: Wishes, signals: Signals) -> int:
    settings = load_settings()
    texts = texts_for(settings.lang)
    _check(wishes)
    progress = Progress(sys.stderr)
    async with AsyncExitStack() as stack:
        ground, url = None, wishes.url or ""
        if not url:
            progress.say(texts.loadtest_starting)
            # The private server works on more turns at once than there are conversations.
            more = {"MEMORA_MAX_CONCURRENT_REQUESTS": str(max(512, 2 * wishes.load.conversations))}
            ground = await stack.enter_async_context(private_ground(wishes.pace, workers=wishes.workers, settings=more))
            url, settings = ground.url, settings.model_copy(update={"redis_url": SecretStr(ground.redis.url)})
        client = Client(url, os.environ.get(_KEY_VARIABLE, "none"))
        stack.push_async_callback(client.close)
        test = Run(wishes.load, wishes.faults, client, ground, partial(_tell, progress, wishes.load, texts))
        stopped = await _talk(test, signals, url)
        progress.say(texts.loadtest_judging)
        await test.judge(settings)
        progress.clear()
    _write(test.seen, wishes, settings)
    if stopped:
        return Exit.INTERRUPTED
    return Exit.DONE if test.seen.is_clean else Exit.FAILED


async def _talk(test: Run, signals: Signals, url: str) -> bool:
    """Run until the plan is done, or until Ctrl-C; whether it was stopped."""
    with anyio.CancelScope() as talking:

        def stop(_: object) -> bool:
            if talking.cancel_called:
                return False
            talking.cancel()
            return True

        signals.handler = stop
        try:
            await test.talk()
        except aiohttp.ClientError as error:
            what = f"{type(error).__name__}: see whether it runs, and set {_KEY_VARIABLE} if it wants a key"
            raise ServerUnreachable(f"the server at {url} begins no conversation ({what})") from None
    return talking.cancel_called


def _check(wishes: Wishes) -> None:
    """Refuse what cannot be done before anything is started.

    Raises:
        WrongTarget.
    """
    if wishes.html:
        try:
            Path(wishes.html).touch()
        except OSError as error:
            raise WrongTarget(f"--html {wishes.html}: {(error.strerror or str(error)).lower()}") from None
    if wishes.url is None:
        return
    host = urlsplit(wishes.url).hostname
    if not host or urlsplit(wishes.url).scheme not in ("http", "https"):
        raise WrongTarget(f"--url {wishes.url!r} is no address: it begins with http:// or https://")
    if not (_is_local(host) or wishes.remote):
        raise WrongTarget(f"{host} is another machine: add --remote if you may put it under load")
    if wishes.faults != Faults():
        raise WrongTarget("accidents happen to private servers only: leave --url out")


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tell(progress: Progress, load: Load, texts: Texts, seen: Seen, elapsed: float) -> None:
    """How far it is."""
    if not progress.is_due:
        return
    first = seen.first_piece
    progress.say(
        texts.loadtest_progress.format(
            elapsed=f"{elapsed:.0f}",
            duration=f"{load.duration_seconds:.0f}",
            turns=f"{seen.turns:,}",
            running=f"{seen.running:,}",
            errors=f"{seen.failures:,}",
            median=f"{first.percentile(0.5) * 1e3:,.0f}",
            p99=f"{first.percentile(0.99) * 1e3:,.0f}",
        )
    )


def _write(seen: Seen, wishes: Wishes, settings: Settings) -> None:
    load = wishes.load
    about = {
        "version": f"Memora {__version__}, Python {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": f"{load.rate:g} turns/s over {load.conversations:,} conversations for {load.duration_seconds:g} s",
        "model": "offline, judging" if not wishes.url else settings.model,
        "command": "memora " + " ".join(sys.argv[1:]),
    }
    if wishes.html:
        Path(wishes.html).write_text(page_of(seen, about), encoding="utf-8")
    if wishes.as_json:
        sys.stdout.write(encoded(record_of(seen, about)) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines_of(seen))
    sys.stdout.flush()
