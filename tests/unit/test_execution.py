"""One run's durable calls: what is replayed, what is written and when, and what ends the body."""

from __future__ import annotations

import functools
import logging
import threading
from datetime import datetime, timedelta, timezone
from unittest.mock import MagicMock

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import EncodeError

from celery_durable.clock import HeardTime
from celery_durable.codec import Codec
from celery_durable.errors import (
    LeaseInterrupt,
    LeaseLost,
    LeaseRenewalTimedOut,
    NotDurable,
    Park,
    PayloadTooLarge,
    ReplayDivergence,
    StepFailed,
    StepLimitExceeded,
    StoreUnavailable,
)
from celery_durable.execution import EagerExecution, Execution, step_name
from celery_durable.lease import EternalLease, Lease
from celery_durable.records import Claim, JournalEntry, Kind, LeaseKey, Status
from celery_durable.replay import timer_id
from tests.unit.fakes import StillClock

KEY = LeaseKey("id", "owner", 1)
EPOCH = datetime(2030, 1, 1, tzinfo=timezone.utc)
CODEC = Codec("json", limit=200)
YEAR = 365 * 86_400


class World:
    """A database with a clock, a result store, a heartbeat; it notes what is asked of it, in order."""

    def __init__(self, clock):
        self.clock = clock
        self.skew = timedelta(days=-1)  # the database's clock has nothing to do with ours
        self.events = []
        self.journal = []
        self.away_until = None
        self.is_refusing = False
        self.delay = 0.0

    def now(self):
        self._answer("now")
        return self.time

    @property
    def time(self):
        return EPOCH + timedelta(seconds=self.clock.now) + self.skew

    def record(self, key, entries):
        self._answer("record", len(entries))
        if self.is_refusing:
            return False
        self.journal.extend(entries)
        return True

    def record_sleep(self, key, entries, due):
        self._answer("record_sleep", due.at - self.time)
        if self.is_refusing:
            return None
        self.journal.extend(entries)
        return due.at

    def park(self, key, due, *, entries):
        self._answer("park", due.at - self.time)
        if self.is_refusing:
            return None
        self.journal.extend(entries)
        return due.at

    def going_to_sleep(self, due_at, name, timer):
        self.events.append(("SLEEPING", due_at, name, timer))

    def parked(self, due_at, name, now):
        self.events.append(("parked", name))

    def refused(self):
        self.events.append(("refused",))

    def stop_heartbeat(self):
        self.events.append(("heartbeat stopped",))

    def _answer(self, what, *details):
        self.clock.now += self.delay
        if self.away_until is not None and self.clock.now < self.away_until:
            self.events.append(("away", what))
            raise StoreUnavailable("it is away")
        self.events.append((what, *details))

    def count(self, *names):
        return sum(event[0] in names for event in self.events)

    @property
    def kinds(self):
        return [(entry.position, entry.kind, entry.name) for entry in self.journal]


@pytest.fixture
def clock():
    return StillClock()


@pytest.fixture
def world(clock):
    return World(clock)


@pytest.fixture
def run(clock, world):
    """Makes a run over a journal; its claim was answered at once."""

    def begin(*entries, step_limit=100, asked_at=None):
        asked_at = clock.now if asked_at is None else asked_at
        lease = Lease(KEY, 60, 10, sent_at=asked_at, clock=clock)
        claim = Claim(KEY, Status.RUNNING, None, entries, 0, False, world.time, asked_at)
        return Execution(
            "proj.task",
            claim,
            lease,
            runs=world,
            codec=CODEC,
            announcer=world,
            step_limit=step_limit,
            asked_at=asked_at,
            now=world.now,
            stop_heartbeat=world.stop_heartbeat,
            clock=clock,
        )

    return begin


def entry(position, kind, name="", *, value=None, due_at=None, is_over=False):
    payload = CODEC.encode(value)
    return JournalEntry(
        position,
        kind,
        name,
        timer_id("id", position),
        due_at,
        is_over,
        payload.data,
        payload.content_type,
        payload.content_encoding,
    )


def failed(position, name, error):
    payload, _ = CODEC.encode_exception(error)
    return JournalEntry(
        position, Kind.ERROR, name, timer_id("id", position), None, False, payload.data, payload.content_type
    )


