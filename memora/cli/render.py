"""What people see: stats, history, context, summaries and tables as text.

Owns layout. Pure but for the local time zone; whoever calls decides where the text goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rich.cells import cell_len

from memora.chat import TurnStats
from memora.cli.session import Entry, FoldNotice
from memora.cli.streams import Style
from memora.cli.texts import Texts
from memora.core.conversation import Usage
from memora.core.tokens import PRIMING_TOKENS
from memora.core.window import Context
from memora.picture import MessageState, Picture

_TWO_COLUMNS_FROM: Final = 80
_GAP_BETWEEN_COLUMNS: Final = "   "


def padded(text: str, width: int) -> str:
    """Text filled up to a width in terminal cells, wide characters counted as two."""
    return text + " " * max(0, width - cell_len(text))


def right_aligned(text: str, width: int) -> str:
    """Text pushed right to a width in terminal cells."""
    return " " * max(0, width - cell_len(text)) + text


def stats_block(stats: TurnStats, texts: Texts, style: Style, width: int) -> str:
    """Every figure of a turn; messages left and tokens right where there is room, else one below the other."""
    messages, tokens = _message_figures(stats, texts), _token_figures(stats, texts)
    if style.guarded and width >= _TWO_COLUMNS_FROM:
        pairs = zip(_lines(messages), _lines(tokens), strict=True)
        lines = [_GAP_BETWEEN_COLUMNS.join(pair) for pair in pairs]
    else:
        lines = _lines(messages + tokens)
    block = style.dim("\n".join(f"  {line}" for line in lines))
    if stats.gap_messages:
        block += "\n" + style.warning(f"  {texts.gap.format(count=stats.gap_messages)}")
    return block


def notice_line(notice: FoldNotice, texts: Texts, style: Style) -> str:
    """One line that says what became of a fold."""
    if notice.failure:
        return style.warning(f"── {style.data(texts.fold_failed.format(reason=notice.failure))} ──")
    told = texts.folded.format(
        first=notice.start, last=notice.end - 1, version=notice.version, tokens=f"{notice.summary_tokens:,}"
    )
    return style.dim(f"── {told} ──")


def history_entry(entry: Entry, texts: Texts, style: Style) -> str:
    """One message with its place in the conversation, and all of its text."""
    role = texts.user if entry.message.role == "user" else texts.assistant
    head = f"{entry.position} · {role} · {_state_name(entry.state, texts)}"
    return f"{style.bold(head)}\n{style.data(entry.message.content)}\n"


def context_lines(context: Context, max_input_tokens: int, texts: Texts, style: Style) -> str:
    """What was sent, word for word, with the tokens by part."""
    request = context.request
    title = texts.context_title.format(
        messages=len(request.messages), tokens=f"{context.counted_input_tokens:,}", budget=f"{max_input_tokens:,}"
    )
    parts = [(texts.instructions, request.instructions)] if request.instructions else []
    shown = [f"{style.bold(f'── {name} ──')}\n{style.data(text)}" for name, text in [*parts, *request.messages]]
    tokens = context.tokens
    by_part = texts.context_tokens.format(
        instructions=tokens.instructions,
        summary=tokens.summary,
        tail=tokens.tail,
        message=tokens.message,
        reply=PRIMING_TOKENS,
        total=tokens.total,
    )
    lines = [style.bold(title), *shown, style.dim(by_part)]
    if context.gap_messages:
        lines.append(style.warning(texts.gap.format(count=context.gap_messages)))
    return "\n".join(lines)


def summary_lines(picture: Picture | None, texts: Texts, style: Style) -> str:
    """The summary and how far it reaches, or that there is none."""
    if picture is None:
        return texts.no_summary.format(messages=0, pending=0)
    conversation = picture.conversation
    summary, pending = conversation.summary, picture.pending_messages
    if not summary.version:
        return texts.no_summary.format(messages=conversation.message_count, pending=pending)
    title = texts.summary_title.format(
        version=summary.version,
        summarized=summary.summarized_message_count,
        messages=conversation.message_count,
        pending=pending,
        tokens=f"{summary.tokens:,}",
    )
    return f"{style.bold(title)}\n{style.data(summary.text)}"


def picture_lines(picture: Picture, following: Context | None, budget: int, texts: Texts, style: Style) -> str:
    """One conversation in full."""
    conversation, inspection = picture.conversation, picture.inspection
    summary = conversation.summary
    rows = [
        (texts.conversation, style.bold(conversation.id)),
        (texts.messages, f"{conversation.message_count:,}"),
        (texts.summarized, f"{summary.summarized_message_count:,}"),
        (texts.pending, f"{picture.pending_messages:,}"),
        (texts.window, f"{picture.window_messages:,}"),
        (texts.version_column, f"{summary.version}"),
        (texts.usage, _usage(conversation.usage, texts)),
        (texts.next_context, _next_figures(following, budget, texts)),
        (texts.created, local_time(inspection.created_at)),
        (texts.updated, local_time(inspection.updated_at)),
        (texts.generation, style.data(conversation.generation)),
    ]
    if following and following.gap_messages:
        rows.append(("", style.warning(texts.next_gap.format(count=following.gap_messages))))
    if inspection.fold_due_at and picture.pending_messages:
        rows.append((texts.fold_due, local_time(inspection.fold_due_at)))
    if inspection.fold_failures:
        failures = f"{inspection.fold_failures}: {inspection.last_fold_error}"
        rows.append((texts.fold_failures, style.warning(style.data(failures))))
    width = max(cell_len(name) for name, _ in rows)
    lines = [f"{style.dim(padded(name, width))}  {value}" for name, value in rows]
    if summary.version:
        lines += ["", style.bold(f"{texts.summary} ({summary.tokens:,} tokens)"), style.data(summary.text)]
    return "\n".join(lines)


def local_time(milliseconds: int) -> str:
    """A time of the store as the clock on the wall shows it."""
    return datetime.fromtimestamp(milliseconds / 1_000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def table_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row of a table: the first and the last column flush left, figures between them flush right."""
    first, *figures, last = cells
    aligned = [right_aligned(cell, width) for cell, width in zip(figures, widths[1:], strict=True)]
    return "  ".join([padded(first, widths[0]), *aligned, last]).rstrip()


