"""What a delivery means for the row of its id, what a lease that ran out means, and how long to wait."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.records import Delivery, Message, Outcome, OutcomeKind, Row, Status
from celery_durable.rules import (
    CRASH_CEILING,
    PAST_SENDS,
    RESEND_CEILING,
    TELLING_CEILING,
    Action,
    Outage,
    Ruling,
    count_crash,
    crash_delay,
    is_expired,
    publish_backoff,
    resend_delay,
    rule_on_crash,
    rule_on_delivery,
    sends_before,
    telling_delay,
)

NOW = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
LATER = NOW + timedelta(hours=1)
EARLIER = NOW - timedelta(hours=1)

MESSAGE = Message("{}", "{}", b"[[], {}, {}]", "application/json", "utf-8", None, "", "celery")
FIRST_SEND = Delivery(
    task_id="id",
    task_name="proj.task",
    send_id="send-1",
    version=0,
    nesting=0,
    is_wake=False,
    eta=None,
    expires=None,
    message=MESSAGE,
)
WAKE = replace(FIRST_SEND, is_wake=True)
OTHER_SEND = replace(FIRST_SEND, send_id="send-2")
OTHER_WAKE = replace(OTHER_SEND, is_wake=True)
UNMARKED = replace(FIRST_SEND, send_id=None)
SUCCESSOR = replace(FIRST_SEND, nesting=1)

RUNNING = Row(
    task_id="id",
    task_name="proj.task",
    status=Status.RUNNING,
    token=1,
    owner="worker",
    wake_at=LATER,
    sends=0,
    message_version=0,
    nesting=0,
    send_id="send-1",
    crashes=0,
    draining=False,
    outcome=None,
    has_message=True,
    now=NOW,
)
EXPIRED = replace(RUNNING, wake_at=EARLIER)
HANDED_BACK = replace(RUNNING, owner=None, wake_at=NOW)
SLEEPING = replace(RUNNING, status=Status.SLEEPING, owner=None)
OVERDUE = replace(SLEEPING, wake_at=EARLIER)
SENT = replace(SLEEPING, sends=1)
SCHEDULED = replace(SLEEPING, status=Status.SCHEDULED, token=0)
RETRYING = replace(SLEEPING, status=Status.RETRYING)
ENDING = replace(RUNNING, status=Status.ENDING, outcome=Outcome(OutcomeKind.VALUE))
CANCELLED_WHILE_LIVE = replace(
    SLEEPING, status=Status.ENDING, outcome=Outcome(OutcomeKind.CANCELLED), wake_at=NOW
)
SET_ASIDE = replace(SLEEPING, status=Status.QUARANTINED, wake_at=None)
BARE_CANCEL = replace(
    SLEEPING,
    task_name="",
    status=Status.CANCELLED,
    token=0,
    send_id=None,
    wake_at=None,
    outcome=Outcome(OutcomeKind.CANCELLED),
    has_message=False,
)

LIVE = [RUNNING, SLEEPING, SCHEDULED, RETRYING, ENDING, CANCELLED_WHILE_LIVE]


def ended(status: str) -> Row:
    return replace(RUNNING, status=status, owner=None, wake_at=None, outcome=Outcome(OutcomeKind.VALUE))


def tombstone(status: str) -> Row:
    return replace(ended(status), outcome=None, has_message=False)


ENDED = [ended(status) for status in sorted(Status.ENDED)]
TOMBSTONES = [tombstone(status) for status in sorted(Status.ENDED)]
OVER = [*ENDED, *TOMBSTONES]


def name_of(value: object) -> str | None:
    """How a row shows in a test's name."""
    if not isinstance(value, Row):
        return None
    kind = "tombstone-" if not value.has_message else ""
    return f"{kind}{value.status}{'-owned' if value.owner else ''}{'-sent' if value.sends else ''}"


# -- no row, or a row that only remembers a cancel -------------------------------------------------


@pytest.mark.parametrize("delivery", [FIRST_SEND, OTHER_SEND, UNMARKED, SUCCESSOR])
def test_the_first_message_of_an_id_opens_an_execution(delivery):
    assert rule_on_delivery(None, delivery).action is Action.OPEN


def test_a_wake_whose_row_is_gone_is_dropped():
    ruling = rule_on_delivery(None, WAKE)

    assert ruling.action is Action.REFUSE
    assert ruling.reason == "its row is gone"
    assert not ruling.is_fresh_send


