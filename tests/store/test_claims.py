"""Deliveries: what opens an execution, what takes one over, and what is dropped; on each database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_durable.clock import monotonic
from celery_durable.records import (
    Claim,
    Due,
    LeaseKey,
    Message,
    Outcome,
    OutcomeKind,
    Refusal,
    Scheduled,
    Status,
)
from celery_durable.rules import Outage
from tests.store.tables import (
    MESSAGE,
    OTHER,
    OWNER,
    TTL,
    asleep,
    claim,
    claimed,
    delivery,
    refused,
    sleep,
    step,
    wake,
)

SECOND = timedelta(seconds=1)


def ended(store, status=Status.SUCCEEDED, task_id="id", **changes):
    """A task that has come to its end. Returns the lease that it had."""
    key = claimed(store, delivery(task_id, **changes)).key
    assert store.runs.record(key, [step(1)])
    assert store.runs.end(key, Outcome(OutcomeKind.VALUE), TTL) is not None
    assert store.runs.finish(key, status)
    return key


def prune_to_tombstone(tables, task_id="id"):
    """What is left of an ended row when it has been pruned: enough to know a copy by."""
    nothing = dict.fromkeys(
        (
            "headers",
            "properties",
            "body",
            "content_type",
            "content_encoding",
            "exchange",
            "routing_key",
            "outcome",
        )
    )
    tables.put(task_id, **nothing)


# -- the first delivery ----------------------------------------------------------------------------


def test_the_first_message_opens_an_execution_and_owns_it(store, tables):
    before = monotonic()
    granted = claimed(store)

    assert granted.key == LeaseKey("id", OWNER, 1)
    assert (granted.status, granted.outcome, granted.journal) == (Status.RUNNING, None, ())
    assert (granted.crashes, granted.recovered) == (0, False)
    assert before <= granted.asked_at <= monotonic()
    row = tables.row()
    assert (row["status"], row["owner"], row["token"], row["sends"]) == ("running", OWNER, 1, 0)
    assert TTL - 5 < tables.due_in() <= TTL
    assert row["finished_at"] is None


def test_the_message_is_kept_to_the_byte(store, tables):
    message = Message("{}", '{"a": 1}', bytes(range(256)), "x", "binary", "application/x-gzip", "ex", "rk")
    claimed(store, delivery(message=message, send_id="s", version=0, nesting=2, task_name="proj.ünicode"))

    row = tables.row()
    assert {name: row[name] for name in message.__slots__} == {
        name: getattr(message, name) for name in message.__slots__
    }
    assert (row["send_id"], row["nesting"], row["task_name"]) == ("s", 2, "proj.ünicode")


@pytest.mark.report("moved-clock")
def test_the_time_of_a_claim_is_the_database_s(store):
    before, granted, after = store.now(), claimed(store), store.now()

    assert before <= granted.claimed_at <= after
    assert granted.claimed_at.utcoffset() == timedelta(0)


def test_a_claim_of_a_wake_whose_row_is_gone_writes_nothing(store, tables):
    assert refused(store, wake()) == "its row is gone"
    assert tables.all() == []


@pytest.mark.parametrize("task_id", ["a" * 255, "ünï©ode", "with spaces/and:more", "'; DROP TABLE x; --"])
def test_an_id_is_whatever_the_producer_made_of_it(store, task_id):
    assert claimed(store, delivery(task_id)).key.task_id == task_id
    assert refused(store, delivery(task_id)) == f"{OWNER} holds its lease"


# -- one owner -------------------------------------------------------------------------------------


@pytest.mark.report("takeover-at-expiry")
@pytest.mark.parametrize(
    "copy", [delivery(), wake(), delivery(send_id=None)], ids=["copy", "wake", "unmarked"]
)
def test_a_live_lease_is_never_stolen(store, tables, copy):
    claimed(store)
    before = tables.everything()

    assert refused(store, copy, OTHER) == f"{OWNER} holds its lease"
    assert tables.everything() == before


@pytest.mark.report("takeover-at-expiry")
@pytest.mark.parametrize(("seconds", "is_taken"), [(-0.001, False), (0.0, True)])
def test_a_lease_is_taken_over_exactly_at_its_expiry(store, tables, seconds, is_taken):
    claimed(store)
    expiry = tables.row()["wake_at"]

    store.stopped_at.append(expiry + timedelta(seconds=seconds))  # the database's clock stands

    assert isinstance(claim(store, wake(), OTHER), Claim) == is_taken


def test_a_lease_that_ran_out_is_taken_over_with_the_next_token(store, tables):
    claimed(store)
    tables.expire()

    granted = claimed(store, wake(), OTHER)

    assert granted.key == LeaseKey("id", OTHER, 2)
    assert (granted.crashes, granted.recovered) == (1, True)
    row = tables.row()
    assert (row["owner"], row["token"], row["crashes"]) == (OTHER, 2, 1)
    assert tables.due_in() > TTL - 5


@pytest.mark.report("lost-and-doubled-wakes")
def test_a_row_that_was_sent_a_wake_is_taken_by_it_and_by_one_of_its_copies_only(store, tables):
    asleep(store)
    tables.send_wake()

    assert claimed(store, wake()).key.token == 2
    assert refused(store, wake(), OTHER) == f"{OWNER} holds its lease"
    assert tables.row()["sends"] == 0


def test_a_task_that_sleeps_is_woken_by_nothing_before_its_time(store, tables):
    asleep(store)
    before = tables.everything()

    for message in (delivery(), wake(), delivery(send_id=None)):
        assert refused(store, message) == "it is sleeping"
    assert tables.everything() == before


def test_a_task_that_is_due_is_woken_even_by_an_old_copy_when_no_scheduler_runs(store, tables):
    asleep(store)
    tables.expire()

    assert claimed(store, delivery()).key.token == 2


@pytest.mark.parametrize("column", ["send_id", "nesting", "message_version"])
def test_a_message_of_something_else_does_not_take_a_row(store, tables, column):
    asleep(store)
    tables.send_wake()
    other = {"send_id": {"send_id": "send-2"}, "nesting": {"nesting": -1}, "message_version": {"version": 1}}
    before = tables.everything()

    assert isinstance(claim(store, wake(**other[column])), Refusal)
    assert tables.everything() == before


def test_a_fresh_send_under_the_id_of_a_live_task_is_pointed_out(store):
    claimed(store)

    answer = claim(store, delivery(send_id="send-2"))

    assert answer == Refusal("its id is taken by a task that is running", is_fresh_send=True)


def test_two_namespaces_do_not_see_each_other(store, open_store, tables):
    other = open_store(namespace="shop")

    assert claimed(store).key.token == claimed(other).key.token == 1
    tables_of_other = [row["namespace"] for row in tables.all()]
    assert tables_of_other == ["proj", "shop"]
    assert other.leases.hand_back(LeaseKey("id", OWNER, 1))
    assert tables.row()["owner"] == OWNER


# -- what a claim hands over -----------------------------------------------------------------------


def test_a_claim_reads_the_journal_and_which_sleeps_are_over(store, tables):
    key = claimed(store).key
    store.runs.record(key, [step(1, "first", b'"a"')])
    store.runs.record_sleep(key, [sleep(2, "nap")], Due(seconds=-5))
    store.runs.park(key, Due(seconds=3_600), entries=[step(3, "third", None), sleep(4)])
    tables.send_wake()

    granted = claimed(store, wake())

    assert [entry.position for entry in granted.journal] == [1, 2, 3, 4]
    first, nap, third, trial = granted.journal
    assert (first.kind, first.name, first.payload, first.content_type) == (
        "step",
        "first",
        b'"a"',
        "application/json",
    )
    assert (nap.kind, nap.name, nap.is_over) == ("sleep", "nap", True)
    assert (third.payload, third.is_over, third.due_at) == (None, False, None)
    assert (trial.is_over, trial.due_at > granted.claimed_at) == (False, True)


@pytest.mark.report("due-is-inclusive")
def test_a_sleep_is_over_at_its_due_time_and_not_before(store, tables):
    asleep(store, "id", 0.0)
    asleep(store, "later", 5.0)
    tables.send_wake("later")

    assert claimed(store, wake()).journal[0].is_over
    assert not claimed(store, wake("later")).journal[0].is_over


def test_a_journal_of_thousands_of_entries_is_read_in_order(store, tables):
    key = claimed(store).key
    store.runs.record(key, [step(position, f"step-{position}") for position in range(1, 2_001)])
    store.runs.park(key, Due(), entries=[sleep(2_001)])

    journal = claimed(store, wake()).journal

    assert [entry.position for entry in journal] == list(range(1, 2_002))


@pytest.mark.parametrize("crashes", [0, 2])
def test_a_claim_that_finds_an_outcome_is_handed_it_and_no_journal(store, tables, crashes):
    key = claimed(store).key
    store.runs.record(key, [step(1)])
    outcome = Outcome(OutcomeKind.VALUE, None, b"\xff\x00", "x", "binary")
    store.runs.end(key, outcome, TTL)
    store.leases.hand_back(key)
    tables.put(crashes=crashes)

    granted = claimed(store, wake())

    assert (granted.status, granted.outcome, granted.journal) == (Status.ENDING, outcome, ())
    assert granted.crashes == crashes
    assert tables.row()["status"] == "ending"


def test_a_task_that_was_handed_back_is_run_again_and_that_is_no_crash(store, tables):
    key = claimed(store).key
    store.leases.hand_back(key)

    granted = claimed(store, wake())

    assert (granted.key.token, granted.crashes, granted.recovered) == (2, 0, True)


def test_a_woken_task_is_no_recovered_one(store, tables):
    asleep(store)
    tables.send_wake()

    assert not claimed(store, wake()).recovered


def test_a_claim_tells_in_which_status_it_found_its_row(store, tables):
    asleep(store)
    tables.send_wake()
    wake_of_a_sleep = claimed(store, wake())
    assert store.runs.park(wake_of_a_sleep.key, Due(seconds=60), status=Status.RETRYING, message=MESSAGE)
    tables.send_wake()
    wake_of_a_retry = claimed(store, wake(version=1))

    assert claimed(store, delivery("new")).found is None
    assert (wake_of_a_sleep.found, wake_of_a_retry.found) == (Status.SLEEPING, Status.RETRYING)


def test_a_claim_clears_the_mark_of_a_worker_that_was_stopping(store, tables):
    key = claimed(store).key
    store.leases.mark_draining([key])
    tables.expire()

    granted = claimed(store, wake())

    assert (granted.crashes, tables.row()["draining"]) == (0, False)


# -- crashes found by a claim ------------------------------------------------------------------------


@pytest.mark.report("crash-limit")
@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_a_task_whose_worker_died_as_often_as_allowed_is_quarantined_instead_of_run(store, tables, limit):
    granted = claimed(store, max_crashes=limit)
    for _ in range(max(limit, 1)):
        assert granted.outcome is None
        tables.expire()
        granted = claimed(store, wake(), max_crashes=limit)

    assert granted.outcome.kind == OutcomeKind.QUARANTINED
    assert "its worker died" in granted.outcome.reason
    row = tables.row()
    assert (row["status"], row["crashes"], row["owner"]) == ("ending", 0, OWNER)


def test_without_a_limit_a_task_is_run_again_and_again(store, tables):
    granted = claimed(store, max_crashes=None)
    for count in range(1, 8):
        tables.expire()
        granted = claimed(store, wake(), max_crashes=None)
        assert (granted.outcome, granted.crashes) == (None, count)


def test_progress_forgives_the_crashes_before_it(store, tables):
    key = claimed(store).key
    for _ in range(5):
        tables.expire()
        key = claimed(store, wake(), max_crashes=2).key
        store.runs.record(key, [step(key.token)])

    assert tables.row()["crashes"] == 0


@pytest.mark.parametrize(("offset", "crashes"), [(-10, 1), (10, 0)])
def test_a_lease_that_ran_out_in_an_outage_is_taken_over_without_counting(store, tables, offset, crashes):
    claimed(store)
    expiry = tables.expire(seconds=100)
    outage = Outage(expiry - timedelta(seconds=offset), expiry + timedelta(seconds=60))

    granted = store.claims.claim(wake(), OTHER, TTL, 3, outage)

    assert granted.crashes == crashes


# -- after the end -----------------------------------------------------------------------------------


@pytest.mark.report("ended-never-wakes")
@pytest.mark.parametrize("status", sorted(Status.ENDED))
@pytest.mark.parametrize("is_pruned", [False, True])
def test_after_the_end_copies_and_wakes_are_dropped(store, tables, status, is_pruned):
    ended(store, status)
    if is_pruned:
        prune_to_tombstone(tables)
    before = tables.everything()

    for message in (delivery(), wake(), delivery(send_id=None), wake(send_id="send-0")):
        assert refused(store, message) == f"it has {status}"
    assert tables.everything() == before


@pytest.mark.parametrize("status", sorted(Status.ENDED))
@pytest.mark.parametrize("is_pruned", [False, True])
def test_after_the_end_a_new_send_is_a_new_execution_with_the_next_token(store, tables, status, is_pruned):
    key = ended(store, status)
    if is_pruned:
        prune_to_tombstone(tables)
    message = Message("{}", "{}", b"new", None, None, None, "", "other")

    granted = claimed(store, delivery(send_id="send-2", message=message, task_name="proj.other"))

    assert granted.key.token == key.token + 1
    assert (granted.journal, granted.outcome, granted.recovered) == ((), None, False)
    row = tables.row()
    assert (row["status"], row["outcome"], row["finished_at"]) == ("running", None, None)
    assert (row["body"], row["routing_key"], row["send_id"]) == (b"new", "other", "send-2")
    assert row["task_name"] == "proj.other"
    assert tables.journal() == []


@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_copy_of_the_first_send_is_dropped_after_the_second(store, tables, is_pruned):
    ended(store)
    if is_pruned:
        prune_to_tombstone(tables)
    claimed(store, delivery(send_id="send-2"))
    assert refused(store, delivery()) == "an old message"
    key = LeaseKey("id", OWNER, tables.row()["token"])
    store.runs.end(key, Outcome(OutcomeKind.VALUE), TTL)
    store.runs.finish(key, Status.SUCCEEDED)
    before = tables.everything()

    assert refused(store, delivery()) == "an old message"
    assert store.claims.schedule(delivery(), Due()) == Refusal("an old message")
    assert tables.everything() == before


def test_the_wakes_of_the_execution_before_do_not_touch_the_new_one(store, tables):
    ended(store)
    claimed(store, delivery(send_id="send-2"))
    before = tables.everything()

    answer = claim(store, wake(send_id="send-1"), OTHER)

    assert answer == Refusal("an old message")
    assert tables.everything() == before


@pytest.mark.report("fencing")
def test_tokens_only_grow(store, tables):
    tokens = [claimed(store).key.token]
    for number in range(2, 6):
        tables.expire()
        tokens.append(claimed(store, wake(send_id=f"send-{number - 1}")).key.token)
        store.runs.end(LeaseKey("id", OWNER, tokens[-1]), Outcome(OutcomeKind.VALUE), TTL)
        store.runs.finish(LeaseKey("id", OWNER, tokens[-1]), Status.SUCCEEDED)
        prune_to_tombstone(tables)
        if number % 2:
            assert store.claims.schedule(delivery(send_id=f"send-{number}"), Due()) is None
            tokens.append(claimed(store, wake(send_id=f"send-{number}")).key.token)
        else:
            tokens.append(claimed(store, delivery(send_id=f"send-{number}")).key.token)

    assert tokens == sorted(set(tokens))


def test_the_successor_of_a_replaced_task_takes_over_while_its_predecessor_is_still_at_it(store, tables):
    key = claimed(store).key
    store.runs.record(key, [step(1)])

    granted = claimed(store, delivery(nesting=1), OTHER)

    assert (granted.key.token, granted.journal) == (2, ())
    assert not store.runs.finish(key, Status.REPLACED)
    assert tables.row()["nesting"] == 1
    assert refused(store, delivery(nesting=0)) == "an old message"


# -- eta and expires ---------------------------------------------------------------------------------


def test_a_message_with_an_eta_becomes_a_row_that_waits(store, tables):
    eta = store.now() + timedelta(hours=1)

    assert claim(store, delivery(eta=eta)) == Scheduled(eta)
    row = tables.row()
    assert (row["status"], row["owner"], row["token"], row["sends"]) == ("scheduled", None, 0, 0)
    assert abs(row["wake_at"] - eta) < timedelta(milliseconds=2)
    assert row["wake_at"] >= eta


def test_a_copy_of_a_message_with_an_eta_changes_nothing(store, tables):
    eta = store.now() + timedelta(hours=1)
    claim(store, delivery(eta=eta))
    before = tables.everything()

    assert refused(store, delivery(eta=eta + timedelta(hours=1))) == "it is scheduled"
    assert tables.everything() == before


def test_the_wake_of_a_row_that_waited_for_its_eta_runs_it_whatever_the_header_says(store, tables):
    eta = store.now() + timedelta(hours=1)
    claim(store, delivery(eta=eta))
    tables.send_wake()

    assert claimed(store, wake(eta=eta)).key.token == 1


def test_an_eta_that_has_passed_is_run_at_once(store):
    assert claimed(store, delivery(eta=store.now())).key.token == 1


def test_a_task_that_expired_before_its_first_start_is_claimed_only_to_say_so(store, tables):
    granted = claimed(store, delivery(expires=store.now()))

    assert granted.outcome == Outcome(OutcomeKind.EXPIRED)
    assert granted.key.token == 1
    row = tables.row()
    assert (row["status"], row["owner"]) == ("ending", OWNER)


def test_a_task_that_expired_while_it_waited_for_its_eta_is_claimed_only_to_say_so(store, tables):
    expires = store.now() + SECOND
    claim(store, delivery(eta=store.now() + timedelta(hours=1), expires=expires))
    tables.send_wake()
    store.time_offset[0] = 2.0

    granted = claimed(store, wake(expires=expires))

    assert granted.outcome == Outcome(OutcomeKind.EXPIRED)
    assert tables.row()["status"] == "ending"


def test_a_task_that_has_started_does_not_expire_asleep(store, tables):
    expires = store.now() + SECOND
    key = claimed(store, delivery(expires=expires)).key
    store.runs.park(key, Due(), entries=[sleep(1)])
    store.time_offset[0] = 2.0

    assert claimed(store, wake(expires=expires)).outcome is None


def test_a_task_that_has_not_expired_is_run(store):
    assert claimed(store, delivery(expires=store.now() + timedelta(hours=1))).outcome is None


# -- cancelled before ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"eta": datetime(2999, 1, 1, tzinfo=timezone.utc)}])
def test_a_task_that_was_cancelled_before_its_message_came_is_claimed_only_to_say_so(store, tables, options):
    store.verdicts.cancel(["id"], "not wanted")

    granted = claimed(store, delivery(**options))

    assert granted.outcome == Outcome(OutcomeKind.CANCELLED, "not wanted")
    assert store.queries.get("id").outcome == granted.outcome
    assert granted.key.token == 1
    row = tables.row()
    assert (row["status"], row["body"]) == ("ending", MESSAGE.body)


@pytest.mark.parametrize("seconds", [0, 3_600])
def test_a_countdown_that_was_cancelled_before_it_began_is_told_at_once(store, tables, seconds):
    store.verdicts.cancel(["id"], "not wanted")

    assert store.claims.schedule(delivery(), Due(seconds=seconds)) is None

    assert tables.row()["status"] == "ending"
    assert tables.due_in() <= 0
    assert claimed(store, wake()).outcome == Outcome(OutcomeKind.CANCELLED, "not wanted")


def test_a_late_wake_does_not_tell_of_a_cancel(store, tables):
    store.verdicts.cancel(["id"])
    before = tables.everything()

    assert refused(store, wake()) == "its row is gone"
    assert tables.everything() == before


# -- let in without running ----------------------------------------------------------------------------


def test_a_countdown_is_a_row_that_waits(store, tables):
    assert store.claims.schedule(delivery(), Due(seconds=3_600)) is None

    row = tables.row()
    assert (row["status"], row["owner"], row["token"], row["sends"]) == ("scheduled", None, 0, 0)
    assert 3_590 < tables.due_in() <= 3_600


def test_a_second_countdown_under_the_id_of_a_live_task_is_refused(store, tables):
    store.claims.schedule(delivery(), Due(seconds=3_600))
    before = tables.everything()

    assert store.claims.schedule(delivery(send_id="send-2"), Due()).is_fresh_send
    assert tables.everything() == before


def test_a_message_that_waits_in_a_worker_becomes_a_row_which_that_very_message_can_take(store, tables):
    assert store.claims.keep(delivery(), 120.0) is None
    assert (tables.row()["status"], tables.row()["sends"]) == ("scheduled", 1)
    assert 115 < tables.due_in() <= 120

    assert claimed(store, delivery()).key.token == 1
    assert store.claims.keep(wake("other"), 120.0) is None
    assert tables.row("other") is None


def test_a_message_that_was_kept_once_is_left_alone_when_it_is_kept_again(store, tables):
    store.claims.keep(delivery(), 120.0)
    before = tables.everything()

    assert store.claims.keep(delivery(), 120.0) is None
    assert tables.everything() == before


def test_a_kept_message_keeps_its_eta(store, tables):
    eta = store.now() + timedelta(hours=1)
    assert store.claims.keep(delivery(eta=eta), 120.0) is None

    assert tables.row()["sends"] == 0
    assert tables.due_in() > 3_590


@pytest.mark.parametrize("seconds", [1e10, 1e12, 1e300])
def test_a_countdown_into_the_far_future_is_still_a_row_that_waits(store, tables, seconds):
    store.claims.schedule(delivery(), Due(seconds=seconds))

    assert tables.row()["wake_at"].year in (2343, 2344, 9999)


@pytest.mark.parametrize(
    "instant",
    [datetime(9999, 12, 31, 23, 59, 59, 999_999, timezone.utc), datetime(1, 1, 2, tzinfo=timezone.utc)],
)
def test_every_instant_that_python_can_say_can_be_stored(store, tables, instant):
    store.claims.schedule(delivery(), Due(at=instant))

    assert abs(tables.row()["wake_at"] - instant) < timedelta(milliseconds=1)


def test_an_instant_is_stored_no_earlier_than_it_is(store, tables):
    instant = datetime(2030, 1, 1, 0, 0, 0, 123_001, timezone(timedelta(hours=5, minutes=30)))
    store.claims.schedule(delivery(), Due(at=instant))

    assert timedelta(0) <= tables.row()["wake_at"] - instant < timedelta(milliseconds=1)


def test_time_can_be_moved_for_a_test(store, tables):
    asleep(store, seconds=3_600)
    assert isinstance(claim(store, wake()), Refusal)

    store.time_offset[0] = 3_601.0

    granted = claimed(store, wake())
    assert granted.journal[0].is_over
    assert isinstance(granted, Claim)
