"""Heartbeats: when leases are renewed, what the answers mean, and that nothing holds a deadline up.

Most tests make the passes themselves, on a clock that they move. Those about threads use events.
"""

from __future__ import annotations

import logging
import threading

import pytest

from celery_durable.errors import LeaseLost, LeaseRenewalTimedOut, StoreUnavailable
from celery_durable.heartbeat import Heartbeat, Heartbeats, Loop
from celery_durable.lease import Lease
from celery_durable.records import LeaseKey, Outcome, OutcomeKind
from tests.unit.fakes import FakeClock, StillClock, eventually

CANCELLED = Outcome(OutcomeKind.CANCELLED)


class Store:
    """Answers as it is told to, and counts."""

    def __init__(self):
        self.taken = set()
        self.locked = set()
        self.error = None
        self.outcome = None
        self.renewals = []
        self.lookups = []
        self.on_renew = lambda: None

    def renew(self, keys, ttl):
        self.renewals.append((list(keys), ttl))
        self.on_renew()
        if self.error is not None:
            raise self.error
        return set(keys) - self.taken - self.locked

    def still_held(self, keys):
        return set(keys) - self.taken

    def lost_to(self, key):
        self.lookups.append(key)
        if self.error is not None:
            raise self.error
        return self.outcome

    @property
    def renewed_ids(self):
        return [[key.task_id for key in keys] for keys, _ in self.renewals]


class Losses:
    """What runs were told, one by one, and in which thread."""

    def __init__(self):
        self.told = []
        self.threads = []

    def __call__(self, lease, outcome):
        self.threads.append(threading.current_thread())
        self.told.append((lease, outcome))

    def come_to(self, count):
        eventually(lambda: len(self.told) >= count)
        assert len(self.told) == count


@pytest.fixture
def clock():
    return StillClock(now=1_000.0)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def losses():
    return Losses()


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch):
    monkeypatch.setattr("celery_durable.heartbeat.random.uniform", lambda low, high: high)


@pytest.fixture
def margins():
    """What was left of each lease that was renewed."""
    return []


@pytest.fixture
def beats(store, clock, margins, monkeypatch):
    """Heartbeats whose passes the test makes: no thread is started but those that tell of a loss."""
    monkeypatch.setattr(Loop, "look_at", lambda loop, instant: None)
    return Heartbeats(store, clock, on_renewed=margins.extend)


@pytest.fixture
def start(beats, clock, losses):
    """Starts the heartbeat of a lease that is claimed now."""

    def begin(task_id="id", ttl=60, interval=10):
        lease = Lease(LeaseKey(task_id, "owner", 1), ttl, interval, clock=clock)
        beat = Heartbeat(lease, beats, losses)
        beat.start()
        return beat

    return begin


# -- what is told of renewals ---------------------------------------------------------------------


def test_each_renewal_tells_what_was_left_of_the_lease_and_a_refused_one_nothing(
    start, beats, store, clock, margins
):
    start("kept")
    start("taken")
    store.taken = {LeaseKey("taken", "owner", 1)}
    clock.now = 1_012
    beats.renew_due()
    assert margins == [48]
    clock.now = 1_025
    beats.renew_due()
    assert margins == [48, 47]


def test_a_renewal_that_did_not_come_through_tells_nothing(start, beats, store, clock, margins):
    start()
    store.error = StoreUnavailable("gone")
    clock.now = 1_010
    beats.renew_due()
    assert margins == []


# -- when ------------------------------------------------------------------------------------------


def test_the_first_renewal_comes_one_interval_after_the_claim(start, beats, store, clock):
    start()

    assert beats.renew_due() == 1_010
    clock.now = 1_009.9
    beats.renew_due()
    assert store.renewals == []

    clock.now = 1_010
    assert beats.renew_due() == 1_020
    assert store.renewals == [([LeaseKey("id", "owner", 1)], 60)]


def test_the_interval_counts_from_when_the_claim_was_sent(beats, store, clock, losses):
    lease = Lease(LeaseKey("id", "owner", 1), 60, 10, sent_at=997, clock=clock)
    Heartbeat(lease, beats, losses).start()

    assert beats.renew_due() == 1_007


