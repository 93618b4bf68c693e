"""Little or nothing configured: files in the working directory, a user's own settings, no database."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery, Task, group
from celery.exceptions import ImproperlyConfigured

from celery_durable import (
    ConfigurationError,
    Durable,
    DurableTask,
    NotDurable,
    StepLimitExceeded,
    current_lease,
    sleep,
    sleep_until,
    step,
)
from tests.integration.support import assert_no_traceback, start_worker_and_beat, wait_until_asleep
from tests.nodes import Bench, on
from tests.nodes.workers import ROOT

NOTHING_CONFIGURED = """
from celery import Celery
from celery_durable import Durable, DurableTask, sleep

app = Celery()
durable = Durable(app)

@app.task(base=DurableTask)
def nap(seconds):
    sleep(seconds)
    return "awake"

@app.task
def add(x, y):
    return x + y
"""

USUAL_PROJECT = """
from celery import Celery, shared_task
from celery_durable import Durable, DurableTask, sleep

app = Celery("shop")
app.config_from_object("shopconfig", namespace="CELERY")
durable = Durable()
durable.init_app(app)
durable.init_app(app)

@shared_task(base=DurableTask)
def shared(seconds):
    sleep(seconds)
    return "shared"

@durable.task(bind=True)
def short(self, seconds):
    self.sleep(seconds)
    return self.name

@app.task
def plain():
    return "plain"
"""

USUAL_SETTINGS = """
CELERY_BROKER_URL = {broker!r}
CELERY_RESULT_BACKEND = {results!r}
CELERY_DURABLE_DATABASE_URL = {store!r}
CELERY_DURABLE_TABLE_PREFIX = "shop_durable_"
CELERY_DURABLE_NAMESPACE = "the shop"
CELERY_DURABLE_POLL_INTERVAL = 0.1
CELERY_TASK_DEFAULT_QUEUE = "shop"
CELERY_TIMEZONE = "Europe/Berlin"
"""


class TestNothingConfigured:
    @pytest.fixture
    def bench_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        (tmp_path / "bare.py").write_text(NOTHING_CONFIGURED)
        monkeypatch.syspath_prepend(tmp_path)
        return "bare"

    @on("embedded-sqlite")
    def test_a_worker_and_a_beat_in_one_folder_are_an_application(self, bench: Bench) -> None:
        worker, beat = start_worker_and_beat(bench)
        nap = bench.project.nap
        result = nap.delay(2)
        wait_until_asleep(bench, result)
        bench.wait_for(bench.queue_is_empty)
        values = group([*(nap.s(1.2) for _ in range(5)), *(bench.project.add.s(n, n) for n in range(20))])
        assert values.delay().get(timeout=20) == ["awake"] * 5 + [2 * n for n in range(20)]
        assert result.get(timeout=15) == "awake"
        assert bench.app().control.ping([worker.hostname], timeout=3)
        made = {path.name for path in bench.folder.iterdir()}
        assert {"celery-durable.db", "celery-durable-broker", "celery-durable-results.db"} <= made
        assert worker.stop() == 0
        assert beat.stop() == 0
        assert_no_traceback(bench)


class TestUsualConfiguration:
    @pytest.fixture
    def bench_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        (tmp_path / "shop.py").write_text(USUAL_PROJECT)
        monkeypatch.syspath_prepend(tmp_path)
        return "shop"

    @on("redis-postgres")
    def test_a_namespace_of_settings_in_a_module(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = USUAL_SETTINGS.format(
            broker=bench.env.pop("CELERY_BROKER_URL"),
            results=bench.env.pop("CELERY_RESULT_BACKEND"),
            store=bench.env.pop("CELERY_DURABLE_DATABASE_URL"),
        )
        (bench.folder / "shopconfig.py").write_text(settings)
        for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "CELERY_DURABLE_DATABASE_URL"):
            monkeypatch.delenv(name)
        monkeypatch.delitem(sys.modules, "shopconfig", raising=False)
        start_worker_and_beat(bench)
        shop = bench.project
        assert shop.durable.settings.namespace == "the shop"
        results = [shop.shared.delay(1.2), shop.short.delay(1.2), shop.plain.delay()]
        assert [result.get(timeout=15) for result in results] == ["shared", "shop.short", "plain"]
        assert bench.store_server is not None
        counted = bench.store_server.execute(
            "SELECT namespace, count(*) FROM shop_durable_executions GROUP BY 1",
            database=bench.store_url.rpartition("/")[2],
        )
        assert counted == [("the shop", 2)]
        assert_no_traceback(bench)

    @on("redis-postgres")
    def test_a_wrong_setting_stops_worker_and_beat_at_once(self, bench: Bench) -> None:
        (bench.folder / "shopconfig.py").write_text(
            "CELERY_DURABLE_LEASE_TTL = 10\nCELERY_DURABLE_HEARTBEAT_INTERVAL = 9\n"
            "CELERY_DURABLE_POLL_INTREVAL = 1\n"
        )
        for command in (["worker", "-c", "1"], ["beat"]):
            done = bench.celery(*command, timeout=30)
            said = done.stdout + done.stderr
            assert done.returncode != 0, command
            assert "durable_heartbeat_interval" in said
            assert "did you mean CELERY_DURABLE_POLL_INTERVAL?" in said


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Celery:
    """An app with a database and a broker that do not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CELERY_DURABLE_DATABASE_URL", raising=False)
    app = Celery("eager", broker="redis://127.0.0.1:1/0", backend="cache+memory://", set_as_current=False)
    app.conf.durable_database_url = "postgresql://nobody@127.0.0.1:1/nothing"
    Durable(app)
    return app


