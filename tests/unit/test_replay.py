"""Positions, the ids that follow from them, and what fits what was journaled."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.records import JournalEntry, Kind
from celery_durable.replay import TIMER_NAMESPACE, Journal, describe, fits, timer_id

SLEEP = JournalEntry(1, Kind.SLEEP, "nap")
STEP = JournalEntry(2, Kind.STEP, "pay")
FAILED_STEP = JournalEntry(3, Kind.ERROR, "pay")


@pytest.mark.report("timer-id")
def test_the_timer_id_of_a_task_and_position_is_the_same_for_ever():
    # Written down: a release that computed another id would lose the timers of what sleeps.
    assert timer_id("task", 1) == "5d153d4c-52cb-5e61-b00e-686fdd584096"
    assert timer_id("task", 1) == str(uuid.uuid5(TIMER_NAMESPACE, "task/1"))


@pytest.mark.report("timer-id")
@given(st.text(), st.integers(1, 10**6), st.text(), st.integers(1, 10**6))
def test_another_task_or_position_gives_another_timer_id(task, position, other_task, other_position):
    is_same = (task, position) == (other_task, other_position)

    assert (timer_id(task, position) == timer_id(other_task, other_position)) == is_same


def test_positions_count_the_durable_calls_from_one():
    journal = Journal([])

    assert [journal.advance() for _ in range(3)] == [1, 2, 3]
    assert journal.position == 3


def test_each_position_finds_what_was_journaled_there_whatever_the_order_of_reading():
    journal = Journal([FAILED_STEP, SLEEP, STEP])
    found = []
    for _ in range(4):
        journal.advance()
        found.append(journal.recorded())

    assert found == [SLEEP, STEP, FAILED_STEP, None]


@pytest.mark.parametrize(
    ("entry", "kind", "name", "expected"),
    [
        (SLEEP, Kind.SLEEP, "nap", True),
        (SLEEP, Kind.SLEEP, "", False),
        (SLEEP, Kind.STEP, "nap", False),
        (STEP, Kind.STEP, "pay", True),
        (STEP, Kind.STEP, "refund", False),
        (STEP, Kind.SLEEP, "pay", False),
        (FAILED_STEP, Kind.STEP, "pay", True),
        (FAILED_STEP, Kind.STEP, "refund", False),
        (FAILED_STEP, Kind.SLEEP, "pay", False),
    ],
)
def test_an_entry_fits_a_call_of_its_kind_and_name(entry, kind, name, expected):
    assert fits(entry, kind, name) == expected


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Kind.STEP, "pay", "step 'pay'"),
        (Kind.ERROR, "pay", "step 'pay'"),
        (Kind.SLEEP, "nap", "sleep 'nap'"),
        (Kind.SLEEP, "", "sleep"),
    ],
)
def test_a_durable_call_is_named_as_the_user_knows_it(kind, name, words):
    assert describe(kind, name) == words
