"""The play itself: send, sleep, kill -9, darkness, restart, wake."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from example_project import shop, tasks
from example_project.days import days
from example_project.demo.news import news
from example_project.demo.observer import Observer, is_quiet
from example_project.demo.pace import MAX_BOOT_SECONDS, USUAL_BOOT_SECONDS, Pace
from example_project.demo.processes import beat, worker
from example_project.demo.remains import messages, sleeping_rows
from example_project.demo.scene import Scene, Story
from example_project.demo.screen import Screen
from example_project.demo.verdict import Check, Dark, Plot, Sleep, judge

LOOK_SECONDS = 0.15
MIN_WATCH_SECONDS, MAX_WATCH_SECONDS = 0.7, 1.5
LONG_BOOT_SECONDS = 15.0
LAST_DAY_TO_KILL, LAST_DAY_TO_BE_BACK = 2.8, 4.0
"""Before the first task wakes; before the first reminder, so that there is time to pay after it."""
INVOICE = "collect invoice"
FIRST_REMINDER = "reminder #1"


class DemoFailed(Exception):
    """The play could not go on; the message says what did not happen."""


@dataclass(frozen=True)
class Performance:
    """What was seen, and what was left in the time without processes."""

    scene: Scene
    dark: Dark
    checks: list[Check]


class Play:
    """One performance, in the working directory; every process that it starts ends with it."""

    def __init__(self, screen: Screen, worker_options: tuple[str, ...], pace: Pace) -> None:
        self._screen = screen
        self._pace = pace
        self._observer = Observer(pace.day_seconds)
        env = dict(os.environ)
        self._processes = (worker(env, worker_options), beat(env))
        self._deadline = time.monotonic() + pace.max_seconds
        self._unpaid_invoice: int | None = None
        self._plots: list[Plot] = []
        self._scene = self._observer.look(())

    def perform(self) -> Performance:
        """Judges what was seen. Raises DemoFailed where it cannot go on, TooSlow with other days."""
        self._start("started: celery worker (prefork, 2 children) and celery beat")
        self._pace.check_boot(self._boot_seconds())
        ada = self._send()
        self._wait_for(self._all_sleep, "every task sleeps")
        self._watch(self._pause())
        self._wait_for(is_quiet, "no task runs")
        self._check_day(LAST_DAY_TO_KILL, "sending")
        dark = self._kill_and_restart(ada)
        self._check_day(LAST_DAY_TO_BE_BACK, "the restart")
        self._wait_for(self._all_over, "every task is over")
        self._watch(LOOK_SECONDS)
        return Performance(self._scene, dark, judge(self._scene, tuple(self._plots), dark))

    def kill_all(self) -> None:
        """Kills each of them, also when it fails for one."""
        with ExitStack() as stack:
            for process in self._processes:
                stack.callback(process.kill)

    def last_log_lines(self) -> list[str]:
        lines = []
        for process in self._processes:
            lines.append(f"last lines of the log of {process.name}:")
            lines += [f"  {text}" for text in process.last_log_lines()]
        return lines

    def _start(self, text: str) -> None:
        """Only what a start takes as a rule counts for the limit of the whole."""
        began_at = time.monotonic()
        for process in self._processes:
            process.start()
        self._screen.say(text)
        long_at = began_at + LONG_BOOT_SECONDS
        limit = began_at + MAX_BOOT_SECONDS
        while not self._wait_until(self._all_ready, min(limit, long_at)):
            if time.monotonic() > limit:
                raise DemoFailed(f"worker and beat are not ready {MAX_BOOT_SECONDS:.0f} s after their start")
            self._screen.say(f"worker and beat still start, {time.monotonic() - began_at:.0f} s by now")
            long_at += LONG_BOOT_SECONDS
        self._deadline += max(0.0, time.monotonic() - began_at - USUAL_BOOT_SECONDS)

    def _boot_seconds(self) -> float:
        return max(process.boot_seconds for process in self._processes)

    def _check_day(self, limit: float, what: str) -> None:
        self._pace.check_day(self._scene.day(time.time()), limit, what)

    def _send(self) -> int:
        ada = self._onboard("Ada", pays=True)
        grace = self._onboard("Grace", pays=False)
        self._collect(grace)
        self._screen.say("sent: two onboardings (sleep of three days), one invoice to collect")
        return ada

    def _onboard(self, name: str, *, pays: bool) -> int:
        customer = shop.sign_up(name, f"{name.lower()}@example.org")
        first = Sleep(seconds=days(3).total_seconds())
        if pays:
            plot = Plot(f"onboard {name}", "customer", ("welcome", "paid?"), (first,))
        else:
            second = Sleep(until=shop.trial_end(customer).timestamp())
            actions = ("welcome", "paid?", "last call")
            plot = Plot(f"onboard {name}", "lapsed", actions, (first, second))
        self._follow(plot, f"customer {customer}", tasks.onboard.delay(customer))
        return customer

    def _collect(self, customer: int) -> None:
        invoice = shop.order(customer, cents=4_900)
        first, second, _ = (date.timestamp() for date in shop.reminder_dates(invoice))
        actions = (FIRST_REMINDER, "reminder #2 not needed")
        sleeps = (Sleep(until=first), Sleep(until=second))
        plot = Plot(INVOICE, "paid after 1 reminder(s)", actions, sleeps)
        self._follow(plot, f"invoice {invoice}", tasks.collect_payment.delay(invoice))
        self._unpaid_invoice = invoice

    def _follow(self, plot: Plot, subject: str, result: Any) -> None:
        self._plots.append(plot)
        self._observer.follow(plot.title, subject, result)

    def _kill_and_restart(self, ada: int) -> Dark:
        killed_at, killed = self._kill()
        shop.subscribe(ada)
        self._screen.say("meanwhile, with nobody there to see it: Ada pays")
        self._watch(self._pause())
        states = tuple(story.state for story in self._scene.stories)
        self._screen.say(f"the results say: {', '.join(states)}")
        ids = {story.task_id for story in self._scene.stories}
        rows, in_broker = sleeping_rows(ids), messages(ids)
        self._screen.say(f"kept: {rows} rows in the database, {in_broker} messages in the broker")
        dark = Dark(killed_at, time.time(), states, killed, rows, in_broker)
        self._start("started again: celery worker and celery beat")
        return dark

    def _pause(self) -> float:
        """How long to watch before the kill, and in the dark, to be up again in mid-sleep."""
        spare = days(3).total_seconds() - self._boot_seconds()
        return min(MAX_WATCH_SECONDS, max(MIN_WATCH_SECONDS, spare / 4))

    def _kill(self) -> tuple[float, int]:
        """When it was done, and to how many processes."""
        victims = {process.name: process.kill() for process in self._processes}
        killed_at = time.time()
        text = ", ".join(f"{name} {' '.join(map(str, pids))}" for name, pids in victims.items())
        self._screen.say(f"kill -9: {text}; no process of theirs is left", "bad")
        return killed_at, sum(map(len, victims.values()))

    def _all_ready(self) -> bool:
        # Each is asked, also behind one that is not ready: asking is what takes down the time.
        return sum(process.is_ready() for process in self._processes) == len(self._processes)

    def _all_sleep(self) -> bool:
        for story in self._scene.stories:
            if story.is_over:
                raise DemoFailed(f"{story.title} did not sleep: {story.state}, {story.result!r}")
        return all(story.state == "SLEEPING" for story in self._scene.stories)

    def _all_over(self) -> bool:
        return all(story.is_over for story in self._scene.stories)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not self._wait_until(condition, self._deadline):
            limit = f"{self._pace.max_seconds:.0f} s (without slow starts)"
            raise DemoFailed(f"it did not happen within {limit} that {what}")

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        self._look()
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
            self._look()
        return True

    def _watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._wait_for(lambda: time.monotonic() >= until, "time passes")

    def _look(self) -> None:
        self._check_exits()
        uptimes = (life for process in self._processes for life in process.lives)
        scene = self._observer.look(uptimes)
        for text in news(self._scene, scene):
            self._screen.say(text)
        self._scene = scene
        self._pay_when_reminded(scene.stories)
        self._screen.draw(scene)

    def _pay_when_reminded(self, stories: Iterable[Story]) -> None:
        reminded = any(story.title == INVOICE and story.action_counts[FIRST_REMINDER] for story in stories)
        if reminded and self._unpaid_invoice is not None:
            shop.settle(self._unpaid_invoice)
            self._unpaid_invoice = None
            self._screen.say("the invoice is paid, after its first reminder")

    def _check_exits(self) -> None:
        for process in self._processes:
            code = process.exit_code()
            if code is not None:
                raise DemoFailed(f"{process.name} ended by itself, exit code {code}")