calls = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def pay(*args, **kwargs):
    calls.append(("pay", args, kwargs))
    return len(calls)


def fail(message="no"):
    calls.append(("fail", message))
    raise ValueError(message)


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.report("step-once")
def test_a_fresh_step_runs_and_is_journaled(run, world):
    assert run().step(pay, (1,), {"y": 2}) == 1

    assert calls == [("pay", (1,), {"y": 2})]
    assert world.kinds == [(1, Kind.STEP, "pay")]
    assert world.journal[0].payload == b"1"


@pytest.mark.report("step-once")
def test_a_journaled_step_returns_its_result_and_runs_zero_times(run, world):
    execution = run(entry(1, Kind.STEP, "pay", value={"a": [1]}))

    assert execution.step(pay, (), {}) == {"a": [1]}
    assert (calls, world.events) == ([], [])


def test_the_first_run_sees_the_result_as_every_replay_will(run):
    assert run().step(lambda: {1: (2, 3)}, (), {}) == {"1": [2, 3]}


def test_results_are_not_shared_with_the_body(run, world):
    execution = run(entry(1, Kind.STEP, "pay", value=[1]))
    execution.step(pay, (), {}).append(2)

    assert execution.journal.recorded().payload == b"[1]"


def test_positions_are_counted_in_program_order_whatever_the_kind(run, world):
    execution = run()
    for _ in range(2):
        execution.step(pay, (), {})
        execution.sleep(0, None)

    assert world.kinds == [(1, "step", "pay"), (2, "sleep", ""), (3, "step", "pay"), (4, "sleep", "")]


@pytest.mark.report("step-once")
def test_a_step_that_raises_leaves_nothing_behind_as_long_as_nobody_handles_it(run, world):
    execution = run()
    with pytest.raises(ValueError, match="no"):
        execution.step(fail, (), {})

    assert world.events == []


def test_a_failure_that_was_handled_is_journaled_with_the_next_step_in_one_call(run, world):
    execution = run()
    with pytest.raises(ValueError, match="no"):
        execution.step(fail, (), {})
    execution.step(pay, (), {})

    assert world.kinds == [(1, "error", "fail"), (2, "step", "pay")]
    assert world.events == [("record", 2)]
    assert execution.unwritten == []


@pytest.mark.parametrize("seconds", [0, 0.5, 60])
def test_a_failure_that_was_handled_is_journaled_with_the_next_sleep_in_one_call(run, world, seconds):
    execution = run()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            execution.step(fail, (), {})
    with_park(execution, seconds)

    assert world.kinds == [(1, "error", "fail"), (2, "error", "fail"), (3, "sleep", "")]
    assert world.count("record", "record_sleep", "park") == 1


def with_park(execution, seconds, name=None):
    if seconds >= 1:
        with pytest.raises(Park):
            execution.sleep(seconds, name)
    else:
        execution.sleep(seconds, name)


def test_a_failure_that_is_handled_by_the_return_is_kept_for_the_end(run, world):
    execution = run()
    with pytest.raises(ValueError, match="no"):
        execution.step(fail, (), {})

    assert [(item.position, item.kind, item.name) for item in execution.unwritten] == [(1, "error", "fail")]


def test_a_journaled_failure_is_raised_again_and_the_step_runs_zero_times(run):
    execution = run(failed(1, "fail", ValueError("no")))

    with pytest.raises(ValueError, match=r"^no$"):
        execution.step(fail, (), {})
    assert calls == []


class Picky(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one}-{two}")


def refuse():
    raise Picky(1, 2)


def test_a_failure_that_cannot_be_rebuilt_is_step_failed_on_the_first_run_too(run, world):
    execution = run()
    with pytest.raises(StepFailed, match="Picky: 1-2") as first:
        execution.step(refuse, (), {})
    assert isinstance(first.value.__cause__, Picky)
    execution.sleep(0, None)

    with pytest.raises(StepFailed) as again:
        run(*world.journal).step(refuse, (), {})
    assert again.value.args == first.value.args


