"""The app of tests that have none of their own."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_durable.extension import Durable


class OwnApp(Celery):
    """An app whose tasks are its own: by default Celery gives each task to every app of the process."""

    def task(self, *args: Any, **options: Any) -> Any:
        options.setdefault("shared", False)
        return super().task(*args, **options)


def durable_app() -> OwnApp:
    """A new one."""
    app = OwnApp("durable-tests", set_as_current=False)
    Durable(app)
    return app
