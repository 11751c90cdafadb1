"""The pictures of the concepts, as SVG that is legible on light and dark pages.

`python -m docs.tools.pictures` writes them into `assets/`; a test compares the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"

# An image follows the scheme of the browser, not the one that is chosen on the page, so each
# picture has a background of its own.
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2430}"
    ".small{font-size:11px;fill:#4a5565}"
    "rect.back{fill:#fff}"
    "rect.box{fill:#eef2fb;stroke:#3f51b5;stroke-width:1.5}"
    "rect.lost{fill:#fff;stroke:#8a93a3;stroke-width:1.5;stroke-dasharray:5 4}"
    "rect.good{fill:#e3f4e8;stroke:#1f7a3d;stroke-width:1.5}"
    "path{fill:none;stroke:#3f51b5;stroke-width:1.5}"
    "path.head{fill:#3f51b5;stroke:none}"
)


@dataclass
class Picture:
    """Boxes, arrows and lines of text; coordinates are pixels."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, lines: list[str], kind: str = "box") -> None:
        """A box; the first of its lines is its name."""
        height = 20 + 18 * len(lines)
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        )
        for index, line in enumerate(lines):
            self.text(x + width // 2, y + 24 + 18 * index, line, small=index > 0)

    def text(self, x: int, y: int, text: str, *, small: bool = True) -> None:
        """A line of text, centered at x."""
        kind = ' class="small"' if small else ""
        self.parts.append(f'<text{kind} x="{x}" y="{y}" text-anchor="middle">{text}</text>')

    def arrow(self, x: int, y: int, to_x: int, to_y: int) -> None:
        """A straight arrow to the right or downwards."""
        if to_y == y:
            head = f"M{to_x} {to_y}l-8 -4v8z"
        elif to_x == x:
            head = f"M{to_x} {to_y}l-4 -8h8z"
        else:
            head = f"M{to_x} {to_y}l-9 -2l3 7z" if to_y < y else f"M{to_x} {to_y}l-6 -7l-4 7z"
        self.parts.append(f'<path d="M{x} {y}L{to_x} {to_y}"/><path class="head" d="{head}"/>')

    def svg(self) -> str:
        """The picture as a file."""
        size = f'width="{self.width}" height="{self.height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
            f' viewBox="0 0 {self.width} {self.height}"><title>{self.title}</title>'
            f'<style>{STYLE}</style><rect class="back" {size} rx="8"/>'
            + "".join(self.parts)
            + "</svg>\n"
        )


def way() -> Picture:
    """The way from the transaction to the receiver."""
    picture = Picture("The way of an event", 760, 255)
    picture.box(15, 85, 130, ["application", "BEGIN … COMMIT"])
    picture.box(185, 85, 110, ["outbox", "one row: event"])
    picture.box(335, 85, 120, ["sequencer", "1, 2, 3 … per lane"])
    picture.box(500, 20, 100, ["lane 0", "order-1, order-4"])
    picture.box(500, 85, 100, ["lane 1", "order-7"])
    picture.box(500, 150, 100, ["lane 2", "order-2"])
    picture.box(645, 85, 100, ["receiver", "drops copies"])
    picture.arrow(145, 113, 185, 113)
    picture.arrow(295, 113, 335, 113)
    for lane_y in (48, 113, 178):
        picture.arrow(455, 113, 500, lane_y)
    picture.arrow(600, 113, 645, 113)
    picture.parts.append(
        '<path d="M600 48C625 48 625 100 640 106M600 178C625 178 625 126 640 120"/>'
    )
    picture.text(240, 75, "PostgreSQL")
    picture.text(395, 75, "relay")
    picture.text(620, 240, "one request in flight in each lane")
    return picture


def gap() -> Picture:
    """A transaction that commits late."""
    picture = Picture("A gap", 760, 220)
    for index, (lines, kind) in enumerate(
        [
            (["id 41", "committed"], "good"),
            (["id 42", "still open"], "lost"),
            (["id 43", "committed"], "good"),
            (["id 44", "committed"], "good"),
        ]
    ):
        picture.box(100 + 145 * index, 20, 125, lines, kind)
    picture.box(
        60, 130, 280, ["the relay remembers the gap 42", "and who holds the lock of the id"]
    )
    picture.box(
        420, 130, 280, ["43 and 44 are delivered", "42 follows when it commits, or never will"]
    )
    picture.arrow(307, 76, 307, 130)
    picture.arrow(527, 76, 527, 130)
    return picture


def takeover() -> Picture:
    """A relay dies, another one takes its endpoint over."""
    picture = Picture("A take-over", 760, 230)
    picture.box(20, 20, 210, ["relay A dies", "sequence 12 was sent,", "not recorded"], "lost")
    picture.box(275, 20, 210, ["its lease runs out", "after OUTBOX_LEASE_S", "(5 s)"])
    picture.box(
        530,
        20,
        210,
        ["relay B fences A off", "A's late writes are refused,", "B owns the endpoint"],
    )
    picture.box(530, 145, 210, ["relay B sends 12 again", "same X-Delivery, then 13"], "good")
    picture.box(
        20,
        145,
        465,
        ["the receiver drops the copy of 12", "and processes 13: nothing missing, nothing twice"],
        "good",
    )
    picture.arrow(230, 57, 275, 57)
    picture.arrow(485, 57, 530, 57)
    picture.arrow(635, 94, 635, 145)
    picture.parts.append('<path d="M530 173H493"/><path class="head" d="M485 173l8 -4v8z"/>')
    return picture


PICTURES = {"way.svg": way, "gap.svg": gap, "takeover.svg": takeover}


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (ASSETS / name).write_text(picture().svg(), "utf-8")
