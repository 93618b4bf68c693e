"""Shows the play: a picture that is drawn over and over on a terminal, else line by line."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from typing import Protocol, TextIO

from example_project.demo.scene import Scene
from example_project.demo.text import Line, Segment, line, render
from example_project.demo.timeline import frame

NEWS_SHOWN = 6
MIN_HEIGHT = 24
MAX_WIDTH = 118
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Screen(Protocol):
    def say(self, text: str, style: str = "") -> None:
        """One piece of news."""

    def draw(self, scene: Scene) -> None:
        """The picture as it is now."""

    def finish(self, scene: Scene) -> None:
        """The picture as it stays."""

    def close(self) -> None:
        """Leaves the terminal as it was; may be called twice."""


def open_screen(printer: Printer) -> Screen:
    return LiveScreen(printer) if printer.can_redraw else PlainScreen(printer)


class Printer:
    """Writes lines in what this output can show."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colour = out.isatty() and "NO_COLOR" not in os.environ
        self._unicode = (out.encoding or "").lower().replace("-", "") == "utf8"

    @property
    def can_redraw(self) -> bool:
        """Whether this is a terminal on which the whole picture has room."""
        enough = shutil.get_terminal_size().lines >= MIN_HEIGHT
        return self._out.isatty() and enough and os.environ.get("TERM") != "dumb"

    @property
    def width(self) -> int:
        return min(MAX_WIDTH, shutil.get_terminal_size((100, 24)).columns)

    def text(self, text: Line, width: int) -> str:
        return render(text, width, colour=self._colour, unicode=self._unicode)

    def line(self, text: Line) -> None:
        print(self.text(text, width=sys.maxsize), file=self._out, flush=True)

    def raw(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class PlainScreen:
    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._began_at = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        self._printer.line(line(_clock(self._began_at), Segment(text, style)))

    def draw(self, scene: Scene) -> None:
        """Nothing: the news say it."""

    def finish(self, scene: Scene) -> None:
        for text in (line(), *frame(scene, self._printer.width)):
            self._printer.line(text)

    def close(self) -> None:
        """Nothing was changed."""


class LiveScreen:
    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._began_at = time.monotonic()
        self._news: deque[Line] = deque(maxlen=NEWS_SHOWN)
        self._height = 0
        self._printer.raw(HIDE_CURSOR)

    def say(self, text: str, style: str = "") -> None:
        self._news.append(line(_clock(self._began_at), Segment(text, style)))

    def draw(self, scene: Scene) -> None:
        news = [*self._news, *[line()] * (NEWS_SHOWN - len(self._news))]
        self._show([*frame(scene, self._printer.width), line(), *news])

    def finish(self, scene: Scene) -> None:
        self.draw(scene)
        self.close()

    def close(self) -> None:
        self._printer.raw(SHOW_CURSOR)

    def _show(self, lines: list[Line]) -> None:
        up = f"\x1b[{self._height}F" if self._height else ""
        # Each line is cleared after its text, and not before, so that nothing flickers.
        body = "".join(f"{self._printer.text(text, self._printer.width)}\x1b[K\n" for text in lines)
        self._printer.raw(f"{up}{body}\x1b[J")
        self._height = len(lines)


def _clock(began_at: float) -> Segment:
    return Segment(f"  {time.monotonic() - began_at:5.1f} s  ", "dim")
