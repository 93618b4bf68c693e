"""What a test holds in its hand: durable time, and everything that becomes due in it."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

from celery_durable.clock import standing_in
from celery_durable.durations import Number
from celery_durable.errors import ExecutionNotFound
from celery_durable.points import striking
from celery_durable.testing.broker import Broker
from celery_durable.testing.faults import Faults
from celery_durable.testing.isolation import isolated
from celery_durable.testing.journal import Journal
from celery_durable.testing.replaying import Replayed, replay
from celery_durable.testing.timeline import Timeline, beginning
from celery_durable.testing.worker import InProcessWorker, Sent

#: Runs at one instant after which something is taken to go round in circles, and steps of ``finish``.
MOST_RUNS = 10_000


class DurableClock:
    """The durable time of one test; the fixture ``durable_clock``.

    It stands still until ``advance`` or ``move_to`` moves it. Tasks run in the calling thread, one after
    the other, in the order in which they are due.
    """

    def __init__(self, app: Any, config: dict[str, Any] | None = None) -> None:
        self.app = app
        self._config = config or {}
        self._timeline = Timeline(beginning())
        #: What is to go wrong; ``crash_at`` and ``lose_lease`` order it.
        self.faults = Faults()
        self._stack = ExitStack()
        self._worker: InProcessWorker = None  # type: ignore[assignment] # while it is open
        self._dispatcher: Any = None

    def __enter__(self) -> DurableClock:
        with ExitStack() as stack:
            stack.enter_context(standing_in(self._timeline))
            stack.enter_context(striking(self.faults))
            broker: Broker = stack.enter_context(
                isolated(self.app, self._timeline, self.faults, self._config)
            )
            self._worker = InProcessWorker(self.app, broker, self.faults, self.now)
            stack.callback(self._worker.close)
            self.app.durable.worker = self._worker.side
            self._dispatcher = self.app.durable.dispatcher()
            stack.callback(self._dispatcher.close)
            backend = self.app.backend
            backend.run_due, backend.explain = self.drain, self._explain
            backend.may_write = self.faults.may_write
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if error[0] is None and (unreached := self.faults.why_unreached()):
            raise AssertionError(unreached)

    # -- time ------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The durable time: aware, in UTC. ``app.now()`` says the same in the app's timezone."""
        return self._timeline.now

    def advance(self, duration: timedelta | Number | None = None, **units: float) -> int:
        """Move time on, and run everything that becomes due on the way, each at its time.

        ``advance(days=3)``, ``advance(timedelta(hours=2))``, ``advance(90)``. Returns how many runs it were.
        """
        if (duration is None) == (not units):
            raise TypeError("advance() needs either a duration, or units such as days=3")
        if duration is None:
            duration = timedelta(**units)
        if not isinstance(duration, timedelta):
            duration = timedelta(seconds=float(duration))
        if duration < timedelta(0):
            raise ValueError(f"time does not go back: {duration}")
        return self.move_to(self.now() + duration)

    def move_to(self, when: datetime) -> int:
        """As ``advance``, to an instant; a naive one is read in the app's timezone."""
        self._stay_outside("move time")
        until = self.app.durable.instant_of(when)
        runs, due = self._run_due()
        while due is not None and due <= until:
            self._timeline.move_to(due)
            more, due = self._run_due()
            runs += more
        self._timeline.move_to(until)
        return runs

    def drain(self) -> int:
        """Run what is due now, until nothing is. Returns how many runs there were."""
        runs, _ = self._run_due()
        return runs

    def _run_due(self) -> tuple[int, datetime | None]:
        """Run what is due now. Returns how many runs there were, and when something is due again."""
        runs = 0
        while True:
            while self._worker.run_next():
                runs += 1
                if runs >= MOST_RUNS:
                    raise RuntimeError(
                        f"{runs} runs, and still something is due now: does a task send itself again?"
                    )
            due = self._next_due()
            if due is None or due > self.now():
                return runs, due
            self._dispatch()

    def finish(self, result: Any) -> Any:
        """Move time from due time to due time until a task has ended. Returns its result, or raises it."""
        self._stay_outside("move time")
        task_id = str(getattr(result, "id", result))
        outcome = self.app.AsyncResult(task_id)
        _, due = self._run_due()
        for _ in range(MOST_RUNS):
            if due is None or outcome.ready():
                break
            self._timeline.move_to(due)
            _, due = self._run_due()
        return outcome.get()

    def _stay_outside(self, what: str) -> None:
        if self.faults.is_busy:
            raise RuntimeError(f"a task cannot {what}: do it in the test")

    def _next_due(self) -> datetime | None:
        found = [self.app.durable.store.due.poll().wake_at, self._worker.next_eta]
        return min((due for due in found if due is not None), default=None)

    def _dispatch(self) -> None:
        """What a scheduler does."""
        count = None
        with self.faults.process():
            count = self._dispatcher.run_once()
        if count == 0:
            raise RuntimeError("what is due could not be sent: see the log")

    # -- what goes wrong -------------------------------------------------------------------------

    @property
    def propagate(self) -> bool:
        """Whether ``drain`` and ``advance`` raise what a task raises. Its result is failed all the same."""
        return self._worker.propagates

    @propagate.setter
    def propagate(self, value: bool) -> None:
        self._worker.propagates = value

    def crash_at(self, point: str, *, nth: int = 1) -> None:
        """Let the next run that comes to a crash point die there, as by ``kill -9`` of its worker.

        Nothing is settled: the task comes back when its lease has run out, and a crash is counted. ``nth``:
        not the next time that the point is reached, but this one.

        Raises ValueError for a point that there is not. The test fails if no run gets there.
        """
        self.faults.crash_at(point, nth)

    def lose_lease(self, *, at: str | None = None) -> None:
        """Take the lease from the run that this is called in; called by the test: from the next run.

        ``at`` names a crash point at which the next run loses it. The task is due again at once, for another
        run; what the first one still tries is refused (LeaseLost).
        """
        self.faults.lose_lease(at)

    # -- looking ---------------------------------------------------------------------------------

    @property
    def sent(self) -> list[Sent]:
        """Messages for tasks that the app does not know, in order. They are not run."""
        return list(self._worker.sent)

    def journal(self, result: Any) -> Journal:
        """The journal of a task as it stands. Takes its result or its id.

        Raises ExecutionNotFound.
        """
        return Journal.of(self.app, str(getattr(result, "id", result)))

    def load_journal(self, path: Any) -> Journal:
        """A journal from a file that ``Journal.save`` has written."""
        return Journal.load(path, self.app)

    def replay(self, task: Any, journal: Journal) -> Replayed:
        """Hold the code of a task against an old journal, up to the journal's end.

        Steps of the journal give back what they gave then, its sleeps are over; the first durable call after
        its end is not made, and nothing is sent.

        Raises ReplayDivergence, or an AssertionError where the body ends before the journal does.
        """
        return replay(task, journal)

    def _explain(self, task_id: str) -> str:
        """Why a result is not there."""
        try:
            found = self.app.durable.get(task_id)
        except ExecutionNotFound:
            return f"task {task_id} has no result: it was not sent, has not run yet, or ignores its result"
        words = f"{found.task_name}[{task_id}] has no result, it is {found.status}"
        if found.wake_at is None:
            return words
        now = self.app.now()
        due = found.wake_at.astimezone(now.tzinfo)
        return f"{words} until {due}; durable time is {now}. Move it: durable_clock.advance()"
