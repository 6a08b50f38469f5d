"""The report as one HTML file that needs nothing else: no script, no font, no address.

Owns how it looks. Pure; everything that did not come from here is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final

from memora.loadtest.histogram import Histogram
from memora.loadtest.report import accidents_of, figures_of, shown, tokens_of, verdicts_of
from memora.loadtest.run import Second, Seen
from memora.loadtest.words import Words

_WIDTH: Final = 660
_HEIGHT: Final = 210
_LEFT: Final = 64
_RIGHT: Final = 24
_BOTTOM: Final = 30
_TOP: Final = 12
_NINES: Final = (0.0, 0.9, 0.99, 0.999, 0.9999)

Points = Sequence[tuple[float, float]]
Line = tuple[str, str, Points]
"""Its name, its class, and its points."""

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1d2129; --soft: #667085; --line: #d9dee7; --paper: #fff; --card: #f6f8fb;
  --a: #2563eb; --b: #d97706; --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #98a2b3; --line: #323a47; --paper: #12161c;
  --card: #1a2029; --a: #60a5fa; --b: #fbbf24; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper); margin: 0 auto;
  max-width: 92rem; padding: 2rem 1.5rem 3rem }
h1 { font-size: 1.7rem; margin: 0 } h2 { font-size: 1rem; margin: 0 0 .5rem }
h2::first-letter, td:first-child::first-letter { text-transform: uppercase }
p { margin: .3rem 0 } code { font-size: .85em; overflow-wrap: anywhere }
.soft { color: var(--soft) } .good { color: var(--good) } .bad { color: var(--bad) } .unknown { color: var(--b) }
.verdicts { margin: 1.2rem 0; font-size: 1.05rem; font-weight: 600 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; margin: 1.2rem 0 }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1rem }
.tile b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .35rem .5rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left } th { font-weight: 600; color: var(--soft) }
tr:last-child td { border-bottom: 0 }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font-size: 12px } .grid { stroke: var(--line) }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .a { stroke: var(--a) } .b { stroke: var(--b) }
.key { display: inline-block; width: .8rem; height: .2rem; vertical-align: middle; margin: 0 .35rem 0 .9rem }
.key.a { background: var(--a) } .key.b { background: var(--b) }
@media print { body { padding: 0 } .card, .tile { break-inside: avoid } }
"""


def page_of(seen: Seen, about: dict[str, Any], words: Words) -> str:
    """The whole file."""
    return (
        f'<!doctype html><html lang="{words.language}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{words.title}</title><style>{_STYLE}</style></head><body>{_head(seen, about, words)}"
        f"{_tiles(seen, words)}"
        f'<div class="cards">{_table(seen, words)}{_charts(seen, words)}</div></body></html>\n'
    )


def _head(seen: Seen, about: dict[str, Any], words: Words) -> str:
    classes = {"✓": "good", "✗": "bad", "!": "unknown"}
    found = verdicts_of(seen, words)
    verdicts = "".join(f'<p class="{classes[mark]}">{mark} {escape(text)}</p>' for mark, text in found)
    told = " · ".join(escape(str(value)) for name, value in about.items() if name != "command")
    return (
        f'<h1>{words.title}</h1><p class="soft">{told}</p>'
        f"<p><code>{escape(str(about.get('command', '')))}</code></p>"
        f'<div class="verdicts">{verdicts}</div>'
    )


def _tiles(seen: Seen, words: Words) -> str:
    rate = seen.turns / seen.elapsed if seen.elapsed else 0.0
    tiles = [
        (f"{seen.turns:,}", words.turns_answered),
        (f"{seen.failures:,}", words.errors),
        (f"{rate:,.1f}", words.turns_a_second),
        (f"{seen.most_active:,}", words.most_active),
        (f"{seen.most_in_flight:,}", words.most_in_flight),
        (f"{seen.held_back:,}", words.held_back_tile),
        (shown(seen.first_piece.percentile(0.5), "s"), words.first_piece_median),
        (shown(seen.memory.percentile(0.5), "s"), words.memory_median),
        (f"{seen.retries:,}", words.retries),
        (f"{seen.gap_messages:,}", words.in_gaps),
        *((f"{count:,}", escape(name)) for count, name in accidents_of(seen, words)),
        *((f"{count:,}", words.tokens_tile.format(kind=escape(name))) for count, name in tokens_of(seen, words)),
    ]
    cells = "".join(
        f'<div class="tile"><b>{figure}</b><span class="soft">{name}</span></div>' for figure, name in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _table(seen: Seen, words: Words) -> str:
    rows = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{shown(value, unit)}</td>' for value in histogram.record().values())}</tr>"
        for name, histogram, unit in figures_of(seen, words)
    )
    head = "<tr><th></th><th>p50</th><th>p90</th><th>p99</th><th>max</th></tr>"
    note = f'<p class="soft">{words.latency_note} {words.lateness_note}</p>'
    return f'<div class="card"><h2>{words.percentiles}</h2><table>{head}{rows}</table>{note}</div>'


