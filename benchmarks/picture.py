"""The picture: every comparison as a bar, with its spread and its target.

The SVG is written by hand, because it consists of bars and text only. Its colours follow the
reader's light or dark mode.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING

from benchmarks.report import TITLES, compared, figure, target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.figures import Row

WIDTH = 960
LABELS = 330
BARS = 330
ROW, HEAD, BAR = 26, 58, 14
MARGIN = 24

STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .small { font-size: 12px; fill: #59636e }
  .ground { fill: #ffffff }
  .met { fill: #2f6fdb }
  .plain { fill: #8aa4c8 }
  .missed { fill: #d9730d }
  .line { stroke: #1f2328; stroke-width: 1.5 }
  .target { stroke: #59636e; stroke-width: 2; stroke-dasharray: 4 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .ground { fill: #0d1117 }
    .met { fill: #4c8dff }
    .plain { fill: #56708f }
    .missed { fill: #f0883e }
    .line { stroke: #e6edf3 }
    .target { stroke: #9198a1 }
  }
"""

AXES = {
    "deliveries": "share of what the bare aiohttp client does; more is better",
    "peers": "times what the other does; more is better; an arrow marks a bar that goes on",
    "peers-latency": "times what the other takes; less is better",
    "cost": "times what the other costs; less is better; an arrow marks a bar that goes on",
    "brokers": "times the client's bare loop; more is better",
    "formats": "share of what the envelope does; more is better",
    "watched": "share of what the same relay does when it is not watched; more is better",
    "api": "times the same without clients, or without the API",
    "shares": "times the same without the hostile tenant; less is better",
    "flood": "times the same without the other tenants; less is better",
    "commits": "commits per second compared with another method; more is better",
    "publishing": "events per second of what the driver's INSERT does; more is better",
    "majors": "commits per second compared with another method; more is better",
    "latency": "times the sum of a commit, a NOTIFY and a POST; less is better",
    "million": "times the same at the beginning, or in a new database",
    "outage": "times what the other takes or reaches; less is better",
    "failover": "leases from kill -9; less is better",
    "replays": "times the latency without a replay; less is better",
    "feeding": "times the latency without a feed, or the bound; see the table",
    "replicas": "times a single replica's CPU, or its renewals; less is better",
    "commands": "times what the same command takes on an almost empty database; less is better",
    "pages": "times what the same view takes on an almost empty database; less is better",
    "reads": "of the bound of 100 ms; less is better",
    "receiving": "of what the bare framework does; more is better",
    "cursors": "share of the events; less is better",
    "horizon": "times the same without a pinned horizon; less is better",
    "hostile": "times the same without the attack; less is better, but more for deliveries",
    "scale": "times the same where there is little, or MB more; less is better",
    "keepalive": "share of the requests; less is better",
    "exchanges": "times the baseline; less is better",
    "fair": "times the quiet endpoint's own; less is better",
    "memory": "MB more than a relay with nothing to do; less is better",
}
LONGEST = {"peers": 8.0, "cost": 8.0, "publishing": 12.0}
"""The maximum length of a bar: some peers are so much slower that the others would be invisible."""
SEVERAL = ("commits", "majors", "peers", "peers-latency", "cost", "outage")
"""Sections in which one of our figures is compared with several others."""


def draw(rows: Sequence[Row]) -> str:
    """Return the whole picture as SVG."""
    parts: list[str] = []
    y = MARGIN
    for section, group in groupby(rows, key=lambda row: row.section):
        y = _section(parts, section, list(group), y)
    parts.append(
        _text(MARGIN, y + 6, "Dashed: the target. Thin line: lowest to highest round.", "small")
    )
    height = y + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="Benchmark results">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _section(parts: list[str], section: str, rows: list[Row], y: int) -> int:
    parts.append(_text(MARGIN, y + 14, TITLES[section][0], "title"))
    parts.append(_text(MARGIN, y + 32, AXES[section], "small"))
    y += HEAD - 12
    measured = [row for row in rows if not row.missing_reason]
    bounds = [row.compared.high for row in measured]
    bounds += [row.target.value for row in measured if row.target]
    longest = min(max(bounds, default=0.0) or 1.0, LONGEST.get(section, inf))
    scale = BARS / (longest * 1.02)
    for row in rows:
        _row(parts, row, y, scale)
        y += ROW
    return y + 16


def _row(parts: list[str], row: Row, y: int, scale: float) -> None:
    left, middle = MARGIN + LABELS, y + BAR / 2
    baseline = f" / {row.baseline_name}" if row.section in SEVERAL else ""
    parts.append(_text(MARGIN, y + 12, row.name + baseline, ""))
    if row.missing_reason:
        parts.append(_text(left, y + 12, f"not measured: {row.missing_reason}", "small"))
        return
    found = row.compared
    length = max(found.median * scale, 1)
    if length > BARS:
        length = BARS
        parts.append(_text(left + BARS + 2, y + 12, "\N{RIGHTWARDS ARROW}", "small"))
    kind = {None: "plain", True: "met", False: "missed"}[row.met]
    parts.append(
        f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>'
    )
    if found.low != found.high:
        low, high = (left + min(end * scale, BARS) for end in (found.low, found.high))
        parts.append(
            f'<line class="line" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
        )
    if row.target is not None:
        x = left + row.target.value * scale
        parts.append(
            f'<line class="target" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + BAR + 4}">'
            f"<title>{escape(target(row))}</title></line>"
        )
    label = f"{compared(row).partition(' (')[0]}   {figure(row.ours.median, row.unit)}"
    parts.append(_text(left + BARS + 16, y + 12, label, ""))


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" xml:space="preserve">{escape(text)}</text>'
