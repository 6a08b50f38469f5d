"""`memora audit`: one line a check, what was found with its keys, and what to do next.

Owns how a report is shown and which exit code it is. What is checked and mended is decided below.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Final

from memora.audit import AuditProgress, AuditReport, CheckResult, Status, audit, audit_record
from memora.cli.exit import Exit
from memora.cli.progress import Progress
from memora.cli.render import padded
from memora.cli.runner import Signals, run_command
from memora.cli.streams import Style
from memora.cli.texts import Texts, texts_for
from memora.core.auditing import Finding
from memora.records import encoded
from memora.settings import load_settings
from memora.storage import open_storage

_MOST_SHOWN: Final = 20
"""Findings that fit on a screen or two; `--json` has them all."""

_NAME_WIDTH: Final = 10
_MARKS: Final[dict[Status, str]] = {"ok": "✓", "finding": "✗", "unchecked": "!"}


def run(*, conversation: str | None, as_json: bool, repair: bool) -> int:
    """Audit. Returns the exit code."""
    return run_command(partial(_audit, conversation, as_json, repair), as_json=as_json)


async def _audit(conversation_id: str | None, as_json: bool, repair: bool, _: Signals) -> int:
    settings = load_settings()
    texts = texts_for(settings.lang)
    progress = Progress(sys.stderr)
    async with open_storage(settings) as storage:
        try:
            report = await audit(storage, conversation_id, repair=repair, on_progress=partial(_tell, progress, texts))
        finally:
            progress.clear()
    if as_json:
        sys.stdout.write(encoded(audit_record(report, repair=repair)) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(report, texts, Style.of(sys.stdout), repair=repair))
    return _exit_code(report)


def _exit_code(report: AuditReport) -> Exit:
    if not report.ok:
        return Exit.FAILED
    return Exit.DONE if report.is_complete else Exit.UNREACHABLE


def _tell(progress: Progress, texts: Texts, at: AuditProgress) -> None:
    if progress.is_due:
        figures = {"conversations": f"{at.conversations:,}", "messages": f"{at.messages:,}"}
        progress.say(texts.audit_progress.format(**figures))


def _lines(report: AuditReport, texts: Texts, style: Style, *, repair: bool) -> Iterator[str]:
    yield from (_check_line(check, texts, style) for check in report.checks)
    yield from _section(report.repaired, texts.audit_mended, texts, style)
    yield from _section(report.findings, texts.audit_found, texts, style, total=report.finding_count)
    if report.unread:
        yield ""
        yield style.warning(texts.audit_unread.format(ids=", ".join(report.unread[:_MOST_SHOWN])))
    yield ""
    yield _conclusion(report, texts, style, repair=repair)


def _check_line(check: CheckResult, texts: Texts, style: Style) -> str:
    color = {"ok": style.good, "finding": style.error, "unchecked": style.warning}[check.status]
    what = getattr(texts, f"audit_{check.name}")
    if check.status == "unchecked":
        what = texts.audit_unchecked.format(what=what, reason=check.unchecked)
    elif check.findings:
        what = texts.audit_broken.format(what=what, findings=f"{check.findings:,}")
    return f"{color(_MARKS[check.status])} {padded(check.name, _NAME_WIDTH)} {what}"


def _section(
    findings: tuple[Finding, ...], title: str, texts: Texts, style: Style, *, total: int | None = None
) -> Iterator[str]:
    if not findings:
        return
    yield ""
    yield style.bold(title)
    for finding in findings[:_MOST_SHOWN]:
        where = f"{finding.conversation} · {finding.check}" if finding.conversation else finding.check
        yield f"  {style.data(where)}"
        rows = [(texts.audit_expected, finding.expected), (texts.audit_instead, finding.found)]
        rows += [(texts.audit_key, key) for key in finding.keys]
        for label, value in rows:
            yield f"    {padded(label, _NAME_WIDTH - 2)} {style.data(' '.join(value.split()))}"
    more = (total or len(findings)) - _MOST_SHOWN
    if more > 0:
        yield f"  {texts.audit_more.format(count=f'{more:,}')}"


def _conclusion(report: AuditReport, texts: Texts, style: Style, *, repair: bool) -> str:
    figures = texts.audit_figures.format(
        conversations=f"{report.conversations:,}", messages=f"{report.messages:,}", folds=f"{report.folds:,}"
    )
    verdict = _verdict(report, texts, repair=repair).format(
        findings=f"{report.finding_count:,}", mendable=f"{report.mendable_count:,}", mended=f"{len(report.repaired):,}"
    )
    color = style.good if report.ok else style.error
    return color(f"{figures}: {verdict}")


def _verdict(report: AuditReport, texts: Texts, *, repair: bool) -> str:
    """What came of it and what to do next."""
    if report.ok:
        return texts.audit_all_mended if report.repaired else texts.audit_clean
    if report.mendable_count and not repair:
        return texts.audit_repairable
    if {finding.check for finding in report.findings} == {"engine"}:
        return texts.audit_only_engine
    return texts.audit_not_repairable