def _charts(seen: Seen, words: Words) -> str:
    seconds = seen.in_order()
    by_share = [
        (words.first_piece, "a", _curve(seen.first_piece)),
        (words.whole_turn, "b", _curve(seen.whole_turn)),
    ]
    first = [
        (name, kind, [(at.at, at.first_piece.percentile(share)) for at in seconds if at.first_piece.count])
        for name, kind, share in (("p50", "a", 0.5), ("p99", "b", 0.99))
    ]
    at_once = [
        _over_time(words.active, "a", seconds, lambda at: at.active),
        _over_time(words.in_flight, "b", seconds, lambda at: at.in_flight),
    ]
    turns = [
        _over_time(words.turns, "a", seconds, lambda at: at.turns),
        _over_time(words.errors, "b", seconds, lambda at: at.errors),
    ]
    messages = [_over_time(words.messages, "a", seconds, lambda at: at.lag_messages)]
    waiting = [_over_time(words.seconds, "b", seconds, lambda at: at.lag_seconds)]
    nines = [-math.log10(1 - nine) for nine in _NINES]
    return "".join(
        _card(title, _svg(lines, label, unit, ticks) or f'<p class="soft">{words.nothing_to_show}</p>', lines)
        for title, lines, label, unit, ticks in (
            (words.latency_by_percentile, by_share, _share_label, "s", nines),
            (words.first_piece_over_time, first, _time_label, "s", ()),
            (words.at_once_over_time, at_once, _time_label, "", ()),
            (words.turns_over_time, turns, _time_label, "", ()),
            (words.fold_lag_messages, messages, _time_label, "", ()),
            (words.fold_lag_seconds, waiting, _time_label, "s", ()),
        )
    )


def _over_time(name: str, kind: str, seconds: Sequence[Second], figure: Callable[[Second], float | None]) -> Line:
    return name, kind, [(at.at, value) for at in seconds if (value := figure(at)) is not None]


def _curve(histogram: Histogram) -> Points:
    """Values by the nines of their share, as HDR plots have them."""
    most = math.log10(histogram.count + 1)
    return [(min(-math.log10(max(1 - share, 1e-12)), most), value) for value, share in histogram.steps()]


def _share_label(nines: float) -> str:
    return f"{(1 - 10**-nines) * 100:.4g} %"


def _time_label(seconds: float) -> str:
    return f"{seconds:.0f} s"


def _card(title: str, plot: str, lines: Sequence[Line]) -> str:
    keys = "".join(f'<span class="key {kind}"></span>{escape(name)}' for name, kind, _ in lines)
    return f'<div class="card"><h2>{title} <span class="soft">{keys}</span></h2>{plot}</div>'


def _svg(lines: Sequence[Line], label: Callable[[float], str], unit: str, ticks: Sequence[float]) -> str:
    """The lines as a picture; none if there is nothing to show."""
    xs = [x for _, _, points in lines for x, _ in points]
    ys = [y for _, _, points in lines for _, y in points]
    if not xs:
        return ""
    most_x, most_y = max(*xs, 1e-9), _round_up(max(ys))
    if not unit:
        most_y = math.ceil(most_y / 4) * 4.0  # quarters of what is counted are whole

    def place(x: float, y: float) -> str:
        across = _LEFT + x / most_x * (_WIDTH - _LEFT - _RIGHT)
        return f"{across:.1f},{_HEIGHT - _BOTTOM - y / most_y * (_HEIGHT - _BOTTOM - _TOP):.1f}"

    parts = []
    for step in range(5):
        value = most_y * step / 4
        at = place(0, value).split(",")[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{shown(value, unit)}</text>')
    step_x = _round_up(most_x / 5)
    marks = [tick for tick in ticks if tick <= most_x] or [step_x * step for step in range(int(most_x / step_x) + 1)]
    parts += [
        f'<text x="{place(x, 0).split(",")[0]}" y="{_HEIGHT - 8}" text-anchor="middle">{label(x)}</text>' for x in marks
    ]
    parts += [
        f'<polyline class="line {kind}" points="{" ".join(place(x, y) for x, y in points)}"/>'
        for _, kind, points in lines
        if points
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _round_up(value: float) -> float:
    """The next number whose quarters are easy to read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10, 20) if step * power >= value)
