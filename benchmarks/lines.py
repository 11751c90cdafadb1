"""A line chart of rates over time, as SVG: one line per contestant.

The colours are distinguishable in light and dark mode, and dashes distinguish lines without
colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, PLOT_HEIGHT = 960, 320
LEFT, RIGHT, TOP, KEY = 76, 24, 56, 22
POINTS_PER_S = 1
"""The peak, which the smoothed line does not show, is given as text."""
TICKS_X, TICKS_Y = 10, 5
LINES_MAX = 5
"""The number of styles below; a line without one would not be seen."""

STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .small { font-size: 12px; fill: #59636e }
  .ground { fill: #ffffff }
  .shade { fill: #59636e; opacity: 0.12 }
  .grid { stroke: #59636e; stroke-width: 1; opacity: 0.3 }
  polyline, .key { fill: none; stroke-width: 2; stroke-linejoin: round }
  .line0 { stroke: #2f6fdb; stroke-width: 3 }
  .line1 { stroke: #b35900; stroke-dasharray: 8 3 }
  .line2 { stroke: #1a7f37; stroke-dasharray: 3 3 }
  .line3 { stroke: #8250df; stroke-dasharray: 10 3 2 3 }
  .line4 { stroke: #bf3989; stroke-dasharray: 2 5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .ground { fill: #0d1117 }
    .shade { fill: #e6edf3 }
    .grid { stroke: #9198a1 }
    .line0 { stroke: #4c8dff }
    .line1 { stroke: #f0883e }
    .line2 { stroke: #3fb950 }
    .line3 { stroke: #bc8cff }
    .line4 { stroke: #f778ba }
  }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """The rates of a contestant, one per step."""

    name: str
    rates: Sequence[float]


def draw(title: str, lines: Sequence[Line], *, step_s: float, shaded_s: float) -> str:
    """Draw the chart; the first seconds are shaded."""
    assert len(lines) <= LINES_MAX
    per_point = max(round(1 / (step_s * POINTS_PER_S)), 1)
    points = [_means(line.rates, per_point) for line in lines]
    seconds = max(len(line.rates) for line in lines) * step_s
    step_x, step_y = _round(seconds / TICKS_X), _round(max(map(max, points)) / TICKS_Y)
    longest = ceil(seconds / step_x) * step_x
    highest = max(ceil(max(map(max, points)) / step_y), 1) * step_y
    bottom = TOP + PLOT_HEIGHT
    height = bottom + 58 + KEY * len(lines)

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / longest

    def y(rate: float) -> float:
        return bottom - PLOT_HEIGHT * rate / highest

    parts = [
        _text(24, 26, title, "title"),
        _text(24, 44, "requests per second at the receiver: means of a second, peaks of a tenth"),
        f'<rect class="shade" x="{x(0):.1f}" y="{TOP}" '
        f'width="{x(shaded_s) - x(0):.1f}" height="{PLOT_HEIGHT}"/>',
        _text(x(0) + 6, TOP + 16, "the receiver is down"),
    ]
    for n in range(round(highest / step_y) + 1):
        at = y(n * step_y)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(_text(LEFT - 8, at + 4, f"{n * step_y:,.0f}", anchor="end"))
    parts += [
        _text(x(n * step_x), bottom + 18, f"{n * step_x:g} s", anchor="middle")
        for n in range(round(longest / step_x) + 1)
    ]
    for n, (line, rates) in reversed(list(enumerate(zip(lines, points, strict=True)))):
        coordinates = " ".join(
            f"{x((i + 0.5) * per_point * step_s):.1f},{y(rate):.1f}" for i, rate in enumerate(rates)
        )
        parts.append(f'<polyline class="line{n}" points="{coordinates}"/>')
        at = bottom + 48 + KEY * n
        parts.append(
            f'<line class="key line{n}" x1="{LEFT}" x2="{LEFT + 44}" y1="{at}" y2="{at}"/>'
        )
        parts.append(_text(LEFT + 56, at + 4, line.name, ""))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _means(rates: Sequence[float], of: int) -> list[float]:
    """Return the means of groups of neighbours."""
    groups = [rates[i : i + of] for i in range(0, len(rates), of)]
    return [sum(group) / of for group in groups]


def _round(about: float) -> float:
    """Return the next number of the form 1, 2, 5, 10 … that is not below this one."""
    power = 10.0 ** floor(log10(max(about, 1e-9)))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= about * 0.999)


def _text(x: float, y: float, text: str, kind: str = "small", *, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
