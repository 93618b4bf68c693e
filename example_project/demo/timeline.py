"""The picture: a lane for each process and each task, and a table of what was counted."""

from __future__ import annotations

from collections.abc import Iterable

from example_project.demo.pace import DAYS_IN_ALL
from example_project.demo.scene import Act, Scene, Story, Uptime, wakes
from example_project.demo.text import Line, Segment, join, line

LABEL_WIDTH = 14
EMPTY = Segment(" ")
COLUMNS = (15, 8, 8, 28)
"""Widths of the table's columns, but for the last."""
LEGEND = (
    ("╌", "dim", "starts"),
    ("━", "up", "is up"),
    ("✗", "bad", "killed, or failed"),
    ("●", "run", "the body runs"),
    ("┄", "sleep", "asleep: a row"),
    ("◇", "mark", "due"),
    ("✓", "good", "done"),
    ("·", "mark", "beat's task ran"),
)


class Lane:
    """A row of cells over the time from the start of the demo to its planned end."""

    def __init__(self, scene: Scene, width: int) -> None:
        self._start = scene.began_at
        planned_end = (scene.sent_at or scene.began_at) + DAYS_IN_ALL * scene.day_seconds
        self._seconds = max(planned_end, scene.now) - scene.began_at
        self._cells = [EMPTY] * width

    def put(self, instant: float, glyph: str, style: str) -> None:
        self._cells[self._column(instant)] = Segment(glyph, style)

    def fill(self, start: float, end: float, glyph: str, style: str) -> None:
        for column in range(self._column(start), self._column(end) + 1):
            self._cells[column] = Segment(glyph, style)

    def line(self, label: str, style: str = "") -> Line:
        return (Segment(f"  {label:<{LABEL_WIDTH}}", style), *join(self._cells))

    def _column(self, instant: float) -> int:
        last = len(self._cells) - 1
        share = (instant - self._start) / self._seconds if self._seconds else 0.0
        return min(last, max(0, round(share * last)))


def frame(scene: Scene, width: int) -> list[Line]:
    lane_width = max(20, width - LABEL_WIDTH - 4)
    return [
        _axis(scene, Lane(scene, lane_width)),
        *(_process_lane(scene, name, Lane(scene, lane_width)) for name in _process_names(scene)),
        *(_story_lane(scene, story, Lane(scene, lane_width)) for story in scene.stories),
        _beat_lane(scene.digests, "daily digest", Lane(scene, lane_width)),
        _beat_lane(scene.exports, "nightly export", Lane(scene, lane_width)),
        _legend(),
        line(),
        *table(scene),
    ]


def table(scene: Scene) -> list[Line]:
    head = ("task", "state", "body ran", "woke after due (*restart)", "what its steps did")
    return [
        _row(*(Segment(title, "dim") for title in head)),
        *(_story_row(scene, story) for story in scene.stories),
    ]


def _legend() -> Line:
    parts = [part for glyph, style, text in LEGEND for part in (Segment(glyph, style), f" {text}   ")]
    return line("  ", *parts)


def _axis(scene: Scene, lane: Lane) -> Line:
    if scene.sent_at is not None:
        for day in range(int(DAYS_IN_ALL) + 1):
            lane.put(scene.sent_at + day * scene.day_seconds, str(day), "dim")
    return lane.line("day", "dim")


def _process_names(scene: Scene) -> list[str]:
    return list(dict.fromkeys(uptime.name for uptime in scene.uptimes))


def _process_lane(scene: Scene, name: str, lane: Lane) -> Line:
    for uptime in scene.uptimes:
        if uptime.name == name:
            _draw_uptime(scene, uptime, lane)
    return lane.line(name)


def _draw_uptime(scene: Scene, uptime: Uptime, lane: Lane) -> None:
    end = uptime.killed_at or scene.now
    lane.fill(uptime.started_at, uptime.ready_at or end, "╌", "dim")
    if uptime.ready_at is not None:
        lane.fill(uptime.ready_at, end, "━", "up")
    if uptime.killed_at is not None:
        lane.put(uptime.killed_at, "✗", "bad")


def _story_lane(scene: Scene, story: Story, lane: Lane) -> Line:
    if story.runs:
        end = story.runs[-1].ended_at if story.is_over else None
        lane.fill(story.runs[0].started_at, end or scene.now, "┄", "sleep")
    for due_at in story.dues:
        if due_at > scene.now:
            lane.put(due_at, "◇", "mark")
    for run in story.runs:
        lane.fill(run.started_at, run.ended_at or scene.now, "●", "run")
    if story.is_over and story.runs:
        glyph, style = ("✓", "good") if story.state == "SUCCESS" else ("✗", "bad")
        lane.put(story.runs[-1].ended_at or scene.now, glyph, style)
    return lane.line(story.title)


def _beat_lane(acts: Iterable[Act], label: str, lane: Lane) -> Line:
    for act in acts:
        lane.put(act.done_at, "·", "mark")
    return lane.line(label, "dim")


def _story_row(scene: Scene, story: Story) -> Line:
    late = [wake.short_text for wake in wakes(story, scene.uptimes)]
    style = {"SUCCESS": "good", "FAILURE": "bad", "SLEEPING": "sleep"}.get(story.state, "")
    return _row(
        Segment(story.title),
        Segment(story.state, style),
        Segment(f"{len(story.runs)} ×"),
        Segment(", ".join([*late, *_countdown(scene, story)])),
        Segment(story.counts_text),
    )


def _countdown(scene: Scene, story: Story) -> list[str]:
    return [f"wakes in {due - scene.now:.1f} s" for due in story.dues if due > scene.now]


def _row(*cells: Segment) -> Line:
    padded = (
        Segment(f"{cell.text:<{size}}  ", cell.style) for cell, size in zip(cells[:-1], COLUMNS, strict=True)
    )
    return line("  ", *padded, cells[-1])
