"""A flame graph of a relay's CPU time while it drains a backlog.

Each box is a function, as wide as its share of the time including its callees, and is below its
caller. The uncovered part below a box is the function's own time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from benchmarks.deliveries import BACKLOG, FRAME_BYTES, Load
from benchmarks.stage import add_endpoint, child, search

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from benchmarks.stage import Stage

LOAD = Load("64 lanes", 64, 40_000)
QUICK_REQUESTS = 4_000

WIDTH, ROW, HEAD, MARGIN = 1200, 18, 64, 12
CHAR = 6.6
"""The approximate width of a letter."""
SHARE_MIN = 0.002
"""Smaller shares are not drawn."""
LAYERS = {
    "outbox/core/": "core",
    "outbox/relay/": "relay",
    "outbox/store/": "store",
    "outbox/destinations/": "transport",
    "outbox/telemetry/": "telemetry",
    "": "libraries",
}
STYLE = """
  text { font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .ground { fill: #ffffff }
  .core { fill: #9ec5fe } .relay { fill: #a3cfbb } .store { fill: #f1c27d }
  .transport { fill: #e6a4b4 } .telemetry { fill: #c5b3e6 } .libraries { fill: #d0d7de }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 }
    .title, .legend { fill: #e6edf3 }
  }
"""


@dataclass(slots=True)
class Box:
    """A function, called from one place."""

    name: str
    times: int = 0
    """Number of samples of the function and its callees."""
    calls: dict[str, Box] = field(default_factory=dict)


def grown(lines: Iterable[str]) -> Box:
    """Build a tree from all stacks; see `benchmarks.sampled`."""
    root = Box("all")
    for line in lines:
        times, _, stack = line.partition(" ")
        box = root
        box.times += int(times)
        for name in stack.split(";") if stack else ():
            box = box.calls.setdefault(name, Box(name))
            box.times += int(times)
    return root


def draw(root: Box, facts: Mapping[str, str], requests: int) -> str:
    """Draw the tree as SVG."""
    boxes = list(placed(root))
    height = HEAD + ROW * (1 + max((row for _, _, row in boxes), default=0)) + MARGIN
    about = f"{requests:,} deliveries over 64 lanes; Python {facts['Python']}, {facts['system']}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="Profile of the relay">',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
            f'<text class="title" x="{MARGIN}" y="22">Where a relay\'s processor time goes</text>',
            f'<text class="legend" x="{MARGIN}" y="40">{escape(about)}</text>',
            *_legend(),
            *(_box(box, x, row, root.times) for box, x, row in boxes),
            "</svg>\n",
        ]
    )


def placed(root: Box) -> Iterator[tuple[Box, int, int]]:
    """Return the callees, most expensive first, each with its offset and its row."""

    def below(box: Box, before: int, row: int) -> Iterator[tuple[Box, int, int]]:
        for called in sorted(box.calls.values(), key=lambda each: -each.times):
            if called.times < SHARE_MIN * root.times:
                return
            yield called, before, row
            yield from below(called, before, row + 1)
            before += called.times

    return below(root, 0, 0)


def _legend() -> Iterator[str]:
    x = WIDTH - MARGIN - 90 * len(LAYERS)
    for layer in LAYERS.values():
        yield f'<rect class="{layer}" x="{x}" y="30" width="12" height="12" rx="2"/>'
        yield f'<text class="legend" x="{x + 17}" y="40">{layer}</text>'
        x += 90


def _box(box: Box, before: int, row: int, of: int) -> str:
    scale = (WIDTH - 2 * MARGIN) / of
    x, y, width = MARGIN + before * scale, HEAD + row * ROW, box.times * scale
    path, _, name = box.name.rpartition(":")
    layer = next(layer for prefix, layer in LAYERS.items() if path.startswith(prefix))
    room = int((width - 6) / CHAR)
    text = name.replace(".<locals>", "")
    if len(text) > room:
        text = text.rpartition(".")[2]
    label = text if len(text) <= room else f"{text[: room - 1]}…" if room > 4 else ""
    return (
        f"<g><title>{escape(name)} ({escape(path)}), {box.times / of:.1%}</title>"
        f'<rect class="{layer}" x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" '
        f'height="{ROW - 1}" rx="2"/>'
        f'<text x="{x + 4:.1f}" y="{y + 13}">{escape(label)}</text></g>'
    )


async def measure(stage: Stage, *, quick: bool) -> tuple[Box, int]:
    """Return the tree and the number of deliveries."""
    requests = QUICK_REQUESTS if quick else LOAD.requests
    path = stage.directory / "stacks"
    async with stage.server.database() as database:
        async with search(database) as connection:
            await add_endpoint(connection, stage.urls[LOAD.scheme], lanes=LOAD.lanes)
            await connection.execute(BACKLOG, requests, LOAD.payload_bytes - FRAME_BYTES)
        stage.expect(requests)
        env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
        async with child("sampled", path, env=env):
            await stage.receiver.response()
    return grown(path.read_text("utf-8").splitlines()), requests