def test_missed_renewals_are_made_up_for_by_one_and_not_by_a_burst(start, beats, store, clock):
    start()
    clock.now += 35  # the process was frozen for three intervals

    assert beats.renew_due() == 1_045
    beats.renew_due()
    assert len(store.renewals) == 1


def test_renewals_are_spread_a_little_so_that_processes_do_not_beat_together(
    start, beats, clock, monkeypatch
):
    monkeypatch.setattr("celery_durable.heartbeat.random.uniform", lambda low, high: low)
    start()
    clock.now += 10

    assert beats.renew_due() == 1_010 + 9


def test_nothing_is_asked_of_the_store_while_nothing_is_held(beats, store):
    assert beats.renew_due() == beats.watch_deadlines() == float("inf")
    assert store.renewals == []


def test_what_is_due_within_half_an_interval_is_renewed_in_the_same_statement(start, beats, store, clock):
    start("a")
    clock.now += 5
    start("b")
    clock.now += 0.1
    start("c")
    clock.now = 1_010

    assert beats.renew_due() == 1_015.1
    assert store.renewed_ids == [["a", "b"]]


def test_the_leases_of_a_process_fall_into_step(start, beats, store, clock):
    for number in range(200):
        start(f"task-{number}")
        clock.now += 0.1  # claimed over twenty seconds, renewed meanwhile
        beats.renew_due()
    store.renewals.clear()

    for _ in range(600):
        clock.now += 0.1
        beats.renew_due()

    assert sum(len(keys) for keys, _ in store.renewals) >= 200 * 5
    assert len(store.renewals) <= 18  # in 60 seconds


def test_leases_of_another_ttl_are_renewed_for_theirs(start, beats, store, clock):
    start("short", ttl=30)
    start("long", ttl=90)
    clock.now += 10
    beats.renew_due()

    assert [(keys[0].task_id, ttl) for keys, ttl in store.renewals] == [("short", 30), ("long", 90)]


# -- the three answers -----------------------------------------------------------------------------


def test_a_lease_that_is_renewed_in_time_is_held_for_ever(start, beats, clock, losses):
    beat = start()
    for _ in range(100):
        clock.now += 10
        beats.renew_due()
        beats.watch_deadlines()

    assert beat.lease.remaining == 50
    assert beat.is_running
    assert losses.told == []


def test_the_deadline_counts_from_the_send_of_a_renewal_that_takes_its_time(start, beats, store, clock):
    beat = start()
    store.on_renew = lambda: setattr(clock, "now", clock.now + 8)
    clock.now = 1_010

    beats.renew_due()

    assert beat.lease.deadline == 1_010 + 50


@pytest.mark.report("lost-ends-heartbeat")
def test_a_lost_lease_is_touched_once_and_the_run_told_once(start, beats, store, clock, losses):
    beat = start()
    store.taken = {beat.lease.key}
    for _ in range(10):
        clock.now += 10
        beats.renew_due()
        beats.watch_deadlines()

    losses.come_to(1)
    assert len(store.renewals) == 1
    assert not beat.is_running
    with pytest.raises(LeaseLost):
        beat.lease.check()


def test_one_lost_lease_leaves_the_others_of_the_statement_renewed(start, beats, store, clock, losses):
    lost, held = start("lost"), start("held")
    store.taken = {lost.lease.key}
    clock.now += 10
    beats.renew_due()

    losses.come_to(1)
    assert (lost.lease.lost, held.lease.remaining) == (True, 50)


@pytest.mark.parametrize("outcome", [CANCELLED, None])
def test_by_whose_hand_a_lease_was_lost_is_read_once_and_told(start, beats, store, clock, losses, outcome):
    beat = start()
    store.taken, store.outcome = {beat.lease.key}, outcome
    clock.now += 10
    beats.renew_due()

    losses.come_to(1)
    assert losses.told == [(beat.lease, outcome)]
    assert store.lookups == [beat.lease.key]


