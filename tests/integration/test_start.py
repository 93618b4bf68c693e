"""What cannot start says so in one line, and its exit code tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes import LocalProcess
from tests.nodes.workers import ROOT, celery_command

PROJECT = """
from celery import Celery
from celery_durable import Durable, DurableTask

app = Celery("proj", broker="memory://")
app.conf.update({settings})
Durable(app)

@app.task(base=DurableTask, **{options})
def task():
    pass
"""
WRONG = {"durable_lease_ttl": "x", "durable_databse_url": "sqlite://"}
WITHOUT_TABLES = {"durable_database_url": "sqlite:///empty.db", "durable_auto_upgrade": False}
AWAY = {"durable_database_url": "postgresql://me:secret@127.0.0.1:1/db"}
WORKER, BEAT = ("worker", "-P", "solo"), ("beat", "-s", "schedule", "--pidfile=")
#: It prints no banner, which is where a beat is first asked for its settings.
QUIET_BEAT = ("-q", *BEAT)


@pytest.mark.parametrize(
    ("command", "settings", "options", "said"),
    [
        (WORKER, WRONG, {}, ["durable_lease_ttl must be", "did you mean durable_database_url"]),
        (BEAT, WRONG, {}, ["durable_lease_ttl must be", "did you mean durable_database_url"]),
        (QUIET_BEAT, WRONG, {}, ["durable_lease_ttl must be", "did you mean durable_database_url"]),
        (BEAT, {}, {"max_crashes": "x"}, ["task proj.task: max_crashes"]),
        (WORKER, WITHOUT_TABLES, {}, ["there are no tables in sqlite:///empty.db yet"]),
        (BEAT, WITHOUT_TABLES, {}, ["there are no tables in sqlite:///empty.db yet"]),
        (WORKER, AWAY, {}, ["The durable database is not available"]),
    ],
    ids=["worker", "beat", "quiet beat", "option", "worker, no tables", "beat, no tables", "database"],
)
def test_it_ends_with_one_line_that_names_the_cause(
    tmp_path: Path,
    command: tuple[str, ...],
    settings: dict[str, object],
    options: dict[str, object],
    said: list[str],
) -> None:
    (tmp_path / "proj.py").write_text(PROJECT.format(settings=settings, options=options))
    # Unbuffered: in the order in which it was printed.
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    process = LocalProcess("it", celery_command("proj", *command), folder=tmp_path, env=env)
    process.start()
    try:
        process.wait(30)
    finally:
        process.remove()
    assert process.exit_code == 1
    lines = process.logs().strip().splitlines()
    assert "Traceback" not in process.logs()
    assert all(text in lines[-1] for text in said), lines
    assert "secret" not in process.logs()
