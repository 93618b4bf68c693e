"""procrastinate: jobs with a time at which they start."""

from __future__ import annotations

from datetime import datetime, timezone

from procrastinate import App, PsycopgConnector

from benchmarks.marks import mark
from benchmarks.peers.run import Jobs


def prepare(url: str) -> None:
    with _app(url).open() as app:
        app.schema_manager.apply_schema()


def fill(url: str, jobs: Jobs) -> None:
    with _app(url).open() as app:
        for due in jobs.dues:
            when = {"schedule_at": datetime.fromtimestamp(due, timezone.utc)} if due else {}
            app.configure_task("noop", **when).defer(label=jobs.label, due=due)


def work(url: str, tuned: bool) -> None:
    options = {"fetch_job_polling_interval": 0.05} if tuned else {}
    _app(url).run_worker(**options)


def _app(url: str) -> App:
    app = App(connector=PsycopgConnector(conninfo=url))
    app.task(name="noop")(noop)
    return app


async def noop(label: str, due: float) -> None:
    """A job that does nothing."""
    mark(label, due)
