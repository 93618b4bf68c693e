"""The Celery application: `celery -A example_project worker`, `celery -A example_project beat`."""

from __future__ import annotations

from celery import Celery

from celery_durable import Durable

app = Celery("example_project", include=["example_project.tasks", "example_project.runs"])
app.config_from_object("example_project.celeryconfig")
durable = Durable(app)

if __name__ == "__main__":
    app.start()