@pytest.mark.report("limits")
def test_a_result_over_the_limit_is_refused_before_anything_is_written(run, world):
    execution = run()
    with pytest.raises(PayloadTooLarge, match="takes 203 bytes, over the limit of 200"):
        execution.step(lambda: "x" * 201, (), {})

    assert world.events == []


def test_a_result_that_cannot_be_encoded_is_refused_before_anything_is_written(run, world):
    execution = run()
    with pytest.raises(EncodeError):
        execution.step(object, (), {})

    assert world.events == []


@pytest.mark.parametrize("result", [lambda: "x" * 201, object])
def test_a_refused_result_that_the_body_handles_is_refused_again_on_replay_without_running(
    run, world, result
):
    execution = run()
    with pytest.raises((PayloadTooLarge, EncodeError)) as first:
        execution.step(result, (), {})
    execution.step(pay, (), {})

    with pytest.raises(type(first.value)) as again:
        run(*world.journal).step(result, (), {})
    assert str(again.value) == str(first.value)


@pytest.mark.parametrize(
    "control",
    [Ignore("x"), Reject("x"), Retry("x"), LeaseLost("id", 1, "x"), LeaseInterrupt(), SystemExit(1)],
)
def test_what_is_control_and_no_result_passes_through_a_step_unrecorded(run, world, control):
    def interrupted():
        raise control

    execution = run()
    with pytest.raises(type(control)):
        execution.step(interrupted, (), {})

    assert execution.unwritten == []
    assert world.events == []


def test_after_an_interrupt_that_was_swallowed_the_next_call_is_no_nested_one(run):
    def interrupted():
        raise LeaseInterrupt

    execution = run()
    with pytest.raises(LeaseInterrupt):
        execution.step(interrupted, (), {})

    assert execution.step(pay, (), {}) == 1


# -- names -----------------------------------------------------------------------------------------


class Client:
    def charge(self):
        return 1

    def __call__(self):
        return 2


def test_a_step_is_named_after_what_it_calls():
    app = Celery("proj", set_as_current=False)
    task = app.task(name="proj.named", shared=False)(pay)

    assert step_name(pay) == "pay"
    assert step_name(Client().charge) == "Client.charge"
    assert step_name(functools.partial(functools.partial(pay, 1), 2)) == "pay"
    assert step_name(Client()) == "Client"
    assert step_name(task) == step_name(task.s()) == "proj.named"
    assert step_name(len) == "len"
    assert step_name(MagicMock()) == "MagicMock"


# -- divergence ------------------------------------------------------------------------------------


@pytest.mark.report("divergence")
@pytest.mark.parametrize(
    ("journaled", "call", "words"),
    [
        (entry(1, Kind.STEP, "refund"), "step", "journaled was step 'refund', the code asked for step 'pay'"),
        (entry(1, Kind.SLEEP, "nap"), "step", "journaled was sleep 'nap', the code asked for step 'pay'"),
        (
            failed(1, "refund", ValueError()),
            "step",
            "journaled was step 'refund', the code asked for step 'pay'",
        ),
        (entry(1, Kind.STEP, "pay"), "sleep", "journaled was step 'pay', the code asked for sleep"),
        (entry(1, Kind.SLEEP, "nap", is_over=True), "sleep", "journaled was sleep 'nap', the code asked for"),
    ],
)
def test_another_kind_or_name_than_the_journaled_one_is_a_divergence_that_names_both(
    run, world, journaled, call, words
):
    execution = run(journaled)

    with pytest.raises(ReplayDivergence, match=words) as diverged:
        execution.step(pay, (), {}) if call == "step" else execution.sleep(60, None)

    assert (diverged.value.task_name, diverged.value.task_id, diverged.value.position) == (
        "proj.task",
        "id",
        1,
    )
    assert (calls, world.events) == ([], [])


def test_a_divergence_that_was_swallowed_comes_again_at_every_call(run, world):
    execution = run(entry(1, Kind.STEP, "refund"), entry(2, Kind.STEP, "pay"))
    with pytest.raises(ReplayDivergence) as first:
        execution.step(pay, (), {})

    for again in (lambda: execution.step(pay, (), {}), lambda: execution.sleep(60, None)):
        with pytest.raises(ReplayDivergence) as later:
            again()
        assert later.value is first.value
    assert world.events == []


