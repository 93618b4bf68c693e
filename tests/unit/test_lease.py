"""A lease as its holder sees it: until when to believe in it, and that a loss is for good."""

from __future__ import annotations

import pytest

from celery_durable.errors import LeaseLost, LeaseRenewalTimedOut
from celery_durable.lease import EternalLease, Lease
from celery_durable.records import LeaseKey
from tests.unit.fakes import StillClock

KEY = LeaseKey("id", "celery@host:1:abc", 3)


@pytest.fixture
def clock():
    return StillClock(now=1_000.0)


@pytest.fixture
def lease(clock):
    return Lease(KEY, ttl=60, interval=10, clock=clock)


def test_a_lease_says_whose_and_which_it_is(lease):
    assert (lease.task_id, lease.owner, lease.token) == ("id", "celery@host:1:abc", 3)


@pytest.mark.report("local-deadline")
def test_of_sixty_seconds_with_an_interval_of_ten_the_holder_believes_in_fifty(lease, clock):
    assert lease.remaining == 50
    clock.now += 49.999
    assert not lease.lost
    clock.now += 0.001
    assert lease.lost


def test_the_deadline_is_the_end_itself(lease, clock):
    clock.now = lease.deadline

    assert lease.remaining == 0
    with pytest.raises(LeaseRenewalTimedOut):
        lease.check()


def test_the_seconds_count_from_when_the_claim_was_sent_and_not_from_when_it_was_answered(clock):
    lease = Lease(KEY, 60, 10, sent_at=990.0, clock=clock)

    assert lease.remaining == 40


def test_the_seconds_count_from_when_a_renewal_was_sent(lease, clock):
    clock.now += 30
    lease.renewed(sent_at=1_010.0)

    assert lease.remaining == 30  # of the 50 since the send, 20 went by until the answer


@pytest.mark.report("local-deadline")
@pytest.mark.parametrize("answer_takes", [0, 9, 10, 11, 49])
def test_a_slow_renewal_never_makes_the_holder_believe_longer_than_the_store(lease, clock, answer_takes):
    sent_at = clock.now
    stored_expiry_at_least = sent_at + lease.ttl  # the store reckons from when it got the statement
    clock.now += answer_takes

    lease.renewed(sent_at)

    assert clock.now + lease.remaining <= stored_expiry_at_least - lease.interval


def test_an_old_answer_that_comes_late_does_not_shorten_the_lease(lease, clock):
    clock.now += 20
    lease.renewed(sent_at=1_020.0)
    lease.renewed(sent_at=1_010.0)

    assert lease.remaining == 50


@pytest.mark.report("guard")
def test_a_lease_that_was_lost_stays_lost(lease):
    assert lease.mark_lost("it was taken")
    lease.renewed(sent_at=1_100.0)

    for _ in range(2):
        with pytest.raises(LeaseLost, match="it was taken") as lost:
            lease.check()
        assert not isinstance(lost.value, LeaseRenewalTimedOut)
    assert lease.remaining == 0
    assert lease.lost_event.is_set()


@pytest.mark.report("guard")
def test_a_lease_that_timed_out_stays_timed_out_even_if_the_renewal_is_confirmed_later(lease, clock):
    clock.now += 50
    lease.renewed(sent_at=clock.now - 1)

    with pytest.raises(LeaseRenewalTimedOut):
        lease.check()
    clock.now -= 40  # whatever a clock does
    with pytest.raises(LeaseRenewalTimedOut):
        lease.check()


def test_the_first_loss_is_the_one_that_counts(lease, clock):
    assert lease.mark_lost("it was taken")
    assert not lease.mark_lost("again")
    assert not lease.mark_timed_out()
    clock.now += 100

    assert (type(lease.loss), lease.loss.reason) == (LeaseLost, "it was taken")


def test_a_loss_says_which_task_and_token_it_is_about(lease):
    lease.mark_timed_out()

    assert (lease.loss.task_id, lease.loss.token) == ("id", 3)
    assert "within 50 s" in str(lease.loss)


def test_a_lease_that_the_run_gives_up_itself_cannot_be_lost_any_more(lease, clock):
    lease.close()
    clock.now += 100

    assert not lease.mark_lost("its row is parked")
    assert not lease.mark_timed_out()
    assert not lease.lost
    assert not lease.lost_event.is_set()


def test_a_lease_that_could_not_be_given_up_is_held_as_before(lease, clock):
    lease.close()
    lease.reopen()
    assert not lease.lost

    clock.now += 50
    assert lease.lost


def test_closing_does_not_undo_a_loss(lease):
    lease.mark_lost("it was taken")
    lease.close()

    with pytest.raises(LeaseLost):
        lease.check()


def test_the_lease_of_an_eager_run_never_ends():
    lease = EternalLease("id")

    lease.check()
    assert (lease.token, lease.task_id, lease.remaining, lease.lost) == (0, "id", float("inf"), False)
