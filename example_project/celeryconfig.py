"""Celery's settings. Where things are comes from the environment, as in any deployment:

CELERY_BROKER_URL             redis://localhost/0, amqp://localhost, ...
CELERY_RESULT_BACKEND         redis://localhost/1, db+postgresql+psycopg://localhost/shop, ...
CELERY_DURABLE_DATABASE_URL   postgresql+psycopg://localhost/shop, ...

Celery and celery_durable read these three by themselves. With none of them set, everything is a
file in the working directory, and no server is needed.
"""

from __future__ import annotations

from typing import Any

from example_project.days import days

timezone = "UTC"
task_serializer = "json"
result_serializer = "json"
accept_content = ["json"]

beat_schedule: dict[str, dict[str, Any]] = {
    # An ordinary task, as ever.
    "daily-digest": {
        "task": "example_project.tasks.send_digest",
        "schedule": days(1),
    },
    # A durable one: it goes on after its last finished page when a worker dies in the middle.
    "nightly-export": {
        "task": "example_project.tasks.export_customers",
        "schedule": days(1),
    },
}