def test_a_sleep_without_a_name_fits_one_without_a_name(run):
    run(entry(1, Kind.SLEEP, "", is_over=True)).sleep(60, None)
    run(entry(1, Kind.SLEEP, "nap", is_over=True)).sleep_until(EPOCH, "nap")


# -- where no durable call may be made -------------------------------------------------------------


@pytest.mark.parametrize("call", ["step()", "sleep()", "sleep_until()"])
def test_a_durable_call_inside_a_step_is_refused(run, world, call):
    execution = run()
    inner = {
        "step()": lambda: execution.step(pay, (), {}),
        "sleep()": lambda: execution.sleep(1, None),
        "sleep_until()": lambda: execution.sleep_until(EPOCH, None),
    }[call]

    with pytest.raises(NotDurable) as refused:
        execution.step(inner, (), {})

    assert (refused.value.call, refused.value.place) == (call, "inside a step")
    assert execution.journal.position == 1
    assert world.events == []


def test_a_durable_call_from_another_thread_is_refused_and_takes_no_position(run, world):
    execution = run()
    raised = []

    def elsewhere():
        for call in (lambda: execution.step(pay, (), {}), lambda: execution.sleep(60, None)):
            try:
                call()
            except NotDurable as error:
                raised.append(error.place)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()

    assert raised == ["in another thread"] * 2
    assert execution.journal.position == 0
    assert world.events == []


@pytest.mark.report("limits")
def test_at_the_step_limit_a_call_is_allowed_and_one_past_it_refused(run, world):
    execution = run(step_limit=3)
    execution.step(pay, (), {})
    execution.sleep(0, None)
    execution.step(pay, (), {})

    for call in (lambda: execution.step(pay, (), {}), lambda: execution.sleep(60, None)):
        with pytest.raises(StepLimitExceeded, match="journaled 3 entries"):
            call()
    assert len(calls) == 2
    assert world.count("record", "record_sleep", "park") == 3


def test_a_failed_step_takes_a_place_below_the_limit_too(run):
    execution = run(step_limit=1)
    with pytest.raises(ValueError, match="no"):
        execution.step(fail, (), {})

    with pytest.raises(StepLimitExceeded):
        execution.step(pay, (), {})


# -- long sleeps -----------------------------------------------------------------------------------


def test_a_long_sleep_is_announced_written_and_then_leaves_the_body(run, world):
    execution = run()
    due_at = world.time + timedelta(days=3)

    with pytest.raises(Park):
        execution.sleep(3 * 86_400, "trial")

    assert world.events == [
        ("SLEEPING", due_at, "trial", timer_id("id", 1)),
        ("park", timedelta(days=3)),
        ("heartbeat stopped",),
        ("parked", "trial"),
    ]
    assert world.kinds == [(1, "sleep", "trial")]
    assert execution.is_parked


def test_a_park_is_no_exception_that_a_body_could_swallow_by_accident():
    assert not issubclass(Park, Exception)


def test_a_park_that_was_swallowed_all_the_same_is_found_out_at_the_next_call(run, world):
    execution = run()
    with pytest.raises(Park):
        execution.sleep(60, None)
    before = list(world.events)

    for call in (lambda: execution.step(pay, (), {}), lambda: execution.sleep(60, None), execution.go_on):
        with pytest.raises(Park):
            call()
    assert world.events == before
    assert calls == []


@pytest.mark.report("overdue-returns-at-once")
def test_a_sleep_that_is_over_returns_at_once_and_asks_nobody(run, world):
    long_ago = EPOCH - timedelta(days=9)
    execution = run(entry(1, Kind.SLEEP, due_at=long_ago, is_over=True))

    execution.sleep(YEAR, None)  # whatever its argument says now

    assert world.events == []


@pytest.mark.report("stored-time-wins")
@pytest.mark.parametrize("argument", [5 * YEAR, 1, 0])
def test_a_sleep_that_is_not_over_parks_again_with_its_stored_due_time(run, world, argument):
    due_at = world.time + timedelta(hours=2)
    execution = run(entry(1, Kind.SLEEP, due_at=due_at))

    with pytest.raises(Park):
        execution.sleep(argument, None)

    assert world.events[0][:2] == ("SLEEPING", due_at)
    assert world.events[1] == ("park", timedelta(hours=2))
    assert world.journal == []  # it is journaled already


