"""When beat entries run: occurrences, lateness, and whether an entry has changed.

Everything here is a function of its arguments. Nothing reads a clock or a database; the instants
that go in and come out are aware datetimes in UTC. This is the one pure package that knows
Celery's schedule classes.

* ``next_run`` gives the first occurrence after an instant.
* ``advance`` says what to do with an entry whose ``next_run_at`` has come, and when it is next due.
* ``ask`` is how a schedule class of somebody else is consulted.
* ``definition_hash`` tells a changed entry from an unchanged one.
"""

from __future__ import annotations

from celery_durable.calendar.definition import definition_hash
from celery_durable.calendar.misfire import (
    MISFIRE_POLICIES,
    SKIP_GRACE,
    Advance,
    Fire,
    MisfirePolicy,
    Skip,
    Wait,
    advance,
    check_misfire,
    decide_misfire,
)
from celery_durable.calendar.occurrence import (
    ASK_WITHIN,
    SHORTEST_PERIOD,
    Answer,
    ask,
    is_custom,
    next_run,
)

__all__ = [
    "ASK_WITHIN",
    "MISFIRE_POLICIES",
    "SHORTEST_PERIOD",
    "SKIP_GRACE",
    "Advance",
    "Answer",
    "Fire",
    "MisfirePolicy",
    "Skip",
    "Wait",
    "advance",
    "ask",
    "check_misfire",
    "decide_misfire",
    "definition_hash",
    "is_custom",
    "next_run",
]
