"""Lines of styled text, and how they become characters for a terminal or for a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STYLES = {
    "": "",
    "bold": "1",
    "dim": "2",
    "up": "32",
    "good": "1;32",
    "bad": "1;31",
    "run": "1;33",
    "sleep": "34",
    "mark": "36",
}

PLAIN_GLYPHS = str.maketrans("━╌✗●┄◇✓·×→─", "=-X*.oV:x>-")


@dataclass(frozen=True)
class Segment:
    text: str
    style: str = ""


Line = tuple[Segment, ...]


def line(*parts: Segment | str) -> Line:
    return tuple(part if isinstance(part, Segment) else Segment(part) for part in parts)


def plain(text: Line) -> str:
    return "".join(segment.text for segment in text)


def render(text: Line, width: int, *, colour: bool, unicode: bool) -> str:
    """At most `width` characters, so that the terminal never wraps, and never scrolls by itself."""
    output = ""
    for segment in text:
        shown = segment.text[: max(0, width)]
        width -= len(shown)
        if not unicode:
            shown = shown.translate(PLAIN_GLYPHS)
        code = STYLES[segment.style] if colour else ""
        output += f"\x1b[{code}m{shown}\x1b[0m" if code and shown else shown
    return output


def join(cells: Iterable[Segment]) -> Line:
    """Neighbours of one style become one segment."""
    joined: list[Segment] = []
    for cell in cells:
        if joined and joined[-1].style == cell.style:
            joined[-1] = Segment(joined[-1].text + cell.text, cell.style)
        else:
            joined.append(cell)
    return tuple(joined)