def _message_figures(stats: TurnStats, texts: Texts) -> list[tuple[str, str]]:
    return [
        (texts.stored_messages, f"{stats.stored_messages:,}"),
        (texts.summarized_messages, f"{stats.summarized_messages:,}"),
        (texts.newly_summarized_messages, f"{stats.newly_summarized_messages:,}"),
        (texts.pending_messages, f"{stats.pending_messages:,}"),
        (texts.context_messages, f"{stats.context_messages:,}"),
    ]


def _token_figures(stats: TurnStats, texts: Texts) -> list[tuple[str, str]]:
    actual = texts.not_said if stats.actual_input_tokens is None else f"{stats.actual_input_tokens:,}"
    return [
        (texts.counted_input_tokens, f"{stats.counted_input_tokens:,}"),
        (texts.actual_input_tokens, actual),
        (texts.output_tokens, f"{stats.output_tokens:,}"),
        (texts.summary_update_tokens, f"{stats.summary_update_tokens:,}"),
        (texts.session_total_tokens, f"{stats.session_total_tokens:,}"),
    ]


def _lines(figures: Sequence[tuple[str, str]]) -> list[str]:
    names = max(cell_len(name) for name, _ in figures)
    values = max(cell_len(value) for _, value in figures)
    return [f"{padded(name, names)}  {right_aligned(value, values)}" for name, value in figures]


def _state_name(state: MessageState, texts: Texts) -> str:
    return {"folded": texts.folded_state, "pending": texts.pending_state, "window": texts.window_state}[state]


def _usage(usage: Usage, texts: Texts) -> str:
    return texts.usage_figures.format(
        answer_in=f"{usage.answer_input_tokens:,}",
        answer_out=f"{usage.answer_output_tokens:,}",
        fold_in=f"{usage.fold_input_tokens:,}",
        fold_out=f"{usage.fold_output_tokens:,}",
        total=f"{usage.total_tokens:,}",
    )


def _next_figures(context: Context | None, budget: int, texts: Texts) -> str:
    if context is None:
        return "-"
    tokens = context.tokens
    return texts.next_context_figures.format(
        instructions=tokens.instructions,
        summary=tokens.summary,
        tail=tokens.tail,
        total=tokens.total,
        budget=f"{budget:,}",
        room=max(0, budget - context.counted_input_tokens),
    )