@pytest.mark.report("stored-time-wins")
@pytest.mark.parametrize("hours", [-9, 1, 9])
def test_sleep_until_another_instant_keeps_the_stored_one(run, world, hours):
    due_at = world.time + timedelta(hours=2)
    execution = run(entry(1, Kind.SLEEP, due_at=due_at))

    with pytest.raises(Park):
        execution.sleep_until(world.time + timedelta(hours=hours), None)

    assert world.events[1] == ("park", timedelta(hours=2))


def test_a_park_that_is_refused_ends_the_run_as_lost(run, world):
    world.is_refusing = True
    execution = run()

    with pytest.raises(LeaseLost):
        execution.sleep(60, None)

    assert world.events[-1] == ("refused",)
    assert not execution.is_parked
    assert execution.lease.lost
    with pytest.raises(LeaseLost):
        execution.step(pay, (), {})


def test_a_lease_that_was_lost_while_the_state_was_stored_is_not_parked(run, world):
    execution = run()
    world.going_to_sleep = lambda *_: execution.lease.mark_lost("it was taken")

    with pytest.raises(LeaseLost, match="it was taken"):
        execution.sleep(60, None)

    assert world.count("park") == 0


def test_what_a_renewal_hears_while_the_park_is_written_is_no_loss(run, world):
    execution = run()
    stored = world.park

    def park(*args, **kwargs):
        due_at = stored(*args, **kwargs)
        assert not execution.lease.mark_lost("the row has no owner now")
        return due_at

    world.park = park
    with pytest.raises(Park):
        execution.sleep(60, None)
    assert not execution.lease.lost


# -- short sleeps ----------------------------------------------------------------------------------


def test_a_short_sleep_is_journaled_and_slept_in_place(run, world, clock):
    execution = run()
    began = clock.now

    execution.sleep(0.5, "blink")

    assert world.events == [("record_sleep", timedelta(seconds=0.5))]
    assert world.kinds == [(1, "sleep", "blink")]
    assert clock.now - began == pytest.approx(0.5)
    assert not execution.is_parked


@pytest.mark.parametrize("call", ["sleep", "sleep_until"])
def test_what_is_over_already_is_journaled_and_takes_no_time(run, world, clock, call):
    execution = run()
    if call == "sleep":
        execution.sleep(0, None)
    else:
        execution.sleep_until(EPOCH - timedelta(days=9_999), None)

    assert world.kinds == [(1, "sleep", "")]
    assert clock.waits == []


def test_a_short_sleep_ends_at_once_when_the_lease_is_lost(run, world, clock):
    execution = run()
    real_wait = clock.wait

    def wait(event, seconds):
        if event is execution.lease.lost_event:
            execution.lease.mark_lost("it was taken")
        return real_wait(event, seconds)

    clock.wait = wait
    began = clock.now
    with pytest.raises(LeaseLost, match="it was taken"):
        execution.sleep(0.9, None)
    assert clock.now == began


def test_a_short_sleep_does_not_outlive_the_lease(run, world, clock):
    execution = run()
    clock.now = execution.lease.deadline - 0.2

    with pytest.raises(LeaseRenewalTimedOut):
        execution.sleep(0.9, None)
    assert clock.now == pytest.approx(execution.lease.deadline)


def test_a_short_sleep_that_is_refused_ends_the_run_as_lost(run, world, clock):
    world.is_refusing = True
    execution = run()

    with pytest.raises(LeaseLost):
        execution.sleep(0.5, None)
    assert clock.waits == []


def test_the_rest_of_a_journaled_sleep_is_slept_in_place_when_it_is_short(run, world, clock):
    execution = run(entry(1, Kind.SLEEP, due_at=world.time + timedelta(seconds=0.5)))

    execution.sleep(YEAR, None)

    assert world.events == []
    assert sum(clock.waits) == pytest.approx(0.5)


# -- never early, by the database's clock ------------------------------------------------------------


