"""Leases after the claim: renewed, handed back, taken from the dead, each by its owner and token only."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from celery_durable.records import Due, LeaseKey, Outcome, OutcomeKind, Status
from celery_durable.store import Store
from celery_durable.store.leases import PART
from tests.store.tables import (
    OTHER,
    OWNER,
    TTL,
    Statements,
    asleep,
    claimed,
    delivery,
    refused,
    sleep,
    step,
    wake,
)

VALUE = Outcome(OutcomeKind.VALUE, None, b"42", "application/json", "utf-8")
TIMED_OUT = Outcome(OutcomeKind.EXCEPTION, "TimeLimitExceeded(3)", b"{}", "application/json", "utf-8")


@pytest.fixture
def key(store):
    """The lease of a task that runs."""
    return claimed(store).key


# -- the fence -------------------------------------------------------------------------------------


WRITES = {
    "renew": lambda store, key: store.leases.renew([key], TTL),
    "still_held": lambda store, key: store.leases.still_held([key, replace(key, task_id="none")]),
    "renew many": lambda store, key: store.leases.renew([key, replace(key, task_id="none")], TTL),
    "hand_back": lambda store, key: store.leases.hand_back(key),
    "hand_back_many": lambda store, key: store.leases.hand_back_many([key, replace(key, token=99)]),
    "tell_later": lambda store, key: store.leases.tell_later(key, VALUE, 1.0),
    "mark_draining": lambda store, key: store.leases.mark_draining([key]),
    "recover": lambda store, key: store.leases.recover(key, 3),
    "take_from_child": lambda store, key: store.leases.take_from_child(key, "main", TTL, TIMED_OUT),
}


def taken_over(store, tables, key):
    """Another worker has claimed the task after the lease ran out."""
    tables.expire()
    claimed(store, wake(), OTHER)
    return key


def taken_over_by_the_same_process(store, tables, key):
    tables.expire()
    claimed(store, wake(), OWNER)
    return key


def sent_again(store, tables, key):
    """The scheduler has found the lease expired and has sent a wake."""
    tables.send_wake()
    return key


def parked(store, tables, key):
    store.runs.park(key, Due(seconds=60), entries=[sleep(1)])
    return key


def cancelled(store, tables, key):
    store.verdicts.cancel(["id"])
    return key


def finished(store, tables, key):
    store.runs.end(key, VALUE, TTL)
    store.runs.finish(key, Status.SUCCEEDED)
    return key


def set_aside(store, tables, key):
    store.runs.set_aside(key)
    return key


def of_another_owner(store, tables, key):
    return replace(key, owner=OTHER)


def of_a_token_to_come(store, tables, key):
    return replace(key, token=2)


STRANGERS = [
    taken_over,
    taken_over_by_the_same_process,
    sent_again,
    parked,
    cancelled,
    finished,
    set_aside,
    of_another_owner,
    of_a_token_to_come,
]


@pytest.mark.report("handed-back")
@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_without_the_current_lease_is_refused_and_changes_nothing(
    store, tables, key, write, stranger
):
    stale = stranger(store, tables, key)
    before = tables.everything()

    assert not WRITES[write](store, stale)

    assert tables.everything() == before


@pytest.mark.parametrize("write", WRITES)
def test_the_same_write_of_the_new_owner_is_accepted(store, tables, key, write):
    tables.expire()
    key = claimed(store, wake(), OTHER).key

    assert WRITES[write](store, key)


@pytest.mark.parametrize("write", WRITES)
def test_another_namespace_is_another_world(store, open_store, tables, key, write):
    before = tables.everything()

    assert not WRITES[write](open_store(namespace="shop"), key)
    assert tables.everything() == before


# -- renewing --------------------------------------------------------------------------------------


@pytest.mark.report("takeover-at-expiry")
@pytest.mark.parametrize("seconds", [30, 0, -100])
def test_a_renewal_moves_the_expiry_even_if_it_comes_late(store, tables, key, seconds):
    tables.expire(seconds=-seconds)
    before = tables.row()

    assert store.heartbeats.renew([key], 90.0) == {key}

    assert 80 < tables.due_in() <= 90
    assert {**tables.row(), "wake_at": None} == {**before, "wake_at": None}


def test_a_renewal_goes_on_while_the_end_is_told(store, tables, key):
    store.runs.end(key, VALUE, 1.0)

    assert store.leases.renew([key], TTL) == {key}
    assert tables.due_in() > 50


@pytest.mark.parametrize("count", [0, 1, 2, 50, PART + 1])
def test_many_leases_are_renewed_in_few_statements(store, tables, count):
    keys = [claimed(store, delivery(f"task-{n}")).key for n in range(min(count, 50))]
    strangers = [LeaseKey(f"stranger-{n}", OWNER, 1) for n in range(count - len(keys))]
    statements = Statements(store)
    renewed = set()

    done = statements.during(lambda: renewed.update(store.leases.renew(keys + strangers, 600.0)))

    assert renewed == set(keys)
    assert len(done) == -(-count // PART)
    assert all(tables.due_in(key.task_id) > 500 for key in keys)


def test_each_lease_of_a_renewal_is_answered_by_itself(store, tables):
    keys = [claimed(store, delivery(f"task-{n}")).key for n in range(6)]
    tables.expire("task-1")
    claimed(store, wake("task-1"), OTHER)
    store.runs.park(keys[2], Due(), entries=[sleep(1)])
    mixed = [*keys[:4], replace(keys[4], token=7), replace(keys[5], owner=keys[4].owner + "x")]

    assert store.leases.renew(mixed, TTL) == {keys[0], keys[3]}


def test_the_same_id_in_two_leases_is_renewed_for_the_one_that_holds_it(store, tables, key):
    tables.expire()
    newer = claimed(store, wake(), OTHER).key

    assert store.leases.renew([key, newer], TTL) == {newer}


def test_a_row_that_somebody_has_locked_holds_up_no_other_lease(postgres_url):
    store = Store(postgres_url, namespace="proj")
    store.upgrade()
    keys = [claimed(store, delivery(f"task-{n}")).key for n in range(4)]
    gone = replace(keys[0], token=7)
    executions = store.context.schema.executions
    with store.database.transaction() as connection:
        connection.execute(
            select(executions).where(executions.c.task_id.in_(["task-1", "task-2"])).with_for_update()
        )
        assert store.heartbeats.renew([*keys, gone], 600.0) == {keys[0], keys[3]}
        assert store.heartbeats.renew([keys[1]], 600.0) == set()
        assert store.heartbeats.still_held([*keys[1:3], gone]) == set(keys[1:3])
        connection.execute(update(executions).where(executions.c.task_id == "task-2").values(token=2))
    assert store.heartbeats.renew([*keys[1:3], gone], 600.0) == {keys[1]}
    assert store.heartbeats.still_held([keys[2], gone]) == set()
    store.dispose()


# -- who took it -----------------------------------------------------------------------------------


def test_by_which_outcome_a_lease_was_lost(store, tables, key):
    assert store.leases.lost_to(key) is None
    store.verdicts.cancel(["id"])

    assert store.leases.lost_to(key).kind == OutcomeKind.CANCELLED
    assert store.leases.lost_to(LeaseKey("gone", OWNER, 1)) is None


# -- handing back ----------------------------------------------------------------------------------


@pytest.mark.report("handed-back")
@pytest.mark.parametrize("delay", [0.0, 30.0])
def test_a_lease_that_is_handed_back_makes_the_task_due_and_is_no_crash(store, tables, key, delay):
    store.runs.record(key, [step(1)])
    store.leases.mark_draining([key])
    tables.put(crashes=1)

    assert store.leases.hand_back(key, delay)

    row = tables.row()
    assert (row["status"], row["owner"], row["sends"], row["crashes"]) == ("running", None, 0, 1)
    assert (row["token"], row["draining"]) == (1, False)
    assert delay - 10 < tables.due_in() <= delay
    assert len(tables.journal()) == 1


def test_a_task_that_is_handed_back_with_a_pause_is_left_alone_until_then(store, tables, key):
    store.leases.hand_back(key, 30.0)

    assert refused(store, delivery()) == "it is running"
    tables.expire()
    assert claimed(store, delivery()).key.token == 2


def test_an_outcome_that_could_not_be_told_is_kept_by_the_handing_back(store, tables, key):
    store.runs.end(key, VALUE, TTL)

    assert store.leases.hand_back(key)
    assert (tables.row()["status"], claimed(store, wake()).outcome) == ("ending", VALUE)


def test_how_often_an_outcome_could_not_be_told_is_counted_with_it(store, tables, key):
    store.runs.end(key, VALUE, TTL)
    outcome = VALUE
    for count in range(1, 4):
        assert store.leases.tell_later(key, outcome, 30.0)
        assert 20 < tables.due_in() <= 30
        assert (tables.row()["owner"], tables.row()["sends"], tables.row()["crashes"]) == (None, 0, 0)
        tables.expire()
        granted = claimed(store, wake())
        key, outcome = granted.key, granted.outcome
        assert outcome == replace(VALUE, refusals=count)


def test_many_leases_are_handed_back_and_those_that_were_lost_are_not_counted(store, tables):
    keys = [claimed(store, delivery(f"task-{n}")).key for n in range(5)]
    store.runs.park(keys[0], Due(seconds=60), entries=[sleep(1)])

    assert store.leases.hand_back_many(keys) == 4
    assert store.leases.hand_back_many(keys) == 0
    assert store.leases.hand_back_many([]) == 0
    assert tables.row("task-0")["status"] == "sleeping"
    assert all(tables.due_in(f"task-{n}") <= 0 for n in range(1, 5))


# -- draining --------------------------------------------------------------------------------------


def test_the_leases_of_a_worker_that_is_told_to_stop_are_marked(store, tables):
    keys = [claimed(store, delivery(f"task-{n}")).key for n in range(3)]
    before = tables.row("task-0")

    assert store.leases.mark_draining(keys) == 3
    assert {**tables.row("task-0"), "draining": False} == before
    assert store.leases.mark_draining([]) == 0


def test_a_marked_lease_that_runs_out_is_no_crash_however_often(store, tables):
    key = claimed(store).key
    for _ in range(5):
        store.leases.mark_draining([key])
        tables.expire()
        granted = claimed(store, wake(), max_crashes=1)
        assert (granted.outcome, granted.crashes) == (None, 0)
        key = granted.key


# -- a dead child ----------------------------------------------------------------------------------


def test_the_task_of_a_dead_child_is_due_at_once_whatever_its_ttl(store, tables, key):
    assert store.leases.recover(key, 3) is True

    row = tables.row()
    assert (row["status"], row["owner"], row["sends"], row["crashes"]) == ("running", None, 0, 1)
    assert tables.due_in() <= 0
    assert claimed(store, wake()).key.token == 2


def test_a_child_that_is_about_to_be_killed_is_given_the_time_for_it(store, tables, key):
    assert store.leases.recover(key, 3, 30.0) is True
    assert 20 < tables.due_in() <= 30


def test_the_more_often_a_child_dies_of_a_task_the_longer_it_waits(store, tables, key):
    waits = []
    for _ in range(4):
        store.leases.recover(key, None)
        waits.append(round(tables.due_in()))
        tables.expire()
        key = claimed(store, wake()).key

    assert waits == [0, 2, 4, 8]


def test_a_task_whose_child_died_as_often_as_allowed_is_quarantined(store, tables, key):
    for _ in range(2):
        assert store.leases.recover(key, 3) is True
        tables.expire()
        key = claimed(store, wake()).key

    verdict = store.leases.recover(key, 3)

    assert verdict.kind == OutcomeKind.QUARANTINED
    assert "died 3 times in a row" in verdict.reason
    row = tables.row()
    assert (row["status"], row["owner"], row["crashes"], row["finished_at"]) == ("ending", None, 0, None)
    assert tables.due_in() <= 0
    assert claimed(store, wake()).outcome == verdict


def test_a_child_that_died_when_its_worker_was_told_to_stop_is_no_crash(store, tables, key):
    store.leases.mark_draining([key])

    assert store.leases.recover(key, 0) is True
    assert (tables.row()["crashes"], tables.row()["draining"]) == (0, False)


def test_a_child_that_died_while_it_told_of_an_end_is_a_crash_and_never_a_quarantine(store, tables, key):
    store.runs.end(key, VALUE, TTL)
    for count in range(1, 6):
        assert store.leases.recover(key, 1) is True
        assert tables.row()["crashes"] == count
        tables.expire()
        granted = claimed(store, wake())
        assert (granted.outcome, granted.crashes) == (VALUE, count)
        key = granted.key


# -- a hard time limit -----------------------------------------------------------------------------


def test_a_run_that_is_ended_from_outside_is_taken_from_its_child(store, tables, key):
    store.leases.mark_draining([key])
    tables.put(crashes=1)

    taken = store.leases.take_from_child(key, "main", 2 * TTL, TIMED_OUT)

    assert taken == LeaseKey("id", "main", 2)
    row = tables.row()
    assert (row["status"], row["owner"], row["token"], row["crashes"]) == ("ending", "main", 2, 0)
    assert tables.due_in() > TTL
    assert store.leases.lost_to(key) == TIMED_OUT
    assert store.leases.renew([key], TTL) == set()
    assert store.runs.finish(taken, Status.FAILED)


def test_a_child_that_has_come_to_its_end_is_not_ended_from_outside(store, tables, key):
    store.runs.end(key, VALUE, TTL)
    before = tables.everything()

    assert store.leases.take_from_child(key, "main", TTL, TIMED_OUT) is None
    assert tables.everything() == before


# -- a wake that will not be claimed -----------------------------------------------------------------


def test_a_wake_that_its_worker_cannot_claim_is_taken_back(store, tables):
    asleep(store)
    tables.send_wake()

    assert store.leases.make_due("id")
    assert (tables.row()["status"], tables.row()["sends"]) == ("sleeping", 0)
    assert tables.due_in() <= 0


@pytest.mark.parametrize("state", ["asleep", "running", "finished", "gone"])
def test_only_a_wake_that_is_on_its_way_can_be_taken_back(store, tables, state):
    if state == "asleep":
        asleep(store)
    elif state != "gone":
        key = claimed(store).key
        if state == "finished":
            finished(store, tables, key)
    before = tables.everything()

    assert not store.leases.make_due("id")
    assert tables.everything() == before


# -- both sides of a take-over -----------------------------------------------------------------------


@pytest.mark.report("fencing")
def test_after_a_take_over_all_that_the_old_owner_tries_is_refused_and_the_new_one_s_accepted(store, tables):
    old = claimed(store).key
    store.runs.record(old, [step(1)])
    tables.expire()
    new = claimed(store, wake(), OTHER).key
    assert new.token == old.token + 1
    before = tables.everything()

    assert store.leases.renew([old], TTL) == set()
    assert not store.runs.record(old, [step(2)])
    assert store.runs.park(old, Due(), entries=[sleep(2)]) is None
    assert store.runs.end(old, TIMED_OUT, TTL) is None
    assert not store.runs.finish(old, Status.FAILED)
    assert tables.everything() == before

    assert store.leases.renew([new], TTL) == {new}
    assert store.runs.record(new, [step(2)])
    assert store.runs.end(new, VALUE, TTL) is not None
    assert store.runs.finish(new, Status.SUCCEEDED)


@pytest.mark.report("local-deadline")
def test_a_holder_always_stops_before_the_store_gives_its_lease_away(store, tables, key):
    """ttl 60, interval 10: the holder believes in 50 seconds from the send, the store in 60 from then on."""
    before = store.now()
    store.leases.renew([key], 60.0)

    assert tables.row()["wake_at"] - before >= timedelta(seconds=60)
