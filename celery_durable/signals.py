"""Signals, used like Celery's own: ``@task_parked.connect`` and a receiver that takes ``**kwargs``.

The sender is the task object where the process has it, else the task's name. They are sent after
the commit that they tell of, in the process that made it; an error in a receiver is logged.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ("lease_lost", "task_parked", "task_quarantined", "task_recovered", "task_woken")

#: A task went to sleep. ``name``: the sleep's name or None; ``due_at``: aware datetime, UTC.
task_parked = Signal(name="task_parked", providing_args=("task_id", "token", "name", "due_at"))

#: A task goes on after a sleep, with the token of its new lease. ``name``, ``due_at``: as above.
task_woken = Signal(name="task_woken", providing_args=("task_id", "token", "name", "due_at"))

#: A task whose worker died runs again. ``crashes``: int, since its last progress.
task_recovered = Signal(name="task_recovered", providing_args=("task_id", "token", "crashes"))

#: A run lost its lease. ``token``: the lost one; ``reason``: str.
lease_lost = Signal(name="lease_lost", providing_args=("task_id", "token", "reason"))

#: A task was taken out of service until it is released. ``reason``: str.
task_quarantined = Signal(name="task_quarantined", providing_args=("task_id", "token", "reason"))
