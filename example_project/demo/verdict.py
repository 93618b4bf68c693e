"""Whether the play went as it must. Every sentence states what was counted or measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from example_project.demo.scene import Run, Scene, Story, wakes

MAX_LATE_SECONDS = 5.0
MAX_LONGER_SECONDS = 2.0
"""By how much a sleep may be due later than its run says. It may never be due earlier."""
CLOCK_SECONDS = 0.01
"""How much two readings of one machine's clock, by two programs, may differ by rounding."""


@dataclass(frozen=True)
class Sleep:
    """A sleep that the code asks for: so many seconds, or until an instant."""

    seconds: float | None = None
    until: float | None = None


@dataclass(frozen=True)
class Plot:
    """How the story of one task must go."""

    title: str
    result: object
    actions: tuple[str, ...]
    sleeps: tuple[Sleep, ...]


@dataclass(frozen=True)
class Dark:
    """The time in which every process was dead, and what was left of the tasks in the middle of it.

    `killed`: how many processes there had been; `states`: of the results; `rows` of sleeping tasks in the
    durable store, and `messages` of theirs in the broker.
    """

    killed_at: float
    restarted_at: float
    states: tuple[str, ...]
    killed: int
    rows: int
    messages: int


@dataclass(frozen=True)
class Check:
    passed: bool
    text: str


def judge(scene: Scene, plots: tuple[Plot, ...], dark: Dark) -> list[Check]:
    checks = [
        _slept_in_the_dark(dark),
        _were_rows_in_the_dark(dark),
        _nothing_ran_in_the_dark(scene, dark),
    ]
    stories = {story.title: story for story in scene.stories}
    for plot in plots:
        story = stories[plot.title]
        checks += [
            _steps_ran_once(story, plot),
            _slept_as_asked(story, plot, scene),
            _ended_well(story, plot, dark),
        ]
    return [*checks, _beat_went_on(scene, dark), _pages_once(scene)]


def _slept_in_the_dark(dark: Dark) -> Check:
    states = ", ".join(f"{count} {state}" for state, count in Counter(dark.states).items())
    sleeping = set(dark.states) == {"SLEEPING"}
    return Check(sleeping, f"states of the results while every process was dead: {states}")


def _were_rows_in_the_dark(dark: Dark) -> Check:
    passed = dark.rows == len(dark.states) and dark.messages == 0
    text = f"kept meanwhile: {dark.rows} sleeping rows, {dark.messages} messages of these tasks in the broker"
    return Check(passed, text)


def _nothing_ran_in_the_dark(scene: Scene, dark: Dark) -> Check:
    instants = [instant for story in scene.stories for instant in _instants(story)]
    instants += [act.done_at for act in (*scene.digests, *scene.exports)]
    seen = [instant for instant in instants if dark.killed_at < instant < dark.restarted_at]
    seconds = dark.restarted_at - dark.killed_at
    return Check(not seen, f"{len(seen)} runs and steps in the {seconds:.1f} s without a process")


def _instants(story: Story) -> Iterator[float]:
    yield from (run.started_at for run in story.runs)
    yield from (act.done_at for act in story.acts)


def _steps_ran_once(story: Story, plot: Plot) -> Check:
    passed = story.action_counts == Counter(plot.actions)
    return Check(passed, f"{story.title}: what its steps did: {story.counts_text or 'nothing'}")


def _slept_as_asked(story: Story, plot: Plot, scene: Scene) -> Check:
    """Each sleep is due when the code asked for it, and ends then: not before, and not much later.

    A due time is counted from the run that wrote it, whatever was killed afterwards.
    """
    seen = wakes(story, scene.uptimes)
    on_time = len(seen) == len(plot.sleeps) and all(
        not wake.is_early and wake.late_seconds <= MAX_LATE_SECONDS for wake in seen
    )
    late = " and ".join(wake.text for wake in seen)
    woke = f"woke {late} (limit {MAX_LATE_SECONDS:.0f} s)" if seen else "never woke"
    text = f"{story.title}: {woke}"
    shifts = _shifts(story, plot)
    if len(story.dues) != len(plot.sleeps):
        return Check(False, f"{text}; sleeps: {len(story.dues)} of {len(plot.sleeps)}")
    as_asked = all(-CLOCK_SECONDS <= shift <= MAX_LONGER_SECONDS for shift in shifts)
    if not as_asked:
        shifted = ", ".join(f"{shift * 1000:+.0f} ms" for shift in shifts)
        text = f"{text}; due at another time than the code asked for: {shifted}"
    elif max(shifts, default=0.0) > CLOCK_SECONDS:
        later = f"up to {max(shifts) * 1000:.0f} ms"
        text = f"{text}; due {later} later than the code says (limit {MAX_LONGER_SECONDS:.0f} s)"
    return Check(on_time and as_asked, text)


def _shifts(story: Story, plot: Plot) -> list[float]:
    """By how many seconds each due time is later than what the code asked for."""
    sleeps = zip(story.dues, plot.sleeps, story.runs, strict=False)
    return [_shift(due, sleep, run) for due, sleep, run in sleeps]


def _shift(due: float, sleep: Sleep, asked_by: Run) -> float:
    if sleep.until is not None:
        return due - sleep.until
    # It was asked for at some instant of the run that went to sleep.
    asked_at = due - (sleep.seconds or 0.0)
    ended_at = asked_by.ended_at or asked_by.started_at
    return min(asked_at - asked_by.started_at, 0.0) or max(asked_at - ended_at, 0.0)


def _ended_well(story: Story, plot: Plot, dark: Dark) -> Check:
    """The right result, one run more than sleeps, and no process from before the kill after it."""
    before = {run.pid for run in story.runs if run.started_at < dark.killed_at}
    after = {run.pid for run in story.runs if run.started_at >= dark.killed_at}
    replayed = len(story.runs) == len(plot.sleeps) + 1 and not before & after
    right = story.state == "SUCCESS" and story.result == plot.result
    processes = ", ".join(str(run.pid) for run in story.runs)
    text = (
        f"{story.title}: {story.state}, {story.result!r},"
        f" after {len(story.runs)} runs of the body (processes {processes})"
    )
    wanted = f"; expected: {plot.result!r} after {len(plot.sleeps) + 1} runs"
    return Check(replayed and right, text if replayed and right else text + wanted)


def _beat_went_on(scene: Scene, dark: Dark) -> Check:
    """Each entry of the beat schedule ran again after the restart."""
    digests = sum(act.done_at > dark.restarted_at for act in scene.digests)
    exports = len({act.subject for act in scene.exports if act.done_at > dark.restarted_at})
    text = f"beat schedule: {digests} digest(s) and {exports} export(s) after the restart"
    return Check(digests > 0 and exports > 0, text)


def _pages_once(scene: Scene) -> Check:
    counts = Counter((act.subject, act.action) for act in scene.exports)
    twice = [page for page, count in counts.items() if count > 1]
    text = f"beat schedule: {len(counts)} exported page(s), {len(twice)} written twice"
    return Check(not twice, text)
