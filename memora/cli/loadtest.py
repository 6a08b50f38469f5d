"""`memora loadtest`: many conversations at once against a server, and a verdict.

Owns what is said meanwhile and at the end, and the exit code: 1 for a turn without an answer, a finding or a violation.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
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
from memora.cli.render import padded, right_aligned
from memora.cli.runner import Signals, run_command
from memora.cli.texts import Texts, texts_for
from memora.errors import CallerError, StoreUnavailable
from memora.loadtest.client import Client
from memora.loadtest.page import page_of
from memora.loadtest.plan import MOST_TURNS, Load, WrongLoad, settle
from memora.loadtest.private import Ground, private_ground
from memora.loadtest.report import accidents_of, figures_of, record_of, shown, tokens_of, verdicts_of
from memora.loadtest.run import Faults, Run, Seen
from memora.loadtest.words import Words
from memora.offline_model.behaviour import Behaviour
from memora.records import encoded
from memora.settings import Settings, load_settings

_KEY_VARIABLE: Final = "MEMORA_LOADTEST_KEY"
_NAME_WIDTH: Final = 24
_FIGURE_WIDTH: Final = 10

_LEAST_SECONDS_BETWEEN_FAULTS: Final = 1.0
"""What is killed more often never gets to work."""

_USUAL_BUDGET_TOKENS: Final = 1_000
"""The default of `MEMORA_MAX_INPUT_TOKENS`."""

_BUDGET_TOKENS_A_WORD: Final = 8
"""Of the longest message: two for itself, and the rest for what a context carries beside it."""

_MODEL_OPTIONS: Final = {"model_first_seconds", "model_reply_seconds", "summary_seconds", "model_jitter"}
_FAULT_OPTIONS: Final = {"kill_worker_every", "restart_redis_every", "provider_errors"}
_PRIVATE_OPTIONS: Final = frozenset({"offline", "servers", "workers", *_MODEL_OPTIONS, *_FAULT_OPTIONS})
"""They say how a private server is, and mean nothing to one that runs already."""


_MEASURED_SETTINGS: Final = (
    "max_recent_turns",
    "fold_batch_turns",
    "max_input_tokens",
    "max_summary_words",
    "max_summary_tokens",
    "max_fold_input_tokens",
    "fold_lease_seconds",
    "fold_retry_seconds",
    "worker_concurrency",
)
"""Settings of the user that a private server has, too, as they are what is measured; no other reaches it."""


class WrongTarget(CallerError):
    """The load test must not, or cannot, be run against this server."""

    code = "wrong_target"


class ServerUnreachable(StoreUnavailable):
    """The server under test does not answer."""

    code = "server_unreachable"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for, each by the name of its option; `given` are those that were not left out."""

    rate: float | None
    conversations: int | None
    think_seconds: float | None
    duration: float
    message_words: int
    seed: int
    url: str | None
    remote: bool
    as_json: bool
    html: str | None
    offline: bool
    servers: int
    workers: int
    model_first_seconds: float
    model_reply_seconds: float
    summary_seconds: float
    model_jitter: float
    kill_worker_every: float
    restart_redis_every: float
    provider_errors: float
    given: frozenset[str]

    @property
    def faults(self) -> Faults:
        """The accidents that happen to processes."""
        return Faults(self.kill_worker_every, self.restart_redis_every)

    @property
    def behaviour(self) -> Behaviour:
        """How the offline model is."""
        return Behaviour(
            first_seconds=self.model_first_seconds,
            reply_seconds=self.model_reply_seconds,
            summary_seconds=self.summary_seconds,
            jitter=self.model_jitter,
            failing_share=self.provider_errors,
            seed=self.seed,
        )


def run(**options: Any) -> int:
    """Run a load test. Returns the exit code."""
    return run_command(partial(_run, Options(**options)), as_json=bool(options["as_json"]))


async def _run(options: Options, signals: Signals) -> int:
    settings = load_settings()
    texts = texts_for(settings.lang)
    load = _checked(options)
    progress = Progress(sys.stderr)
    async with AsyncExitStack() as stack:
        ground, urls = None, [options.url or ""]
        if options.url is None:
            progress.say(texts.loadtest_starting)
            ground = await stack.enter_async_context(_ground(options, load, settings))
            urls, settings = ground.urls, settings.model_copy(update={"redis_url": SecretStr(ground.redis.url)})
        client = Client(urls, os.environ.get(_KEY_VARIABLE, "none"))
        stack.push_async_callback(client.close)
        test = Run(load, options.faults, client, ground, partial(_tell, progress, load, texts))
        stopped = await _talk(test, signals, urls[0])
        progress.say(texts.loadtest_judging)
        await test.judge(settings)
        progress.clear()
    _write(test.seen, options, load, texts.loadtest)
    if stopped:
        return Exit.INTERRUPTED
    return Exit.DONE if test.seen.is_clean else Exit.FAILED