def test_of_a_time_that_was_heard_the_two_readings_lie_around_the_truth():
    heard = HeardTime(EPOCH, asked_at=10, answered_at=12)

    assert heard.at_most(13) == EPOCH + timedelta(seconds=3)
    assert heard.at_least(13) == EPOCH + timedelta(seconds=1)
    assert (heard.blur, heard.age(13)) == (2, 1)


@pytest.mark.report("moved-clock")
@pytest.mark.parametrize("claim_took", [0.01, 0.2, 3, 40])
@pytest.mark.parametrize("answer_takes", [0, 0.2])
@pytest.mark.parametrize("seconds", [0.3, 0.9, 60])
def test_a_sleep_is_never_shorter_than_asked_however_slow_the_database_is(
    run, world, clock, claim_took, answer_takes, seconds
):
    """The claim's time was read when it was sent, answered or anywhere between; only its sum is known."""
    began = world.time
    for read_at in (0, claim_took):
        claim_asked_at = clock.now - claim_took
        world.skew += timedelta(seconds=read_at - claim_took)
        execution = run(asked_at=claim_asked_at)
        world.skew -= timedelta(seconds=read_at - claim_took)
        execution.lease.renewed(clock.now)
        world.delay = answer_takes
        began = world.time
        try:
            execution.sleep(seconds, None)
        except Park:
            assert world.events[-3][1] + (world.time - began) >= timedelta(seconds=seconds)
        else:
            assert world.time - began >= timedelta(seconds=seconds)
        world.delay = 0


@pytest.mark.parametrize("claim_took", [0.2, 3, 40])
def test_sleep_until_never_ends_before_its_instant_however_slow_the_claim_was(run, world, clock, claim_took):
    execution = run(asked_at=clock.now - claim_took)
    execution.lease.renewed(clock.now)
    until = world.time + timedelta(seconds=0.5)

    execution.sleep_until(until, None)

    assert world.time >= until


@pytest.mark.parametrize("claim_took", [0.2, 3, 40])
def test_the_rest_of_a_journaled_sleep_never_ends_early_however_slow_the_claim_was(
    run, world, clock, claim_took
):
    due_at = world.time + timedelta(seconds=0.7)
    execution = run(entry(1, Kind.SLEEP, due_at=due_at), asked_at=clock.now - claim_took)
    execution.lease.renewed(clock.now)

    execution.sleep(1, None)

    assert world.time >= due_at


def test_nobody_is_asked_for_the_time_within_seconds_of_a_quick_claim(run, world, clock):
    execution = run()
    for _ in range(10):
        clock.now += 0.4
        execution.sleep(0, None)

    assert world.count("now") == 0


def test_the_time_is_asked_for_again_when_it_has_not_been_heard_for_long(run, world, clock):
    execution = run()
    world.skew += timedelta(hours=1)  # somebody set the database's clock
    clock.now += 6

    with pytest.raises(Park):
        execution.sleep(60, None)

    assert world.count("now") == 1
    assert ("park", timedelta(seconds=60)) in world.events


# -- a database that is away -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "short sleep", "long sleep"])
def test_while_the_database_is_away_a_write_is_tried_again_under_the_lease(run, world, clock, call, caplog):
    """And the log has a line when it begins to wait, and one when it goes on."""
    caplog.set_level(logging.INFO, "celery_durable")
    execution = run()
    world.away_until = clock.now + 30
    perform = {
        "step": lambda: execution.step(pay, (), {}),
        "short sleep": lambda: execution.sleep(0.5, None),
        "long sleep": lambda: execution.sleep(3_600, None),
    }[call]

    if call == "long sleep":
        with pytest.raises(Park):
            perform()
    else:
        perform()

    assert 30 <= clock.now - 1_000 < 34
    assert world.count("record", "record_sleep", "park") == 1
    assert world.count("away") < 30  # it backs off
    told = [r.levelname for r in caplog.records if r.name == "celery_durable.execution"]
    assert told == ["WARNING", "INFO"]
    assert len(calls) == (1 if call == "step" else 0)