def test_a_run_is_told_even_if_it_cannot_be_read_by_whose_hand(start, beats, store, clock, losses):
    beat = start()
    store.taken = {beat.lease.key}
    store.lost_to = lambda key: 1 // 0
    clock.now += 10
    beats.renew_due()

    losses.come_to(1)
    assert losses.told == [(beat.lease, None)]


def test_a_row_that_somebody_has_locked_is_no_loss_and_is_tried_again_sooner(
    start, beats, store, clock, losses, margins
):
    locked, free, lost = start("locked"), start("free"), start("lost")
    store.locked, store.taken = {locked.lease.key}, {lost.lease.key}
    clock.now = 1_010
    assert beats.renew_due() == 1_012.5
    losses.come_to(1)
    assert (locked.is_running, free.is_running, lost.is_running) == (True, True, False)
    assert (locked.lease.remaining, free.lease.remaining) == (40, 50)
    assert margins == [50]

    store.locked.clear()
    clock.now = 1_012.5
    beats.renew_due()
    assert store.renewed_ids[-1] == ["locked"]
    assert locked.lease.remaining == 50


def test_a_row_that_stays_locked_is_a_renewal_that_timed_out(start, beats, store, clock, losses):
    beat = start()
    store.locked = {beat.lease.key}
    while clock.now < beat.lease.deadline:
        assert not beat.lease.lost
        clock.now = min(beats.renew_due(), beat.lease.deadline)
    beats.renew_due()

    losses.come_to(1)
    assert isinstance(beat.lease.loss, LeaseRenewalTimedOut)


def test_what_was_not_renewed_is_no_loss_while_the_database_does_not_say_why(
    start, beats, store, clock, losses, caplog
):
    """The database goes away between the two statements."""
    locked, free, lost = start("locked"), start("free"), start("lost")
    store.locked, store.taken = {locked.lease.key}, {lost.lease.key}
    answer, store.still_held = store.still_held, lambda keys: 1 // 0
    clock.now = 1_010
    assert beats.renew_due() == 1_012.5
    assert (locked.lease.remaining, free.lease.remaining, lost.lease.remaining) == (40, 50, 40)
    assert caplog.text.count("will try again") == 1

    store.still_held = answer
    clock.now = 1_012.5
    beats.renew_due()
    losses.come_to(1)
    assert losses.told == [(lost.lease, None)]
    assert locked.is_running


@pytest.mark.report("guard")
def test_an_error_is_no_loss_and_is_tried_again_sooner(start, beats, store, clock, losses):
    beat = start()
    store.error = StoreUnavailable("it is away")
    clock.now = 1_010
    assert beats.renew_due() == 1_012.5
    assert not beat.lease.lost

    store.error = None
    clock.now = 1_012.5
    assert beats.renew_due() == 1_022.5
    assert beat.lease.remaining == 50
    assert losses.told == []


@pytest.mark.report("guard")
def test_errors_until_the_deadline_are_a_renewal_that_timed_out(start, beats, store, clock, losses):
    beat = start()
    store.error = StoreUnavailable("it is away")
    assert beats.watch_deadlines() == 1_050
    while clock.now < 1_050:
        assert losses.told == []
        clock.now = min(beats.renew_due(), beats.watch_deadlines())

    beats.watch_deadlines()

    losses.come_to(1)
    assert isinstance(beat.lease.loss, LeaseRenewalTimedOut)
    assert store.lookups == []  # the database is away, and nobody has taken the task


def test_an_error_of_any_kind_is_an_error_and_not_the_end_of_all_heartbeats(start, beats, store, clock):
    beat = start()
    store.error = ZeroDivisionError("a bug")
    clock.now += 10
    beats.renew_due()

    store.error = None
    clock.now += 10
    beats.renew_due()
    assert beat.lease.remaining == 50