@pytest.mark.parametrize("delivery", [FIRST_SEND, OTHER_SEND, UNMARKED, SUCCESSOR])
def test_the_first_message_of_an_id_that_was_cancelled_before_is_let_in_only_to_tell_of_the_cancel(delivery):
    ruling = rule_on_delivery(BARE_CANCEL, delivery)

    assert (ruling.action, ruling.verdict) == (Action.REOPEN, OutcomeKind.CANCELLED)


def test_an_ancient_wake_does_not_tell_of_a_cancel_that_came_after_its_row_was_pruned():
    assert rule_on_delivery(BARE_CANCEL, WAKE).action is Action.REFUSE


# -- a live row ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [SENT, OVERDUE, HANDED_BACK, EXPIRED, CANCELLED_WHILE_LIVE], ids=name_of)
@pytest.mark.parametrize("delivery", [FIRST_SEND, WAKE, UNMARKED])
def test_a_live_row_that_waits_for_a_message_is_taken_by_any_of_its_own(row, delivery):
    assert rule_on_delivery(row, delivery).action is Action.TAKE


@pytest.mark.parametrize("seconds", [-0.001, 0, 0.001])
def test_a_lease_is_taken_over_at_its_expiry_and_not_before(seconds):
    row = replace(RUNNING, wake_at=NOW + timedelta(seconds=seconds))

    taken = rule_on_delivery(row, WAKE).action is Action.TAKE

    assert taken == (seconds <= 0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (RUNNING, "worker holds its lease"),
        (ENDING, "worker holds its lease"),
        (SLEEPING, "it is sleeping"),
        (SCHEDULED, "it is scheduled"),
        (RETRYING, "it is retrying"),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("delivery", [FIRST_SEND, WAKE, UNMARKED])
def test_a_copy_that_comes_while_the_task_runs_or_sleeps_is_dropped_quietly(row, reason, delivery):
    ruling = rule_on_delivery(row, delivery)

    assert (ruling.action, ruling.reason, ruling.is_fresh_send) == (Action.REFUSE, reason, False)


@pytest.mark.parametrize("row", [*LIVE, SENT, OVERDUE, EXPIRED, SET_ASIDE], ids=name_of)
def test_another_send_under_the_id_of_a_live_task_is_dropped_and_pointed_out(row):
    ruling = rule_on_delivery(row, OTHER_SEND)

    assert (ruling.action, ruling.is_fresh_send) == (Action.REFUSE, True)
    assert row.status in ruling.reason


@pytest.mark.parametrize("row", [*LIVE, SENT, OVERDUE, EXPIRED], ids=name_of)
def test_a_late_wake_of_an_earlier_execution_of_the_id_is_dropped_quietly(row):
    ruling = rule_on_delivery(row, OTHER_WAKE)

    assert (ruling.action, ruling.is_fresh_send) == (Action.REFUSE, False)


def test_a_row_without_a_send_id_takes_any_message_for_its_own():
    row = replace(SENT, send_id=None)

    assert rule_on_delivery(row, OTHER_SEND).action is Action.TAKE


@pytest.mark.parametrize(
    "delivery",
    [replace(FIRST_SEND, version=0), replace(WAKE, version=0), replace(WAKE, version=2)],
)
def test_a_message_of_another_version_than_the_row_s_is_an_old_one(delivery):
    row = replace(SENT, message_version=1)

    ruling = rule_on_delivery(row, delivery)

    assert (ruling.action, ruling.reason) == (Action.REFUSE, "an old message")


def test_the_wake_of_a_retry_is_told_from_the_first_message_by_its_version():
    row = replace(RETRYING, message_version=1, sends=1)

    assert rule_on_delivery(row, replace(WAKE, version=1)).action is Action.TAKE


@pytest.mark.parametrize("row", [*LIVE[:5], SENT, EXPIRED, SET_ASIDE], ids=name_of)
def test_the_successor_of_a_replaced_task_takes_the_id_over_even_before_its_row_has_ended(row):
    assert rule_on_delivery(row, SUCCESSOR).action is Action.REOPEN


@pytest.mark.parametrize("row", [*LIVE[:5], SENT, EXPIRED, SET_ASIDE, *OVER], ids=name_of)
def test_a_successor_sent_by_a_run_that_had_lost_its_lease_is_dropped(row):
    row = replace(row, token=3)

    assert rule_on_delivery(row, replace(SUCCESSOR, predecessor=2)).action is Action.REFUSE
    assert rule_on_delivery(row, replace(SUCCESSOR, predecessor=3)) == rule_on_delivery(row, SUCCESSOR)


def test_a_task_that_was_cancelled_while_it_replaced_itself_stays_cancelled():
    ruling = rule_on_delivery(CANCELLED_WHILE_LIVE, SUCCESSOR)

    assert (ruling.action, ruling.reason) == (Action.REFUSE, "an old message")


def test_a_message_from_before_a_replacement_is_an_old_one():
    row = replace(SENT, nesting=1)

    assert rule_on_delivery(row, FIRST_SEND).action is Action.REFUSE
    assert rule_on_delivery(row, WAKE).action is Action.REFUSE
    assert rule_on_delivery(row, replace(WAKE, nesting=1)).action is Action.TAKE


@pytest.mark.parametrize("delivery", [FIRST_SEND, WAKE, UNMARKED])
def test_a_task_that_diverged_waits_for_a_person_and_not_for_a_message(delivery):
    ruling = rule_on_delivery(SET_ASIDE, delivery)

    assert (ruling.action, ruling.reason) == (Action.REFUSE, "it is quarantined")


# -- an ended row ----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", OVER, ids=name_of)
@pytest.mark.parametrize("delivery", [FIRST_SEND, UNMARKED])
def test_a_copy_that_comes_after_the_end_is_dropped(row, delivery):
    ruling = rule_on_delivery(row, delivery)

    assert (ruling.action, ruling.reason) == (Action.REFUSE, f"it has {row.status}")
    assert not ruling.is_fresh_send


@pytest.mark.parametrize("row", OVER, ids=name_of)
@pytest.mark.parametrize("delivery", [WAKE, OTHER_WAKE])
def test_a_wake_that_comes_after_the_end_is_dropped(row, delivery):
    assert rule_on_delivery(row, delivery).action is Action.REFUSE


@pytest.mark.parametrize("row", OVER, ids=name_of)
def test_a_new_send_after_the_end_starts_a_new_execution(row):
    ruling = rule_on_delivery(row, OTHER_SEND)

    assert (ruling.action, ruling.verdict) == (Action.REOPEN, None)


@pytest.mark.parametrize("row", [RUNNING, SLEEPING, *OVER], ids=name_of)
@pytest.mark.parametrize("nesting", [0, 1])
def test_a_copy_of_a_send_before_the_one_at_hand_is_dropped_without_a_word(row, nesting):
    twice_sent = replace(row, past_sends=("send-0", str(OTHER_SEND.send_id)))

    ruling = rule_on_delivery(twice_sent, replace(OTHER_SEND, nesting=nesting))

    assert ruling == Ruling(Action.REFUSE, "an old message")


def test_a_row_remembers_the_sends_of_its_id_until_they_are_many():
    row = OVER[0]
    for number in range(PAST_SENDS + 3):
        send = replace(FIRST_SEND, send_id=f"again-{number}")
        row = replace(row, send_id=send.send_id, past_sends=sends_before(row, send))

    assert row.past_sends == tuple(f"again-{number}" for number in range(2, PAST_SENDS + 2))


def test_a_message_that_takes_the_row_over_under_its_own_send_is_no_send_of_its_own():
    assert sends_before(OVER[0], SUCCESSOR) == ()
    assert sends_before(replace(OVER[0], send_id=None), OTHER_SEND) == ()


@pytest.mark.parametrize("row", OVER, ids=name_of)
def test_the_successor_of_a_replaced_task_goes_on_unless_it_was_cancelled(row):
    allowed = rule_on_delivery(row, SUCCESSOR).action is Action.REOPEN

    assert allowed == (row.status != Status.CANCELLED)


# -- expires ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [None, SCHEDULED, *OVER], ids=name_of)
def test_a_task_expires_before_its_first_start(row):
    assert is_expired(replace(FIRST_SEND, expires=EARLIER), row, NOW)
    assert is_expired(replace(FIRST_SEND, expires=NOW), row, NOW)
    assert not is_expired(replace(FIRST_SEND, expires=LATER), row, NOW)
    assert not is_expired(FIRST_SEND, row, NOW)


@pytest.mark.parametrize("row", [RUNNING, SLEEPING, RETRYING, ENDING, EXPIRED], ids=name_of)
def test_a_task_that_has_started_does_not_expire(row):
    assert not is_expired(replace(WAKE, expires=EARLIER), row, NOW)


# -- crashes ---------------------------------------------------------------------------------------


def crash(row: Row = EXPIRED, *, limit: int | None = 3, outage: Outage | None = None):
    return rule_on_crash(row, max_crashes=limit, ttl=60, outage=outage)


def test_a_lease_that_ran_out_counts_as_a_crash():
    ruling = crash()

    assert (ruling.crashes, ruling.counts, ruling.quarantine) == (1, True, False)


@pytest.mark.parametrize("before", range(5))
def test_a_task_is_quarantined_when_its_crashes_reach_the_limit(before):
    ruling = crash(replace(EXPIRED, crashes=before))

    assert ruling.crashes == before + 1
    assert ruling.quarantine == (before + 1 >= 3)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_limit_of_none_or_one_quarantines_at_the_first_crash(limit):
    assert crash(limit=limit).quarantine


def test_without_a_limit_nothing_is_quarantined():
    assert not crash(replace(EXPIRED, crashes=10**6), limit=None).quarantine


def test_an_outcome_that_could_not_be_told_is_never_quarantined():
    row = replace(ENDING, wake_at=EARLIER, crashes=10)

    ruling = crash(row)

    assert (ruling.crashes, ruling.quarantine) == (11, False)


def test_a_worker_that_had_been_told_to_stop_did_not_crash():
    ruling = crash(replace(EXPIRED, draining=True, crashes=2))

    assert (ruling.crashes, ruling.counts, ruling.quarantine, ruling.delay) == (2, False, False, 0.0)


@pytest.mark.parametrize(
    ("expiry", "excused"),
    [
        (-3_601, False),  # before the outage began: an ordinary crash
        (-3_600, True),
        (-1_800, True),
        (0, True),
        # The holder stopped by itself in the outage; its lease was due to run until a ttl after it.
        (60, True),
        (60.001, False),
    ],
)
def test_a_lease_that_ran_out_in_an_outage_is_no_crash(expiry, excused):
    outage = Outage(began=NOW - timedelta(hours=1), ended=NOW)
    row = replace(RUNNING, wake_at=NOW + timedelta(seconds=expiry), now=LATER)

    assert crash(row, outage=outage).counts != excused


def test_a_crash_that_is_excused_leaves_the_count_as_it_was():
    assert count_crash(replace(EXPIRED, crashes=2), max_crashes=3, excused=True).crashes == 2


# -- pauses ----------------------------------------------------------------------------------------


@pytest.mark.report("kills-its-worker")
def test_the_first_crash_is_made_up_for_at_once_and_the_next_ones_wait_longer_and_longer():
    assert [crash_delay(n) for n in range(6)] == [0, 0, 2, 4, 8, 16]
    assert crash_delay(1_000) == CRASH_CEILING


def test_a_wake_that_nobody_claims_is_sent_again_after_a_pause_that_doubles_up_to_an_hour():
    assert [resend_delay(n, 120) for n in range(1, 7)] == [120, 240, 480, 960, 1_920, 3_600]
    assert resend_delay(10**9, 120) == RESEND_CEILING


def test_a_resend_delay_of_more_than_an_hour_is_kept():
    assert resend_delay(1, 7_200) == resend_delay(9, 7_200) == 7_200


def test_a_broker_that_is_away_is_tried_again_within_half_a_minute():
    assert [publish_backoff(n) for n in (1, 2, 3)] == [0.5, 1, 2]
    assert publish_backoff(10**9) == 30


@given(st.integers(min_value=0, max_value=10**12))
def test_pauses_never_shrink_and_never_overflow(count):
    assert crash_delay(count) <= crash_delay(count + 1) <= CRASH_CEILING
    assert resend_delay(count, 120) <= resend_delay(count + 1, 120) <= RESEND_CEILING
    assert publish_backoff(count) <= publish_backoff(count + 1) <= 30


def test_the_more_often_an_outcome_could_not_be_told_the_longer_it_waits():
    assert [telling_delay(refusals) for refusals in range(4)] == [1.0, 2.0, 4.0, 8.0]
    assert telling_delay(10**9) == TELLING_CEILING