@pytest.fixture
def onboard(app: Celery) -> Task:
    """A task that sleeps for years."""
    calls: list[str] = []

    @app.task(base=DurableTask, bind=True, name="onboard")
    def onboard(self: DurableTask, user: str) -> list[object]:
        first = step(str.upper, user)
        sleep(days=3000)
        self.sleep_until(self.app.now().replace(year=9000))
        lease = current_lease()
        lease.check()
        calls.append(user)
        return [first, self.step(tuple, [1, 2]), lease.token, lease.lost]

    return onboard


class TestWithoutADatabase:
    def test_apply_sleeps_not_at_all(self, onboard: Task, tmp_path: Path) -> None:
        assert onboard.apply(("ann",)).get() == ["ANN", [1, 2], 0, False]
        assert list(tmp_path.iterdir()) == []

    def test_always_eager_sleeps_not_at_all(self, app: Celery, onboard: Task) -> None:
        app.conf.task_always_eager = True
        assert onboard.delay("ann").get() == ["ANN", [1, 2], 0, False]
        assert onboard.apply_async(("bob",), countdown=3600).get() == ["BOB", [1, 2], 0, False]

    def test_an_eager_chain_goes_on(self, app: Celery, onboard: Task) -> None:
        app.conf.task_always_eager = True

        @app.task(base=DurableTask)
        def count(values: list[object]) -> int:
            sleep(3600)
            return len(values)

        assert (onboard.s("ann") | count.s()).delay().get() == 4

    def test_an_eager_run_refuses_bad_arguments_as_a_worker_does(self, app: Celery) -> None:
        @app.task(base=DurableTask)
        def wrong() -> None:
            sleep(True)

        with pytest.raises(TypeError, match="duration"):
            wrong.apply(throw=True)

    def test_an_eager_run_has_the_step_limit(self, app: Celery) -> None:
        app.conf.durable_step_limit = 3

        @app.task(base=DurableTask)
        def long() -> None:
            for _ in range(4):
                step(int)

        with pytest.raises(StepLimitExceeded):
            long.apply(throw=True)


class TestDirectCall:
    @pytest.mark.parametrize("call", [lambda: sleep(1), lambda: step(int), current_lease])
    def test_what_is_durable_is_refused(self, app: Celery, call: object) -> None:
        @app.task(base=DurableTask)
        def direct() -> None:
            call()  # type: ignore[operator]

        with pytest.raises(NotDurable, match=r"\.apply\(\).*celery_durable\.testing"):
            direct()

    def test_sleep_until_is_refused_too(self, app: Celery) -> None:
        with pytest.raises(NotDurable):
            sleep_until(app.now())

    def test_a_body_without_durable_calls_can_be_called(self, app: Celery) -> None:
        @app.task(base=DurableTask)
        def twice(number: int) -> int:
            return 2 * number

        assert twice(4) == 8

    def test_a_task_called_by_an_eager_task_is_not_durable(self, app: Celery) -> None:
        @app.task(base=DurableTask)
        def inner() -> None:
            sleep(1)

        @app.task(base=DurableTask)
        def outer() -> None:
            inner()

        with pytest.raises(NotDurable):
            outer.apply(throw=True)


class TestWithoutTheExtension:
    @pytest.fixture
    def orphan(self) -> Task:
        app = Celery("orphan", broker="memory://", set_as_current=False)

        @app.task(base=DurableTask)
        def orphan() -> None:
            sleep(1)

        return orphan

    def test_sending_is_refused_with_what_to_do(self, orphan: Task) -> None:
        for send in (orphan.delay, orphan.apply_async, orphan.apply):
            with pytest.raises(ConfigurationError, match=r"orphan.*call Durable\(app\)"):
                send().get()

    @on("redis-postgres")
    def test_a_worker_refuses_to_start(self, bench: Bench) -> None:
        code = "from celery import Celery\nfrom celery_durable import DurableTask\n"
        code += "app = Celery('lost')\n@app.task(base=DurableTask)\ndef lost(): pass\n"
        (bench.folder / "lost.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "lost", "worker", "-c", "1"],
            cwd=bench.folder,
            env={**bench.env, "PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode != 0
        assert "call Durable(app)" in done.stdout + done.stderr


class TestTwice:
    def test_a_second_extension_in_one_app_is_refused(self, app: Celery) -> None:
        with pytest.raises((ConfigurationError, ImproperlyConfigured), match="already"):
            Durable(app)
