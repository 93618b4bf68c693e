"""The command line: what it says, what it changes, and how it answers a mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from sqlalchemy import delete

from celery_durable import Durable, DurableTask, errors
from celery_durable.cli import durable as durable_command
from celery_durable.cli.tables import span_text
from celery_durable.cli.values import instant, span
from celery_durable.records import Claim, Due, JournalEntry, Kind, Outcome, OutcomeKind, Status
from celery_durable.store import Store
from tests.store.messages import delivery, edit, schedule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Run(Protocol):
    """Run `celery durable` with some arguments."""

    def __call__(self, *arguments: str, code: int = 0, stdin: str | None = None) -> Result: ...


def new_app() -> Celery:
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.timezone = "Europe/Berlin"
    Durable(app, database_url="sqlite://").upgrade()
    return app


@pytest.fixture(scope="module")
def module_app() -> Iterator[Celery]:
    app = new_app()
    yield app
    app.durable.store.dispose()
    app.close()


@pytest.fixture
def app(module_app: Celery) -> Celery:
    """An app with empty tables."""
    context = module_app.durable.store.context
    with context.database.transaction() as connection:
        for table in (context.schema.executions, context.schema.journal, context.schema.schedule):
            connection.execute(delete(table))
    return module_app


@pytest.fixture
def own_app() -> Iterator[Celery]:
    """An app that the test may change."""
    app = new_app()
    yield app
    app.durable.store.dispose()
    app.close()


@pytest.fixture
def durable(app: Celery) -> Durable:
    found: Durable = app.durable
    return found


@pytest.fixture
def store(durable: Durable) -> Store:
    return durable.store


def runner(app: Celery) -> Run:
    def run(*arguments: str, code: int = 0, stdin: str | None = None) -> Result:
        context = CLIContext(app=app, no_color=True, workdir=None)
        result = CliRunner().invoke(durable_command, arguments, obj=context, input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def run(app: Celery) -> Run:
    return runner(app)


def asleep(store: Store, task_id: str, seconds: float = 3600.0) -> None:
    claim = store.claims.claim(delivery(task_id), "celery@one:1:aa", 60.0, 3)
    assert isinstance(claim, Claim)
    entries = [
        JournalEntry(1, Kind.STEP, "send", payload=b'{"secret": 1}', content_type="application/json"),
        JournalEntry(2, Kind.SLEEP, "trial"),
    ]
    assert store.runs.park(claim.key, Due(seconds=seconds), entries=entries)


def running(store: Store, task_id: str) -> Any:
    claim = store.claims.claim(delivery(task_id), "celery@one:1:aa", 60.0, 3)
    assert isinstance(claim, Claim)
    return claim.key


def ended(store: Store, task_id: str, outcome: Outcome | None = None, status: str = Status.SUCCEEDED) -> None:
    key = running(store, task_id)
    outcome = outcome or Outcome(OutcomeKind.VALUE, payload=b'"hush"', content_type="application/json")
    assert store.runs.end(key, outcome, 60.0) is not None
    assert store.runs.finish(key, status)


def quarantined(store: Store, task_id: str) -> None:
    ended(store, task_id, Outcome(OutcomeKind.QUARANTINED, "its worker died"), Status.QUARANTINED)


def status(store: Store, task_id: str) -> str:
    found = store.queries.get(task_id)
    assert found is not None
    return found.status


def one_error(result: Result) -> str:
    """The one line on stderr."""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


class TestList:
    def test_what_is_due_first_comes_first(self, store: Store, run: Run) -> None:
        schedule(store, "later", due_in=7200)
        schedule(store, "sooner", due_in=3600)
        lines = run("list").stdout.splitlines()
        assert lines[0].split() == ["ID", "TASK", "STATUS", "DUE", "OWNER", "CRASHES"]
        assert [line.split()[0] for line in lines[1:]] == ["sooner", "later"]

    def test_times_are_those_of_the_app(self, store: Store, run: Run) -> None:
        schedule(store, "a")
        edit(store, "a", wake_at=datetime(2031, 7, 1, 12, 0, tzinfo=timezone.utc))
        assert "2031-07-01 14:00:00+02:00" in run("list").stdout

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (["--status", "sleeping"], ["asleep"]),
            (["-s", "sleeping", "-s", "running"], ["running", "asleep"]),
            (["--status", "ended"], ["ended"]),
            (["--status", "parked"], ["asleep", "soon"]),
            (["--task", "other"], []),
            (["--due-before", "90m"], ["asleep"]),
            (["--due-after", "90m"], ["soon"]),
            (["--due-before", "2001-01-01"], []),
            (["--owner", "celery@one"], ["running"]),
            (["--text", "ASL"], ["asleep"]),
        ],
    )
    def test_filters(self, store: Store, run: Run, options: list[str], expected: list[str]) -> None:
        asleep(store, "asleep")
        running(store, "running")
        ended(store, "ended")
        schedule(store, "soon", due_in=7200)
        found = json.loads(run("list", "--json", *options).stdout)
        assert [item["task_id"] for item in found] == expected

    def test_pages(self, store: Store, run: Run) -> None:
        for number in range(1, 6):
            schedule(store, f"task-{number}", due_in=number * 60)
        second = run("list", "-n", "2", "--offset", "2").stdout
        assert [line.split()[0] for line in second.splitlines()[1:3]] == ["task-3", "task-4"]
        assert "--offset 4 shows the next" in second
        assert len(run("list", "--all").stdout.splitlines()) == 6

    def test_nothing(self, run: Run) -> None:
        assert run("list").stdout == "There are no durable tasks.\n"
        assert run("list", "--text", "x").stdout == "No task matches.\n"
        assert json.loads(run("list", "--json").stdout) == []

    def test_a_wake_that_is_on_its_way_is_told(self, store: Store, run: Run) -> None:
        schedule(store, "a")
        edit(store, "a", sends=2)
        assert "wake sent 2 times" in run("list").stdout

    def test_what_runs_shows_its_lease(self, store: Store, run: Run) -> None:
        running(store, "alive")
        running(store, "gone")
        edit(store, "gone", wake_at=store.context.now(-17))
        lines = {line.split()[0]: line for line in run("list").stdout.splitlines()}
        assert "lease until " in lines["alive"]
        assert "lease ran out 1" in lines["gone"]
        assert "s ago" in lines["gone"]

    def test_a_name_that_no_task_has_is_said_to_be_one(self, store: Store, run: Run) -> None:
        said = "no task of that name is registered"
        assert run("list", "--task", "proj.nosuch").stdout == f"No task matches: {said}.\n"
        assert run("wake", "--task", "proj.nosuch").stdout == f"There is nothing to wake: {said}.\n"
        assert said not in run("wake", "--task", "celery.accumulate").stdout


class TestShow:
    def test_the_history_of_one_task(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        text = run("show", "a").stdout
        for word in ("proj.tasks.onboard", "sleeping", "in 59m", "Token", "step", "send", "sleep", "trial"):
            assert word in text

    def test_results_are_shown_only_to_who_asks(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        ended(store, "b")
        for task_id, secret in (("a", "secret"), ("b", "hush")):
            for options in ([], ["--json"]):
                assert secret not in run("show", task_id, *options).stdout
                assert secret in run("show", task_id, "--reveal", *options).stdout

    def test_arguments_are_shown_only_to_who_asks(self, own_app: Celery) -> None:
        run = runner(own_app)

        @own_app.task(base=DurableTask, name="pay", shared=False)
        def pay(card: str) -> None: ...

        result = pay.apply_async(("4711",), countdown=600)
        assert "4711" not in run("show", result.id).stdout + run("show", result.id, "--json").stdout
        assert "4711" in run("show", result.id, "--reveal").stdout
        assert "4711" in run("show", result.id, "--reveal", "--json").stdout

    def test_in_json(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        document = json.loads(run("show", "a", "--json").stdout)
        assert (document["status"], document["token"], document["queue"]) == ("sleeping", 1, "celery")
        assert [(e["position"], e["kind"], e["name"]) for e in document["journal"]] == [
            (1, "step", "send"),
            (2, "sleep", "trial"),
        ]
        assert document["due_at"] == document["journal"][1]["due_at"]

    def test_why_it_was_quarantined(self, store: Store, run: Run) -> None:
        quarantined(store, "a")
        assert "quarantined: its worker died" in run("show", "a").stdout

    def test_what_no_json_is_not_decoded(self, store: Store, run: Run) -> None:
        ended(
            store, "a", Outcome(OutcomeKind.VALUE, payload=b"\x80\x04N.", content_type="application/x-python")
        )
        assert "(4 bytes of application/x-python)" in run("show", "a", "--reveal").stdout

    def test_an_unknown_id(self, run: Run) -> None:
        assert "no durable execution" in one_error(run("show", "nope", code=1))

    def test_ids_that_begin_like_an_unknown_one_are_named(self, store: Store, run: Run) -> None:
        schedule(store, *(f"8d1f-{number}" for number in range(5)), "other-8d1f", due_in=3600)
        error = one_error(run("show", "8d1f", code=1))
        assert sum(f"8d1f-{number}" in error for number in range(5)) == 3
        assert "…" in error
        assert "other-8d1f" not in error
        assert "other-8d1f" in one_error(run("wake", "oth", code=1))


class TestWake:
    def test_one(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        assert run("wake", "a").stdout.startswith("a woken: due ")
        assert json.loads(run("list", "--due-before", "1s", "--json").stdout)[0]["task_id"] == "a"

    @pytest.mark.parametrize(
        ("bring", "reason"),
        [(running, "it is running"), (ended, "it has ended"), (quarantined, "it is quarantined")],
    )
    def test_what_does_not_wait_is_refused(
        self, store: Store, run: Run, bring: Callable[[Store, str], Any], reason: str
    ) -> None:
        bring(store, "a")
        assert reason in one_error(run("wake", "a", code=1))

    def test_of_some_those_that_can_be(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        ended(store, "b")
        result = run("wake", "a", "b", "--json", code=1)
        answer = json.loads(result.stdout)
        assert answer["woken"] == 1
        assert list(answer["ids"]) == ["a"]
        assert list(answer["refused"]) == ["b"]
        assert "Cannot wake task b" in one_error(result)


class TestPostpone:
    @pytest.mark.parametrize(("by", "hours"), [("1h", 2.0), ("90m", 2.5), ("-30m", 0.5), ("3600", 2.0)])
    def test_by_a_span(self, store: Store, run: Run, by: str, hours: float) -> None:
        asleep(store, "a")
        before = store.queries.get("a")
        run("postpone", "a", "--by", by)
        after = store.queries.get("a")
        assert before is not None
        assert before.wake_at is not None
        assert after is not None
        assert after.due_at == after.wake_at == before.wake_at + timedelta(hours=hours - 1)

    @pytest.mark.parametrize("until", ["2031-07-01T14:00", "2031-07-01T12:00Z", "2031-07-01 14:00:00+02:00"])
    def test_until_a_time(self, store: Store, run: Run, until: str) -> None:
        asleep(store, "a")
        run("postpone", "a", "--until", until)
        found = store.queries.get("a")
        assert found is not None
        assert found.due_at == datetime(2031, 7, 1, 12, tzinfo=timezone.utc)

    def test_until_a_span_from_now(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        run("postpone", "a", "--until", "2d")
        assert json.loads(run("list", "--due-after", "47h", "--json").stdout)[0]["task_id"] == "a"

    @pytest.mark.parametrize(
        "options",
        [
            [],
            ["--by", "1h", "--until", "2h"],
            ["--by", "soon"],
            ["--by", "1x"],
            ["--by", "9999999d"],
            ["--until", "2031-13-01"],
            ["--until", "tomorrow"],
            ["--until", "2001-07-01T14:00"],
            ["--until=-2h"],
        ],
    )
    def test_a_time_that_is_none(self, store: Store, run: Run, options: list[str]) -> None:
        asleep(store, "a")
        before = store.queries.get("a")
        one_error(run("postpone", "a", *options, code=2))
        assert store.queries.get("a") == before

    def test_a_time_that_is_past_is_refused_with_a_word_on_wake(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        error = one_error(run("postpone", "a", "--until", "2001-07-01T14:00", code=2))
        assert "--until 2001-07-01 14:00:00+02:00 is past" in error
        assert "`durable wake`" in error


class TestCancel:
    def test_one(self, app: Celery, store: Store, run: Run) -> None:
        asleep(store, "a")
        assert run("cancel", "a", "--reason", "no more").stdout == "a cancelled\n"
        found = store.queries.get("a")
        assert found is not None
        assert found.outcome == Outcome(OutcomeKind.CANCELLED, "no more")
        assert app.AsyncResult("a").state == "REVOKED"

    def test_what_has_ended_is_refused(self, store: Store, run: Run) -> None:
        ended(store, "a")
        assert "it has come to its end" in one_error(run("cancel", "a", code=1))

    def test_a_mistyped_id_is_an_error_and_cancels_nothing(self, store: Store, run: Run) -> None:
        asleep(store, "8d1f7f5c-aaaa")
        error = one_error(run("cancel", "8d1f", code=1))
        assert "8d1f7f5c-aaaa" in error
        assert "--unknown" in error
        assert store.queries.get("8d1f") is None
        assert status(store, "8d1f7f5c-aaaa") == Status.SLEEPING
        assert run("cancel", "8d1f", "--dry-run").stdout == "8d1f would not be cancelled: not found\n"

    def test_what_has_not_started_is_remembered_for_who_says_so(self, store: Store, run: Run) -> None:
        rehearsed = run("cancel", "nope", "--unknown", "--dry-run").stdout
        assert rehearsed == "nope would be cancelled: not found\n"
        assert store.queries.get("nope") is None
        assert "its first message will not be run" in run("cancel", "nope", "--unknown").stdout
        assert status(store, "nope") == Status.CANCELLED

    @pytest.mark.parametrize("chosen", [("--all",), ("--status", "sleeping"), ()], ids=str)
    def test_no_filter_finds_what_has_not_started_so_that_is_refused(
        self, store: Store, run: Run, chosen: tuple[str, ...]
    ) -> None:
        asleep(store, "a")
        assert "--unknown" in one_error(run("cancel", *chosen, "--unknown", code=2))
        assert "Say task ids, or a filter" in one_error(run("cancel", "--all", "--unknown", "nope", code=2))
        assert status(store, "a") == Status.SLEEPING
        assert store.queries.get("nope") is None


class TestRelease:
    def test_one(self, store: Store, run: Run) -> None:
        quarantined(store, "a")
        assert run("release", "a").stdout == "a released\n"
        assert status(store, "a") == Status.RUNNING

    def test_nothing_else(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        assert "it is sleeping" in one_error(run("release", "a", code=1))


class TestMany:
    """What holds for all four verbs, by the example of one or the other."""

    def test_all_that_a_filter_finds(self, store: Store, run: Run) -> None:
        for number in range(3):
            quarantined(store, f"q-{number}")
        asleep(store, "a")
        assert run("release", "--text", "q-").stdout == "3 tasks released\n"
        assert status(store, "a") == Status.SLEEPING

    @pytest.mark.parametrize("verb", ["wake", "cancel", "release"])
    def test_ids_or_a_filter_must_be_said_and_not_both(self, store: Store, run: Run, verb: str) -> None:
        asleep(store, "a")
        one_error(run(verb, code=2))
        one_error(run(verb, "a", "--status", "sleeping", code=2))
        assert status(store, "a") == Status.SLEEPING

    def test_all_is_all_that_can_be(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        running(store, "b")
        ended(store, "c")
        assert run("cancel", "--all").stdout == "2 tasks cancelled\n"

    def test_a_filter_that_finds_nothing(self, store: Store, run: Run) -> None:
        ended(store, "a")
        assert run("wake", "--all").stdout == "There is nothing to wake.\n"
        assert run("wake", "--status", "succeeded").stdout == "There is nothing to wake.\n"
        answer = json.loads(run("wake", "--status", "succeeded", "--json").stdout)
        assert answer == {"woken": 0, "ids": None, "refused": {}}

    def test_an_answer_in_json_has_one_shape(self, store: Store, run: Run) -> None:
        for task_id in ("a", "b"):
            asleep(store, task_id)
        ended(store, "c")
        answers = [
            json.loads(run("wake", *chosen, "--dry-run", "--json").stdout)
            for chosen in (["a", "c", "nope"], ["--all"])
        ]
        assert answers == [
            {
                "would_be_woken": 1,
                "ids": {"a": "sleeping"},
                "refused": {"c": "succeeded", "nope": "not found"},
            },
            {"would_be_woken": 2, "ids": None, "refused": {}},
        ]
        by_id = json.loads(run("wake", "a", "--json").stdout)
        assert (by_id["woken"], by_id["refused"]) == (1, {})
        assert datetime.fromisoformat(by_id["ids"]["a"]) <= store.now()
        by_filter = json.loads(run("postpone", "--by", "1h", "--all", "--json").stdout)
        assert by_filter == {"postponed": 2, "ids": None, "refused": {}}

    def test_a_dry_run_changes_nothing(self, store: Store, run: Run) -> None:
        for task_id in ("a", "b"):
            asleep(store, task_id)
        ended(store, "c")
        before = [store.queries.get(task_id) for task_id in ("a", "b", "c")]
        text = run("cancel", "--all", "--dry-run").stdout
        assert text.splitlines()[0] == "2 tasks would be cancelled, for example:"
        assert json.loads(run("cancel", "--all", "--dry-run", "--json").stdout)["would_be_cancelled"] == 2
        by_id = run("wake", "a", "c", "nope", "--dry-run").stdout.splitlines()
        assert by_id == [
            "a would be woken: sleeping",
            "c would not be woken: succeeded",
            "nope would not be woken: not found",
        ]
        assert [store.queries.get(task_id) for task_id in ("a", "b", "c")] == before

    @pytest.fixture
    def crowd(self, store: Store) -> None:
        schedule(store, *(f"task-{number}" for number in range(21)), due_in=3600)

    @pytest.mark.usefixtures("crowd")
    @pytest.mark.parametrize("stdin", ["", "n\n"])
    def test_more_than_twenty_are_changed_only_by_who_agrees(
        self, store: Store, run: Run, stdin: str
    ) -> None:
        result = run("cancel", "--all", stdin=stdin, code=1)
        assert "Cancel 21 tasks?" in result.stderr
        assert "Nothing was changed: --yes is needed" in result.stderr
        assert json.loads(run("stats", "--json").stdout)["counts"] == {"scheduled": 21}

    @pytest.mark.usefixtures("crowd")
    @pytest.mark.parametrize(("options", "stdin"), [(["--yes"], None), ([], "y\n")])
    def test_and_then_they_are(self, run: Run, options: list[str], stdin: str | None) -> None:
        assert "21 tasks cancelled\n" in run("cancel", "--all", *options, stdin=stdin).stdout
        assert json.loads(run("stats", "--json").stdout)["counts"] == {"ending": 21}

    @pytest.mark.usefixtures("crowd")
    def test_twenty_are_changed_without_a_question(self, run: Run) -> None:
        run("cancel", "task-20")
        assert run("wake", "--all").stdout == "20 tasks woken\n"


class TestStats:
    def test_numbers(self, store: Store, run: Run) -> None:
        asleep(store, "a")
        running(store, "b")
        schedule(store, "late", due_in=-300)
        numbers = json.loads(run("stats", "--json").stdout)
        assert numbers["counts"] == {"sleeping": 1, "running": 1, "scheduled": 1}
        assert (numbers["overdue"], numbers["leases"], numbers["scheduler_seen"]) == (1, 1, None)
        assert numbers["lateness"] == pytest.approx(300, abs=60)

    def test_words(self, store: Store, run: Run) -> None:
        schedule(store, "late", due_in=-300)
        text = run("stats").stdout
        assert "1, for 5m" in text
        assert "never seen" in text


class TestCheck:
    def levels(self, result: Result) -> dict[str, str]:
        return {finding["check"]: finding["level"] for finding in json.loads(result.stdout)}

    def test_all_is_well(self, store: Store, run: Run) -> None:
        store.schedule.tick()
        levels = self.levels(run("check", "--json", "--strict"))
        assert set(levels.values()) == {"ok"}
        assert list(levels) == [
            "settings", "database", "tables", "clock", "scheduler", "lateness", "broker",
        ]  # fmt: skip

    def test_a_scheduler_that_nobody_saw_is_a_warning_and_no_failure_of_a_worker(self, run: Run) -> None:
        assert self.levels(run("check", "--json"))["scheduler"] == "warning"
        assert "run `celery beat`, or `celery durable scheduler`" in run("check").stdout
        run("check", "--strict", code=1)

    def test_late_tasks_are_a_warning(self, store: Store, run: Run) -> None:
        schedule(store, "late", due_in=-300)
        assert self.levels(run("check", "--json"))["lateness"] == "warning"
        (line,) = [line for line in run("check").stdout.splitlines() if line.startswith("lateness")]
        assert "run `celery beat`" in line

    def test_a_wrong_setting_of_a_task(self, own_app: Celery) -> None:
        @own_app.task(base=DurableTask, name="wrong", lease_ttl=-1, shared=False)
        def wrong() -> None: ...

        result = runner(own_app)("check", code=1)
        assert "settings  failed" in result.stdout
        assert "wrong" in result.stdout

    def test_no_tables(self) -> None:
        app = Celery("proj", broker="memory://", set_as_current=False)
        Durable(app, database_url="sqlite://")
        assert self.levels(runner(app)("check", "--json", code=1))["tables"] == "failed"
        error = one_error(runner(app)("list", code=1))
        assert "there are no tables" in error
        assert "durable upgrade" in error

    def test_a_database_that_is_away(self) -> None:
        assert self.levels(runner(away())("check", "--json", code=3))["database"] == "failed"

    def test_a_broker_that_is_away(self, own_app: Celery) -> None:
        own_app.conf.broker_url = "redis://127.0.0.1:1"
        assert self.levels(runner(own_app)("check", "--json", code=1))["broker"] == "failed"


class TestTables:
    def test_upgrade_tells_what_it_did(self) -> None:
        app = Celery("proj", broker="memory://", set_as_current=False)
        Durable(app, database_url="sqlite://")
        assert "before, there were none" in runner(app)("upgrade").stdout
        assert "already" in runner(app)("upgrade").stdout
        assert runner(app)("list").stdout == "There are no durable tasks.\n"

    def test_prune(self, store: Store, run: Run) -> None:
        ended(store, "old")
        ended(store, "new")
        edit(store, "old", finished_at=store.context.now(-8 * 86400))
        assert run("prune", "--dry-run").stdout == "1 rows would be pruned.\n"
        assert json.loads(run("prune", "--json").stdout) == {"pruned": 1}
        assert run("prune", "--older-than", "0s").stdout == "1 rows were pruned.\n"


def away() -> Celery:
    """An app whose database nobody serves."""
    app = Celery("proj", broker="memory://", set_as_current=False)
    Durable(app, database_url="postgresql+psycopg://user:hunter2@127.0.0.1:1/proj")
    return app


class TestMistakes:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["list", "--limit", "none"],
            ["list", "--limit", "0"],
            ["list", "--status", "asleep"],
            ["list", "--bogus"],
            ["bogus"],
            ["show"],
            ["show", "a", "b"],
            ["wake", "--text", ""],
            ["cancel", "--yes", "--owner", ""],
            ["prune", "--older-than=-90d"],
        ],
    )
    def test_of_usage(self, run: Run, arguments: list[str]) -> None:
        assert "--help)" in one_error(run(*arguments, code=2))

    def test_the_app_belongs_before_the_command(self, run: Run) -> None:
        assert "celery -A proj durable" in one_error(run("list", "-A", "proj", code=2))

    def test_no_durable_in_the_app(self) -> None:
        app = Celery("plain", set_as_current=False)
        assert "install Durable(app)" in one_error(runner(app)("list", code=1))

    def test_wrong_settings(self) -> None:
        app = Celery("proj", broker="redis://", set_as_current=False)
        Durable(app, lease_tll=3, heartbeat_interval=-1)
        error = one_error(runner(app)("list", code=1))
        assert "lease_tll" in error
        assert "heartbeat_interval" in error

    @pytest.mark.parametrize(
        "arguments", [["list"], ["show", "a"], ["cancel", "--all"], ["stats"], ["upgrade"]]
    )
    def test_a_database_that_is_away(self, arguments: list[str]) -> None:
        error = one_error(runner(away())(*arguments, code=3))
        assert "not available" in error
        assert "Give the command again" in error
        assert "hunter2" not in error

    def test_help_is_for_everyone(self, run: Run) -> None:
        for command in durable_command.commands.values():
            assert command.help
            assert "Usage:" in run(str(command.name), "--help").stdout


class TestRevokeWithoutADatabase:
    def test_the_workers_are_told_and_the_caller_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = away()
        told: list[Any] = []
        monkeypatch.setattr(app.control, "broadcast", lambda *args, **kwargs: told.append((args, kwargs)))
        with pytest.raises(errors.StoreUnavailable):
            app.control.revoke("a")
        assert told[0][1]["arguments"]["task_id"] == "a"


class TestASendWithoutADatabase:
    def test_a_countdown_that_could_not_be_written_is_said_to_be_not_sent(self) -> None:
        app = away()

        @app.task(base=DurableTask, name="later", shared=False)
        def later() -> None: ...

        with pytest.raises(errors.StoreUnavailable, match="was not sent: send it again"):
            later.apply_async(countdown=60)


class TestWords:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("90", 90),
            ("30s", 30),
            ("5m", 300),
            ("1h30m", 5400),
            ("2d", 172_800),
            ("-1.5h", -5400),
            ("1w", 604_800),
        ],
    )
    def test_spans(self, text: str, seconds: float) -> None:
        assert span(text) == timedelta(seconds=seconds)

    def test_instants(self) -> None:
        assert instant("2031-01-02") == datetime(2031, 1, 2)
        assert instant("2h") == timedelta(hours=2)

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.0, "0.0s"), (9.94, "9.9s"), (12, "12s"), (60, "1m"), (3661, "1h 1m"), (90_000, "1d 1h"),
            (86_400, "1d"), (31_557_600 * 1000, "1000y"),
        ],
    )  # fmt: skip
    def test_lengths_of_time(self, seconds: float, text: str) -> None:
        assert span_text(seconds) == text
