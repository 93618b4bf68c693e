"""Durable tasks in a Django project: its settings, its apps, its transactions and its connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, text

from celery_durable import Durable
from tests.nodes import DEPLOYMENTS, Bench, Servers

TASKS = "tests.integration.django_site.trials.tasks"


class Site:
    """A worker and a beat of the Django project, and a client of it that knows no Django."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        urls = bench.env["CELERY_BROKER_URL"], bench.env["CELERY_RESULT_BACKEND"]
        self.app = Celery("client", broker=urls[0], backend=urls[1], set_as_current=False)
        self.app.conf.task_default_queue = "site"
        Durable(self.app, namespace="of the site")
        self.database: Engine = create_engine(bench.store_url)

    def send(self, task: str, *args: Any) -> Any:
        return self.app.send_task(f"{TASKS}.{task}", args)

    def status(self, result: Any) -> str:
        return str(self.app.durable.get(result.id).status)

    def names(self) -> list[str]:
        """What Django's table holds, as committed."""
        return [str(row.name) for row in self.ask("select name from trials_trial order by id")]

    def connections(self) -> int:
        """How many connections of Django's there are."""
        (row,) = self.ask("select count(*) from pg_stat_activity where application_name = 'django'")
        return int(row.count)

    def ask(self, statement: str) -> list[Any]:
        with self.database.begin() as connection:
            answer = connection.execute(text(statement))
            return list(answer) if answer.returns_rows else []


@pytest.fixture(scope="module")
def bench(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A place for the project; nothing of it is imported into the test's process."""
    module = "tests.integration.django_site.celery"
    folder = tmp_path_factory.mktemp("django")
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = Bench(DEPLOYMENTS["redis-postgres"], servers, folder, module, monkeypatch)
        yield bench
        bench.close()


@pytest.fixture(scope="module")
def running(bench: Bench) -> Iterator[Site]:
    """One worker and one beat for all tests of this module."""
    site = Site(bench)
    site.ask("create table trials_trial (id serial primary key, name text)")
    worker, beat = bench.worker(wait=False), bench.beat(wait=False)
    worker.wait_until_ready()
    beat.wait_until_ready()
    yield site
    site.app.close()
    site.database.dispose()


@pytest.fixture
def site(running: Site, bench: Bench) -> Site:
    """The bench shows the logs if a test fails."""
    return running


def test_a_shared_task_is_found_and_sleeps_without_a_connection_of_django_s(site: Site) -> None:
    result = site.send("onboard", "Ada", 600)
    site.bench.wait_for(lambda: result.state == "SLEEPING" and site.status(result) == "sleeping")
    assert site.names() == ["Ada"]
    site.bench.wait_for(lambda: site.connections() == 0, message="Django's connections are closed")
    site.app.durable.wake(result.id)
    assert result.get(timeout=20) == "Ada, converted"
    assert site.names() == ["Ada, converted"]
    site.bench.wait_for(lambda: site.connections() == 0, message="Django's connections are closed")


@pytest.mark.report("sent-before-commit")
@pytest.mark.parametrize("catches", [False, True])
def test_a_sleep_inside_a_block_is_refused_and_a_rollback_leaves_nothing(site: Site, catches: bool) -> None:
    before = site.names()
    result = site.send("sleep_in_a_block", "Bob", catches)
    with pytest.raises(Exception, match="rolled back" if catches else "inside an open database transaction"):
        result.get(timeout=20)
    site.bench.wait_for(lambda: site.status(result) == "failed")
    row = site.app.durable.get(result.id)
    assert (row.wake_at, row.journal) == (None, ())
    assert site.names() == before


@pytest.mark.report("sent-before-commit")
def test_a_long_transaction_neither_delays_nor_undoes_a_renewal(site: Site) -> None:
    result = site.send("work_in_a_block", "Cleo", 4.5)
    assert result.get(timeout=20) == 1
    site.bench.wait_for(lambda: site.status(result) == "succeeded")
    assert site.app.durable.get(result.id).token == 1
    assert site.names().count("Cleo") == 1


@pytest.mark.report("sent-before-commit")
def test_what_is_sent_on_commit_starts_if_and_only_if_the_block_commits(site: Site) -> None:
    with pytest.raises(ValueError, match="rolled back"):
        site.send("order", "Dan", True).get(timeout=20)
    site.send("order", "Eve", False).get(timeout=20)
    site.bench.wait_for(lambda: "Eve, later, converted" in site.names())
    assert not [name for name in site.names() if name.startswith("Dan")]
