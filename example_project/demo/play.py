"""The play itself: send, sleep, kill -9, darkness, restart, wake."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from example_project import shop, tasks
from example_project.days import DAY_SECONDS, days
from example_project.demo.news import news
from example_project.demo.observer import Observer
from example_project.demo.processes import beat, worker
from example_project.demo.scene import Scene
from example_project.demo.screen import Screen
from example_project.demo.verdict import Check, Dark, Plot, Sleep, judge

LOOK_SECONDS = 0.15
MIN_WATCH_SECONDS, MAX_WATCH_SECONDS = 0.7, 1.5
MAX_SECONDS = 57.0


class DemoFailed(Exception):
    """The play could not go on; the message says what did not happen."""


class Play:
    """One performance, in the working directory; every process that it starts ends with it."""

    def __init__(self, screen: Screen, worker_options: tuple[str, ...]) -> None:
        self._screen = screen
        self._observer = Observer(DAY_SECONDS)
        env = dict(os.environ)
        self._processes = (worker(env, worker_options), beat(env))
        self._deadline = time.monotonic() + MAX_SECONDS
        self._incidents: list[tuple[float, Callable[[], None], str]] = []
        self._plots: list[Plot] = []
        self._scene = self._observer.look(())

    def perform(self) -> tuple[Scene, list[Check]]:
        """Raises DemoFailed where it cannot go on; else judges what was seen."""
        self._start()
        ada = self._send()
        self._wait_for(self._all_sleep, "every task sleeps")
        self._watch(self._pause())
        dark = self._kill_and_restart(ada)
        self._wait_for(self._all_over, "every task is over")
        self._watch(LOOK_SECONDS)
        return self._scene, judge(self._scene, tuple(self._plots), dark)

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

    def _start(self) -> None:
        for process in self._processes:
            process.start()
        self._screen.say("started: celery worker (prefork, 2 children) and celery beat")
        self._wait_for(self._all_ready, "worker and beat are ready")

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
        actions = ("reminder #1", "reminder #2 not needed")
        sleeps = (Sleep(until=first), Sleep(until=second))
        plot = Plot("collect invoice", "paid after 1 reminder(s)", actions, sleeps)
        self._follow(plot, f"invoice {invoice}", tasks.collect_payment.delay(invoice))
        halfway = (first + second) / 2
        self._incidents.append((halfway, lambda: shop.settle(invoice), "the invoice is paid"))

    def _follow(self, plot: Plot, subject: str, result: Any) -> None:
        self._plots.append(plot)
        self._observer.follow(plot.title, subject, result)

    def _kill_and_restart(self, ada: int) -> Dark:
        killed_at = self._kill()
        shop.subscribe(ada)
        self._screen.say("meanwhile, with nobody there to see it: Ada pays")
        self._watch(self._pause())
        states = tuple(story.state for story in self._scene.stories)
        self._screen.say(f"the results say: {', '.join(states)}")
        restarted_at = time.time()
        for process in self._processes:
            process.start()
        self._screen.say("started again: celery worker and celery beat")
        self._wait_for(self._all_ready, "worker and beat are ready again")
        return Dark(killed_at, restarted_at, states)

    def _pause(self) -> float:
        """How long to watch before the kill, and in the dark, to be up again in mid-sleep."""
        lives = [process.lives[0] for process in self._processes]
        boots = [life.ready_at - life.started_at for life in lives if life.ready_at is not None]
        spare = days(3).total_seconds() - max(boots, default=0.0)
        return min(MAX_WATCH_SECONDS, max(MIN_WATCH_SECONDS, spare / 4))

    def _kill(self) -> float:
        victims = {process.name: process.kill() for process in self._processes}
        killed_at = time.time()
        text = ", ".join(f"{name} {' '.join(map(str, pids))}" for name, pids in victims.items())
        self._screen.say(f"kill -9: {text}; no process of theirs is left", "bad")
        return killed_at

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
        self._look()
        while not condition():
            if time.monotonic() > self._deadline:
                raise DemoFailed(f"it did not happen within {MAX_SECONDS:.0f} s that {what}")
            time.sleep(LOOK_SECONDS)
            self._look()

    def _watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._wait_for(lambda: time.monotonic() >= until, "time passes")

    def _look(self) -> None:
        self._let_happen()
        self._check_exits()
        uptimes = (life for process in self._processes for life in process.lives)
        scene = self._observer.look(uptimes)
        for text in news(self._scene, scene):
            self._screen.say(text)
        self._scene = scene
        self._screen.draw(scene)

    def _let_happen(self) -> None:
        now = time.time()
        for incident in [incident for incident in self._incidents if incident[0] <= now]:
            self._incidents.remove(incident)
            _, happen, text = incident
            happen()
            self._screen.say(text)

    def _check_exits(self) -> None:
        for process in self._processes:
            code = process.exit_code()
            if code is not None:
                raise DemoFailed(f"{process.name} ended by itself, exit code {code}")