@pytest.mark.parametrize("call", ["step", "short sleep", "long sleep"])
def test_a_run_that_the_database_does_not_come_back_for_ends_by_itself_before_its_deadline(
    run, world, clock, call
):
    execution = run()
    world.away_until = clock.now + 1_000_000
    perform = {
        "step": lambda: execution.step(pay, (), {}),
        "short sleep": lambda: execution.sleep(0.5, None),
        "long sleep": lambda: execution.sleep(3_600, None),
    }[call]

    with pytest.raises(LeaseRenewalTimedOut):
        perform()

    assert clock.now <= execution.lease.deadline
    assert execution.lease.lost
    assert not execution.is_parked
    assert world.count("record", "record_sleep", "park") == 0


def test_a_write_is_tried_for_as_long_as_the_heartbeat_still_renews_the_lease(run, world, clock):
    execution = run()
    world.away_until = clock.now + 100
    real_wait = clock.wait

    def wait(event, seconds):
        execution.lease.renewed(clock.now)  # over a connection of its own
        return real_wait(event, seconds)

    clock.wait = wait
    assert execution.step(pay, (), {}) == 1


def test_a_loss_ends_the_trying_at_once(run, world, clock):
    execution = run()
    world.away_until = clock.now + 1_000_000
    real_wait = clock.wait

    def wait(event, seconds):
        execution.lease.mark_lost("it was taken")
        return real_wait(event, seconds)

    clock.wait = wait
    with pytest.raises(LeaseLost, match="it was taken"):
        execution.step(pay, (), {})
    assert world.count("away") == 1


def test_a_refused_step_ends_the_run_as_lost(run, world):
    world.is_refusing = True
    execution = run()

    with pytest.raises(LeaseLost):
        execution.step(pay, (), {})

    assert world.events == [("record", 1), ("refused",)]
    with pytest.raises(LeaseLost):
        execution.sleep(60, None)


def test_a_lost_lease_ends_the_body_at_its_next_call_before_anything_runs(run, world):
    execution = run(entry(1, Kind.STEP, "pay", value=1))
    execution.lease.mark_lost("it was taken")

    for call in (lambda: execution.step(pay, (), {}), lambda: execution.sleep(60, None)):
        with pytest.raises(LeaseLost):
            call()
    assert (calls, world.events, execution.journal.position) == ([], [], 0)


# -- interrupts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["record", "record_sleep", "park"])
def test_an_interrupt_that_comes_during_a_write_waits_for_its_end(run, world, call):
    execution = run()
    stored = getattr(world, call)

    def interrupted(*args, **kwargs):
        assert not execution.shield.request(LeaseInterrupt)  # not now
        return stored(*args, **kwargs)

    setattr(world, call, interrupted)
    perform = {
        "record": lambda: execution.step(pay, (), {}),
        "record_sleep": lambda: execution.sleep(0.5, None),
        "park": lambda: execution.sleep(60, None),
    }[call]

    with pytest.raises(LeaseInterrupt):
        execution.shield.run(perform)
    assert world.count(call) == 1
    assert execution.is_parked == (call == "park")


def test_an_interrupt_reaches_a_step_and_a_short_sleep_at_once(run, world, clock):
    execution = run()

    def step():
        assert execution.shield.request(LeaseInterrupt)  # now
        raise LeaseInterrupt

    with pytest.raises(LeaseInterrupt):
        execution.shield.run(lambda: execution.step(step, (), {}))

    execution = run()
    clock.wait = lambda event, seconds: step()
    with pytest.raises(LeaseInterrupt):
        execution.shield.run(lambda: execution.sleep(0.5, None))


# -- eager -----------------------------------------------------------------------------------------


@pytest.fixture
def eager():
    return EagerExecution(EternalLease("id"), CODEC, 3)


def test_eagerly_sleeps_return_at_once_and_steps_run(eager):
    eager.sleep(YEAR, None)
    eager.sleep_until(EPOCH + timedelta(days=9_999), "nap")

    assert eager.step(lambda: {1: (2,)}, (), {}) == {"1": [2]}


def test_eagerly_the_limits_hold_too(eager):
    with pytest.raises(PayloadTooLarge):
        eager.step(lambda: "x" * 201, (), {})
    with pytest.raises(NotDurable, match="inside a step"):
        eager.step(lambda: eager.sleep(1, None), (), {})
    eager.sleep(1, None)
    with pytest.raises(StepLimitExceeded):
        eager.sleep(1, None)