def _ground(options: Options, load: Load, settings: Settings) -> AbstractAsyncContextManager[Ground]:
    """The private server, large enough for the load: it works on more turns at once than there are conversations."""
    wanted = {
        "max_concurrent_requests": max(512, 2 * load.conversations),
        "max_input_tokens": max(_USUAL_BUDGET_TOKENS, _BUDGET_TOKENS_A_WORD * load.longest_message_words),
    }
    wanted |= {name: getattr(settings, name) for name in _MEASURED_SETTINGS if name in settings.model_fields_set}
    variables = {f"MEMORA_{name.upper()}": str(value) for name, value in wanted.items()}
    return private_ground(options.behaviour, servers=options.servers, workers=options.workers, settings=variables)


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
        finally:
            signals.handler = None
    return talking.cancel_called


def _checked(options: Options) -> Load:
    """Refuse what cannot be done before anything is started; the load, if it can.

    Raises:
        WrongTarget, WrongLoad.
    """
    for name in ("kill_worker_every", "restart_redis_every"):
        if 0 < (seconds := getattr(options, name)) < _LEAST_SECONDS_BETWEEN_FAULTS:
            least = f"it is 0 for never, or at least {_LEAST_SECONDS_BETWEEN_FAULTS:g}"
            raise WrongLoad(f"{_option(name)} {seconds:g} is too often: {least}")
    conversations, think_seconds = settle(options.rate, options.conversations, options.think_seconds)
    load = Load(conversations, think_seconds, options.duration, options.message_words, options.seed)
    if load.turns > MOST_TURNS:
        raise WrongLoad(f"that makes {load.turns:,} turns, and {MOST_TURNS:,} are the most: make --duration shorter")
    _check_target(options)
    if options.html:
        try:
            Path(options.html).touch()
        except OSError as error:
            raise WrongTarget(f"--html {options.html}: {(error.strerror or str(error)).lower()}") from None
    return load


def _check_target(options: Options) -> None:
    if options.url is None:
        if options.remote:
            raise WrongTarget("--remote is about a server that runs: name it with --url")
        return
    host = urlsplit(options.url).hostname
    if not host or urlsplit(options.url).scheme not in ("http", "https"):
        raise WrongTarget(f"--url {options.url!r} is no address: it begins with http:// or https://")
    if not (_is_local(host) or options.remote):
        raise WrongTarget(f"{host} is another machine: add --remote if you may put it under load")
    if private := sorted(options.given & _PRIVATE_OPTIONS):
        raise WrongTarget(f"{_option(private[0])} is about a private server: leave it or --url out")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
            running=f"{seen.in_flight:,}",
            errors=f"{seen.failures:,}",
            median=f"{first.percentile(0.5) * 1e3:,.0f}",
            p99=f"{first.percentile(0.99) * 1e3:,.0f}",
        )
    )


def _write(seen: Seen, options: Options, load: Load, words: Words) -> None:
    about = {
        "version": f"Memora {__version__}, Python {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": words.setting.format(
            rate=f"{load.rate:g}",
            conversations=f"{load.conversations:,}",
            think=f"{load.think_seconds:g}",
            duration=f"{load.duration_seconds:g}",
            words=f"{load.message_words:,}",
        ),
        "server": options.url or _private_server(options, words),
        "command": "memora " + " ".join(sys.argv[1:]),
    }
    if options.html:
        Path(options.html).write_text(page_of(seen, about, words), encoding="utf-8")
    if options.as_json:
        sys.stdout.write(encoded(record_of(seen, about)) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines_of(seen, words))
    sys.stdout.flush()


def _private_server(options: Options, words: Words) -> str:
    return words.private_server.format(
        servers=options.servers,
        workers=options.workers,
        first=f"{options.model_first_seconds:g}",
        reply=f"{options.model_reply_seconds:g}",
        summary=f"{options.summary_seconds:g}",
        jitter=f"{options.model_jitter:.0%}",
    )


def lines_of(seen: Seen, words: Words) -> Iterator[str]:
    """The report as a table and its verdicts."""
    yield words.result.format(
        turns=f"{seen.turns:,}",
        seconds=f"{seen.elapsed:,.0f}",
        rate=f"{seen.turns / max(seen.elapsed, 1e-9):.1f}",
        errors=f"{seen.failures:,}",
        retries=f"{seen.retries:,}",
    )
    yield words.at_once.format(active=f"{seen.most_active:,}", in_flight=f"{seen.most_in_flight:,}")
    if seen.held_back:
        yield words.held_back.format(turns=f"{seen.held_back:,}")
    if seen.accidents:
        yield words.accidents_line.format(what=_listed(accidents_of(seen, words)))
    yield _row("", ["p50", "p90", "p99", "max"])
    for name, histogram, unit in figures_of(seen, words):
        yield _row(name, [shown(value, unit) for value in histogram.record().values()])
    if seen.tokens:
        yield words.tokens_line.format(what=_listed(tokens_of(seen, words)))
    yield from (f"{mark} {text}" for mark, text in verdicts_of(seen, words))


def _row(name: str, figures: list[str]) -> str:
    return padded(name, _NAME_WIDTH) + "".join(right_aligned(figure, _FIGURE_WIDTH) for figure in figures)


def _listed(amounts: list[tuple[int, str]]) -> str:
    return ", ".join(f"{name} {count:,}" for count, name in amounts)