def test_an_outage_is_logged_once_and_so_is_its_end(start, beats, store, clock, caplog):
    caplog.set_level(logging.INFO, "celery_durable.heartbeat")
    start()
    store.error = StoreUnavailable("it is away")
    for _ in range(5):
        clock.now += 10
        beats.renew_due()
    store.error = None
    for _ in range(3):
        clock.now += 10
        beats.renew_due()

    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_end_of_an_outage_is_logged(start, beats, store, clock, caplog):
    caplog.set_level(logging.INFO, "celery_durable.heartbeat")
    start()
    store.error = StoreUnavailable("it is away")
    clock.now += 10
    beats.renew_due()
    store.error = None
    clock.now += 10
    beats.renew_due()

    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_loss_that_the_run_found_itself_is_told_too(start, beats, clock, losses):
    beat = start()
    beat.lease.mark_lost("a write was refused")

    beats.renew_due()

    losses.come_to(1)
    assert losses.told[0][0] is beat.lease


# -- stop ------------------------------------------------------------------------------------------


@pytest.mark.report("heartbeat-stop")
def test_a_heartbeat_that_was_stopped_renews_no_more(start, beats, store, clock):
    beat = start()
    beat.stop()
    clock.now += 10
    beats.renew_due()

    assert not beat.is_running
    assert store.renewals == []


def test_stopping_twice_and_before_the_start_is_harmless(beats, clock, losses):
    beat = Heartbeat(Lease(LeaseKey("id", "owner", 1), 60, 10, clock=clock), beats, losses)

    beat.stop()
    beat.start()
    assert beat.is_running
    beat.stop()
    beat.stop()
    assert not beat.is_running


def test_stopping_an_old_run_leaves_the_heartbeat_of_the_next_one_alone(start):
    first = start()
    second = start()
    first.stop()

    assert second.is_running


@pytest.mark.parametrize("answer", ["renewed", "lost", "error"])
def test_the_answer_to_a_renewal_in_flight_says_nothing_after_the_stop(
    start, beats, store, clock, losses, answer
):
    beat = start()
    store.taken = {beat.lease.key} if answer == "lost" else set()
    store.error = StoreUnavailable("it is away") if answer == "error" else None
    store.on_renew = beat.stop
    clock.now += 10
    deadline = beat.lease.deadline

    beats.renew_due()

    assert beat.lease.deadline == deadline
    assert not beat.lease.lost
    assert (losses.told, store.lookups) == ([], [])


def test_a_run_that_is_giving_its_lease_up_cannot_lose_it(start, beats, store, clock, losses):
    beat = start()
    store.taken = {beat.lease.key}  # by the run's own park
    beat.lease.close()
    clock.now += 10
    beats.renew_due()
    clock.now += 100
    next_look = beats.watch_deadlines()

    assert losses.told == []
    assert next_look > clock.now  # and nobody looks at it again and again meanwhile


def test_a_lease_that_could_not_be_given_up_is_watched_again(start, beats, clock, losses):
    beat = start()
    beat.lease.close()
    clock.now += 100
    clock.now = beats.watch_deadlines()
    beat.lease.reopen()
    beats.watch_deadlines()

    losses.come_to(1)
    assert isinstance(beat.lease.loss, LeaseRenewalTimedOut)


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def moving():
    return FakeClock()


@pytest.fixture
def threaded(store, moving):
    beats = Heartbeats(store, moving)
    yield beats
    beats.close()
    eventually(lambda: not moving.waiting)


def hold(threaded, moving, losses, task_id="id", ttl=60, interval=10):
    lease = Lease(LeaseKey(task_id, "owner", 1), ttl, interval, clock=moving)
    beat = Heartbeat(lease, threaded, losses)
    beat.start()
    eventually(lambda: moving.waiting == 2)  # one thread renews, one watches
    return beat


def test_the_threads_renew_when_it_is_time_and_not_before(threaded, moving, store, losses):
    hold(threaded, moving, losses)
    moving.move(9.9)
    eventually(lambda: moving.waiting == 2)
    assert store.renewals == []

    moving.move(0.1)
    eventually(lambda: len(store.renewals) == 1)


def test_a_lease_that_is_due_sooner_than_all_others_is_not_overlooked(threaded, moving, store, losses):
    hold(threaded, moving, losses, "slow", ttl=300, interval=100)
    hold(threaded, moving, losses, "quick", ttl=3, interval=1)
    moving.move(1)

    eventually(lambda: store.renewed_ids == [["quick"]])


