"""`memora doctor`: one line a check, and what to do where something is wrong.

Owns the checks and what they count as. Opens everything, changes nothing.
"""

from __future__ import annotations

import difflib
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, Literal

import anyio

from memora.bootstrap import open_model
from memora.cli.exit import Exit, exit_code
from memora.cli.render import padded
from memora.cli.runner import Signals, run_command
from memora.cli.streams import Style
from memora.cli.texts import Texts, texts_for
from memora.cli.worker import redis_place
from memora.errors import MemoraError, SettingsError, StoreUnavailable
from memora.records import encoded
from memora.settings import Settings, load_settings, unknown_variables, variable_of
from memora.storage import RedisHealth, open_storage

_CLOCKS_AGREE_SECONDS: Final = 2.0
"""More than a round trip; two seconds apart, times in the log are misleading."""

_CLOCKS_BREAK_SECONDS: Final = 3_600.0
"""Jobs are scored this much early; a worker whose clock is further behind never starts one."""

_CHECK_SECONDS: Final = 30.0
"""All retries of one connection fit in here."""

_NAME_WIDTH: Final = 12

Status = Literal["ok", "hint", "problem", "unreachable"]
_MARKS: Final[dict[Status, str]] = {"ok": "✓", "hint": "!", "problem": "✗", "unreachable": "✗"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, what came of it, and what to do."""

    check: str
    status: Status
    message: str


class _Report:
    """The checks so far, shown as they come."""

    def __init__(self, texts: Texts, *, as_json: bool) -> None:
        self._texts = texts
        self._as_json = as_json
        self._style = Style.of(sys.stdout)
        self.checks: list[Check] = []

    def add(self, check: str, status: Status, message: str) -> None:
        """Show one check."""
        self.checks.append(Check(check, status, message))
        if self._as_json:
            return
        name = getattr(self._texts, f"{check}_check")
        color = {"ok": self._style.good, "hint": self._style.warning}.get(status, self._style.error)
        sys.stdout.write(f"{color(_MARKS[status])} {padded(name, _NAME_WIDTH)} {self._style.data(message)}\n")
        sys.stdout.flush()

    def add_error(self, check: str, error: MemoraError) -> None:
        """Show what an error says."""
        status: Status = "unreachable" if exit_code(error) is Exit.UNREACHABLE else "problem"
        self.add(check, status, str(error))

    @property
    def exit_code(self) -> int:
        """0 if all is fine, 3 if something could not be reached, else 1."""
        found = {check.status for check in self.checks}
        if "unreachable" in found:
            return Exit.UNREACHABLE
        return Exit.FAILED if "problem" in found else Exit.DONE

    def close(self) -> None:
        """End the report."""
        if self._as_json:
            checks = [asdict(check) for check in self.checks]
            sys.stdout.write(encoded({"ok": self.exit_code == Exit.DONE, "checks": checks}) + "\n")


def run(*, as_json: bool, offline: bool) -> int:
    """Check everything. Returns the exit code."""
    return run_command(partial(_examine, as_json, offline), as_json=as_json)


async def _examine(as_json: bool, offline: bool, _: Signals) -> int:
    try:
        settings = load_settings(**({"offline": True} if offline else {}))
    except SettingsError as error:
        report = _Report(texts_for(), as_json=as_json)
        report.add_error("settings", error)
    else:
        texts = texts_for(settings.lang)
        report = _Report(texts, as_json=as_json)
        _check_settings(report, texts)
        await _check_redis(settings, report, texts)
        await _check_model(settings, report, texts)
    report.close()
    return report.exit_code


def _check_settings(report: _Report, texts: Texts) -> None:
    report.add("settings", "ok", texts.settings_fine)
    known = [variable_of(field) for field in Settings.model_fields]
    for name in unknown_variables():
        guess = difflib.get_close_matches(name, known, n=1, cutoff=0)
        report.add("settings", "hint", texts.settings_unknown.format(name=name, guess=guess[0]))


async def _check_redis(settings: Settings, report: _Report, texts: Texts) -> None:
    try:
        with anyio.fail_after(_CHECK_SECONDS):
            async with open_storage(settings) as storage:
                health = await storage.health(time.time())
                is_private = storage.embedded is not None
    except MemoraError as error:
        report.add_error("redis", error)
        return
    except TimeoutError:
        report.add_error("redis", StoreUnavailable("Redis does not answer in time: check MEMORA_REDIS_URL"))
        return
    answers = texts.redis_private if is_private else texts.redis_fine
    report.add("redis", "ok", answers.format(server=health.server, place=redis_place(settings)))
    _judge(health, is_private, report, texts)


def _judge(health: RedisHealth, is_private: bool, report: _Report, texts: Texts) -> None:
    """What the server allows, keeps, forgets, and thinks the time is, and who works for it."""
    if health.forbids:
        report.add("rights", "problem", texts.rights_missing.format(what=health.forbids))
    else:
        report.add("rights", "ok", texts.rights_fine)
    if health.persists:
        report.add("persistence", "ok", texts.persistence_on)
    else:
        report.add("persistence", "problem", texts.persistence_off)
    if health.evicts:
        report.add("eviction", "problem", texts.evicting)
    else:
        report.add("eviction", "ok", texts.keeps)
    if health.workers:
        report.add("worker", "ok", texts.workers_alive.format(count=health.workers))
    elif is_private:
        report.add("worker", "ok", texts.worker_comes_with_chat)
    else:
        report.add("worker", "problem", texts.worker_missing)
    skew = abs(health.clock_skew_seconds)
    if skew < _CLOCKS_AGREE_SECONDS:
        report.add("clock", "ok", texts.clock_fine.format(seconds=f"{max(skew, 0.1):.1f}"))
    else:
        status: Status = "hint" if skew < _CLOCKS_BREAK_SECONDS else "problem"
        report.add("clock", status, texts.clock_off.format(seconds=f"{skew:,.0f}"))


async def _check_model(settings: Settings, report: _Report, texts: Texts) -> None:
    if settings.uses_offline_model:
        report.add("model", "hint", texts.model_offline_chosen if settings.offline else texts.model_offline)
        return
    async with open_model(settings) as (named, client):
        for model in dict.fromkeys((named.model, named.fold_model)):
            try:
                await client.check(model)
                report.add("model", "ok", texts.model_fine.format(model=model))
            except MemoraError as error:
                report.add_error("model", error)
