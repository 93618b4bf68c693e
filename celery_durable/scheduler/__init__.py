"""What runs inside a scheduler, be it ``celery beat`` or ``celery durable scheduler``.

* ``ticker``: one round: run due entries, dispatch due rows, keep house, wait for the next thing.
* ``plan``: the entries of a beat schedule, and what the database knows about them.
* ``entry``: Celery's schedule entry with a policy for missed runs.
* ``deferral``: signals that would end the process between a publish and the note of it.
* ``state``: what a supervisor may know of the scheduler.
* ``standalone``: the scheduler as a process of its own, without a beat schedule.
"""

from __future__ import annotations

from celery_durable.scheduler.standalone import run_scheduler

__all__ = ["run_scheduler"]