@pytest.mark.report("connections-per-task")
def test_many_leases_take_two_threads(threaded, moving, losses):
    before = threading.active_count()
    for number in range(100):
        hold(threaded, moving, losses, f"task-{number}")

    assert threading.active_count() <= before + 2


def test_a_renewal_that_hangs_does_not_hold_up_the_deadline(threaded, moving, store, losses):
    answer = threading.Event()
    beat = hold(threaded, moving, losses)
    store.on_renew = lambda: answer.wait(10)
    moving.move(10)
    eventually(lambda: store.renewals)

    moving.move(39.9)
    assert not beat.lease.lost
    moving.move(0.1)
    losses.come_to(1)
    assert isinstance(beat.lease.loss, LeaseRenewalTimedOut)

    answer.set()  # with "renewed": too late
    eventually(lambda: moving.waiting == 2)
    assert beat.lease.lost
    losses.come_to(1)


def test_a_renewal_that_hangs_holds_up_no_deadline_of_any_lease(threaded, moving, store, losses):
    answer = threading.Event()
    first = hold(threaded, moving, losses, "first")
    moving.move(2)
    second = hold(threaded, moving, losses, "second", ttl=90)
    store.on_renew = lambda: answer.wait(10)
    moving.move(8)
    eventually(lambda: store.renewals)

    moving.move_to(1_050)
    losses.come_to(1)
    assert (first.lease.lost, second.lease.lost) == (True, False)
    moving.move_to(1_082)
    losses.come_to(2)
    answer.set()


@pytest.mark.report("heartbeat-stop")
def test_stopping_does_not_wait_for_a_renewal_that_hangs(threaded, moving, store, losses):
    answer = threading.Event()
    beat = hold(threaded, moving, losses)
    store.on_renew = lambda: answer.wait(10)
    moving.move(10)
    eventually(lambda: store.renewals)

    stopper = threading.Thread(target=beat.stop)
    stopper.start()
    stopper.join(0.2)

    assert not stopper.is_alive()
    answer.set()


def test_a_run_that_takes_long_to_be_interrupted_holds_up_no_other_lease(threaded, moving, store, losses):
    interrupted = threading.Event()

    def interrupt(lease, outcome):
        losses(lease, outcome)
        interrupted.wait(10)

    lost = hold(threaded, moving, interrupt, "lost")
    held = hold(threaded, moving, losses, "held")
    store.taken = {lost.lease.key}
    moving.move(10)
    losses.come_to(1)
    moving.move(10)

    eventually(lambda: held.lease.deadline == moving.monotonic() + 50)
    assert losses.threads[0] not in (threading.current_thread(), threading.main_thread())
    interrupted.set()


def test_a_pass_that_fails_is_not_the_last_one(moving, caplog):
    results = iter([ZeroDivisionError("a bug"), float("inf")])
    passes = []

    def make_pass():
        result = next(results)
        passes.append(result)
        if isinstance(result, Exception):
            raise result
        return result

    loop = Loop("test-loop", make_pass, moving)
    loop.look_at(0.0)

    eventually(lambda: moving.waiting)
    assert len(passes) == 1
    assert "test-loop failed, and goes on" in caplog.text
    moving.move(1)
    eventually(lambda: len(passes) == 2)
    loop.close()


def test_closing_ends_both_threads_and_all_heartbeats(threaded, moving, store, losses):
    others = threading.enumerate()
    beat = hold(threaded, moving, losses)
    mine = [thread for thread in threading.enumerate() if thread not in others]

    threaded.close()

    eventually(lambda: not any(thread.is_alive() for thread in mine))
    assert not beat.is_running
    assert store.renewals == []


def test_without_a_thread_to_be_had_there_is_no_heartbeat_and_the_run_can_see_it(
    store, moving, losses, monkeypatch, caplog
):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    beats = Heartbeats(store, moving)
    beat = Heartbeat(Lease(LeaseKey("id", "owner", 1), 60, 10, clock=moving), beats, losses)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        beat.start()

    assert not beat.is_running
    assert "No heartbeat for task id" in caplog.text
