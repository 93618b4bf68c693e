"""Settings are read from Celery as the user wrote them, and checked whole at the door."""

from __future__ import annotations

import math
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
from celery import Celery
from sqlalchemy.engine import URL, make_url

from celery_durable.errors import ConfigurationError
from celery_durable.settings import UNSET, Settings, redacted

POSTGRESQL = "postgresql+psycopg://localhost/proj"
VARIABLE = "CELERY_DURABLE_DATABASE_URL"


def read(conf=None, *, app_name="proj", embedded=False, environ=None, **overrides) -> Settings:
    return Settings.from_conf(
        {"durable_database_url": POSTGRESQL} if conf is None else conf,
        app_name=app_name,
        embedded=embedded,
        environ=environ or {},
        overrides=overrides,
        serializers={"json", "pickle"},
    )


def refused(conf=None, **options) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read(conf, **options)
    return str(caught.value).splitlines()


def make_app(**options) -> Celery:
    app = Celery("proj", set_as_current=False, **options)
    app.conf.durable_database_url = POSTGRESQL
    return app


# Defaults


def test_defaults_are_those_of_the_documentation():
    settings = read()

    assert settings == Settings(
        database_url=POSTGRESQL,
        namespace="proj",
        engine_options={},
        table_prefix="durable_",
        schema=None,
        auto_upgrade=True,
        lease_ttl=60,
        heartbeat_interval=10,
        revoke_grace=10,
        max_crashes=3,
        poll_interval=2,
        notify=True,
        resend_delay=120,
        batch_size=100,
        eta=True,
        retention=604_800,
        retention_failed=2_592_000,
        step_limit=10_000,
        payload_limit=1_048_576,
        serializer=None,
    )


def test_an_embedded_app_needs_no_settings_at_all():
    settings = read({}, app_name=None, embedded=True)

    assert settings.database_url == "sqlite:///celery-durable.db"
    assert settings.namespace == "default"


@pytest.mark.parametrize("nothing", [{}, {"durable_database_url": ""}])
def test_without_a_database_the_error_names_both_places_to_set_it(nothing):
    (problem,) = refused(nothing)

    assert "durable_database_url is needed" in problem
    assert VARIABLE in problem


@pytest.mark.parametrize("name", [None, "__main__"])
def test_an_app_without_a_name_of_its_own_needs_a_namespace(name):
    (problem,) = refused(app_name=name)

    assert problem.startswith("durable_namespace is needed")
    assert 'durable_namespace = "proj"' in problem
    assert read(app_name=name, namespace="mine").namespace == "mine"


# Where a setting comes from


def test_a_setting_is_found_when_assigned():
    app = make_app()
    app.conf.durable_lease_ttl = 90

    assert read(app.conf).lease_ttl == 90


def test_a_setting_is_found_when_assigned_after_the_configuration_was_loaded():
    app = make_app()
    assert app.conf.task_always_eager is False
    app.conf.durable_lease_ttl = 90

    assert read(app.conf).lease_ttl == 90


def test_a_setting_is_found_through_a_reference_kept_from_before_the_configuration_was_loaded():
    app = make_app()
    pending = app.conf
    pending.durable_lease_ttl = 90
    assert app.conf.task_always_eager is False

    assert read(pending).lease_ttl == 90


def test_a_setting_is_found_when_updated():
    app = make_app()
    app.conf.update(durable_lease_ttl=90)

    assert read(app.conf).lease_ttl == 90


def test_a_setting_is_found_in_an_object():
    app = make_app()
    app.config_from_object(SimpleNamespace(durable_lease_ttl=90))

    assert read(app.conf).lease_ttl == 90


def test_a_setting_is_found_in_the_changes_that_an_app_is_made_with():
    assert read(make_app(changes={"durable_lease_ttl": 90}).conf).lease_ttl == 90


@pytest.mark.parametrize(
    ("namespace", "key"),
    [("CELERY", "CELERY_DURABLE_LEASE_TTL"), ("proj", "proj_durable_lease_ttl")],
)
def test_a_setting_is_found_in_a_namespace(namespace, key):
    app = make_app()
    app.config_from_object(SimpleNamespace(**{key: 90}), namespace=namespace)

    assert read(app.conf).lease_ttl == 90


def test_an_assignment_wins_over_a_namespace():
    app = make_app()
    app.config_from_object(SimpleNamespace(CELERY_DURABLE_LEASE_TTL=90), namespace="CELERY")
    app.conf.durable_lease_ttl = 120

    assert read(app.conf).lease_ttl == 120


@pytest.mark.parametrize("key", ["lease_ttl", "durable_lease_ttl"])
def test_a_keyword_wins_over_the_configuration(key):
    app = make_app()
    app.conf.durable_lease_ttl = 90

    assert read(app.conf, **{key: 120}).lease_ttl == 120


def test_the_environment_wins_over_all_for_the_database():
    environ = {VARIABLE: "sqlite:////var/lib/proj.db"}

    assert read(environ=environ, database_url=POSTGRESQL).database_url == environ[VARIABLE]


def test_an_empty_variable_is_none():
    assert read(environ={VARIABLE: ""}).database_url == POSTGRESQL


# Names


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    app = make_app()
    app.conf.durable_lease_tll = 90

    assert refused(app.conf) == [
        "durable_lease_tll is no setting of celery_durable; did you mean durable_lease_ttl?"
    ]


def test_an_unknown_name_in_an_object_is_refused():
    app = make_app()
    app.config_from_object(SimpleNamespace(durable_qwertyuiop=1))

    assert refused(app.conf) == ["durable_qwertyuiop is no setting of celery_durable"]


def test_an_unknown_name_in_a_namespace_is_refused_in_the_spelling_used_there():
    app = make_app()
    app.config_from_object(SimpleNamespace(CELERY_DURABLE_NOTIFIY=True), namespace="CELERY")

    (problem,) = refused(app.conf)

    assert problem.startswith("CELERY_DURABLE_NOTIFIY is no setting")
    assert problem.endswith("did you mean CELERY_DURABLE_NOTIFY?")


@pytest.mark.parametrize(
    ("namespace", "key", "right"),
    [
        (None, "CELERY_DURABLE_LEASE_TTL", "durable_lease_ttl"),
        (None, "DURABLE_LEASE_TTL", "durable_lease_ttl"),
        ("CELERY", "DURABLE_LEASE_TTL", "CELERY_DURABLE_LEASE_TTL"),
        ("CELERY", "celery_durable_lease_ttl", "CELERY_DURABLE_LEASE_TTL"),
    ],
)
def test_a_known_name_in_a_spelling_that_celery_does_not_read_is_refused(namespace, key, right):
    app = make_app()
    app.config_from_object(SimpleNamespace(**{key: 90}), namespace=namespace)

    assert refused(app.conf) == [f"{key} is not read in this configuration: write {right}"]


def test_other_peoples_names_are_left_alone():
    app = make_app()
    app.config_from_object(
        SimpleNamespace(DURABLE_GOODS=1, WAREHOUSE_DURABLE_GOODS=1, my_durable_lease_ttl=1),
        namespace="CELERY",
    )

    assert read(app.conf).namespace == "proj"


def test_an_unknown_keyword_is_refused():
    assert refused(lease_tl=5) == ["Durable() does not know the setting lease_tl; did you mean lease_ttl?"]


# Values

DURATIONS = (
    "lease_ttl",
    "heartbeat_interval",
    "revoke_grace",
    "poll_interval",
    "resend_delay",
    "retention",
    "retention_failed",
)
COUNTS = ("batch_size", "step_limit", "payload_limit", "max_crashes")
SWITCHES = ("auto_upgrade", "notify", "eta")
TEXTS = ("namespace", "schema", "table_prefix", "serializer")


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_is_seconds_or_a_timedelta(name):
    assert getattr(read(**{name: 9}), name) == 9.0
    assert getattr(read(**{name: timedelta(seconds=9)}), name) == 9.0


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", [True, "9", None, math.nan, math.inf, -1, 10**400, [9]])
def test_what_is_no_duration_is_refused_by_name(name, value):
    (problem,) = refused(**{name: value})

    assert problem.startswith(f"durable_{name} must be ")


@pytest.mark.parametrize("name", ["lease_ttl", "heartbeat_interval", "resend_delay"])
def test_no_time_at_all_is_refused_where_it_makes_no_sense(name):
    assert refused(**{name: 0}) == [f"durable_{name} must be more than 0 seconds"]


@pytest.mark.parametrize("name", ["revoke_grace", "retention", "retention_failed"])
def test_no_time_at_all_is_a_choice_elsewhere(name):
    assert getattr(read(**{name: 0}), name) == 0.0


def test_polls_are_a_millisecond_apart_at_least():
    assert read(poll_interval=0).poll_interval == 0.001
    assert read(poll_interval=0.0005).poll_interval == 0.001


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 2**31, 10**400])
def test_what_is_no_count_is_refused_by_name(name, value):
    (problem,) = refused(**{name: value})

    assert problem.startswith(f"durable_{name} must be ")


@pytest.mark.parametrize("name", ["batch_size", "step_limit", "payload_limit"])
def test_a_limit_is_at_least_one(name):
    assert refused(**{name: 0}) == [f"durable_{name} must be at least 1"]


@pytest.mark.parametrize("value", [None, 0, 1])
def test_crashes_may_be_unlimited_or_none_at_all(value):
    assert read(max_crashes=value).max_crashes is value


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "false", None])
def test_a_switch_is_true_or_false(name, value):
    (problem,) = refused(**{name: value})

    assert problem.startswith(f"durable_{name} must be True or False")


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [5, True, "", " ", "a\0b", "x" * 256])
def test_what_is_no_text_is_refused_by_name(name, value):
    (problem,) = refused(**{name: value})

    assert problem.startswith(f"durable_{name} must be ")


@pytest.mark.parametrize("prefix", ["a-b", "1a", "a.b", 'a"', "a" * 33, "a;drop"])
def test_a_table_prefix_is_a_plain_identifier(prefix):
    (problem,) = refused(table_prefix=prefix)

    assert problem.startswith("durable_table_prefix must be a letter or _")


def test_a_serializer_is_one_that_kombu_knows():
    assert read(serializer="pickle").serializer == "pickle"
    assert refused(serializer="jsn") == [
        "durable_serializer 'jsn' is not known: use one of json, pickle, or register it with kombu"
    ]


def test_a_schema_is_refused_where_the_database_has_none():
    (problem,) = refused({"durable_database_url": "sqlite://", "durable_schema": "jobs"})

    assert problem.startswith("durable_schema needs PostgreSQL")


def test_engine_options_are_copied():
    options = {"pool_size": 3}
    settings = read(engine_options=options)
    options["pool_size"] = 4

    assert settings.engine_options == {"pool_size": 3}


@pytest.mark.parametrize("value", [None, "echo", [("echo", True)], {1: 2}])
def test_engine_options_are_a_mapping(value):
    (problem,) = refused(engine_options=value)

    assert problem.startswith("durable_engine_options must be a mapping")


def test_all_problems_are_told_at_once():
    conf = {
        "durable_lease_ttl": "60",
        "durable_batch_size": 0,
        "durable_notifi": True,
        "durable_heartbeat_interval": True,
    }

    problems = refused(conf, app_name=None)

    assert [problem.split()[0] for problem in problems] == [
        "durable_notifi",
        "durable_lease_ttl",
        "durable_heartbeat_interval",
        "durable_batch_size",
        "durable_database_url",
        "durable_namespace",
    ]


def test_a_bad_pair_is_told_beside_other_problems():
    problems = refused({}, heartbeat_interval=30)

    assert len(problems) == 2
    assert any("more than a third" in problem for problem in problems)


# The heartbeat


@pytest.mark.parametrize("ttl", [0.3, 3, 30, 60])
def test_a_third_of_the_ttl_is_often_enough(ttl):
    assert read(lease_ttl=ttl, heartbeat_interval=ttl / 3).heartbeat_interval == ttl / 3
    assert read(lease_ttl=0.3, heartbeat_interval=0.1).heartbeat_interval == 0.1


@pytest.mark.report("taken-for-dead")
@pytest.mark.parametrize(
    "pair",
    [
        {"lease_ttl": 30, "heartbeat_interval": 10.1},
        {"heartbeat_interval": 21},
        {"lease_ttl": 10, "heartbeat_interval": 10},
    ],
)
def test_a_heartbeat_slower_than_a_third_of_the_ttl_is_refused(pair):
    (problem,) = refused(**pair)

    assert problem.startswith("durable_heartbeat_interval is ")
    assert "more than a third of lease_ttl" in problem


def test_a_heartbeat_that_was_not_set_fits_itself_to_a_short_ttl():
    assert read(lease_ttl=6).heartbeat_interval == 2
    assert read(lease_ttl=600).heartbeat_interval == 10


# The database URL


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgresql_is_reached_through_psycopg_3(scheme):
    url = read({"durable_database_url": f"{scheme}://me:pw@host/db?x=1"}).database_url

    assert url == "postgresql+psycopg://me:pw@host/db?x=1"


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:////a/b.db", "sqlite+pysqlite:///b.db"]
)
def test_sqlite_is_taken_as_it_is(url):
    assert read({"durable_database_url": url}).database_url == url


def test_an_sqlalchemy_url_keeps_its_password():
    url = URL.create("postgresql", "me", "p@ss", "host", database="db")

    assert make_url(read({"durable_database_url": url}).database_url).password == "p@ss"


@pytest.mark.parametrize(
    ("scheme", "advice"),
    [
        ("postgresql+psycopg2", "postgresql+psycopg://"),
        ("postgresql+asyncpg", "postgresql+psycopg://"),
        ("sqlite+aiosqlite", "write sqlite://"),
        ("mysql", "mysql is not supported"),
        ("redis", "redis is not supported"),
    ],
)
def test_other_databases_and_drivers_are_refused_without_showing_the_password(scheme, advice):
    (problem,) = refused({"durable_database_url": f"{scheme}://me:hunter2@host/db"})

    assert problem.startswith("durable_database_url is ")
    assert advice in problem
    if not scheme.startswith("sqlite"):
        assert "hunter2" not in problem


@pytest.mark.parametrize("nonsense", ["me:hunter2@host", 5, "://hunter2", b"sqlite://"])
def test_what_is_no_url_is_refused_without_showing_it(nonsense):
    (problem,) = refused({"durable_database_url": nonsense})

    assert problem.startswith("durable_database_url ")
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/db",
        "postgresql://me:x@hunter2@host/db",
        "postgresql://me:x/hunter2?y@host/db",
        "postgresql://me@corp.com:hunter2@host/db",
        "postgresql://a/b:hunter2@host/db",
        "postgresql://host/db?user=me&password=hunter2&x=1",
        "postgresql://host/db?sslpassword=hunter2",
        "postgresql://me:one\nhunter2@host/db",
    ],
)
def test_a_password_is_never_shown(url):
    settings = read({"durable_database_url": url})

    assert "hunter2" not in settings.redacted_url
    assert "host" in settings.redacted_url
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize("url", [POSTGRESQL, "sqlite:////data/a:b@c.db", "postgresql://me@host/db"])
def test_a_url_without_a_password_is_shown_as_it_is(url):
    assert redacted(url) == url


def test_the_repr_shows_no_engine_options():
    assert "hunter2" not in repr(read(engine_options={"connect_args": {"password": "hunter2"}}))


def test_settings_survive_a_process_and_cannot_be_changed():
    settings = read()

    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(AttributeError):
        settings.lease_ttl = 5


# Tasks


def task(**attributes) -> SimpleNamespace:
    unset = dict.fromkeys(
        ("lease_ttl", "heartbeat_interval", "revoke_grace", "max_crashes", "durable_eta"), UNSET
    )
    return SimpleNamespace(name="proj.export", **{**unset, **attributes})


def test_a_task_that_sets_nothing_has_the_settings_of_the_app():
    found = read(lease_ttl=90, max_crashes=None, eta=False).for_task(task())

    assert (found.lease_ttl, found.heartbeat_interval, found.revoke_grace) == (90, 10, 10)
    assert found.max_crashes is None
    assert found.eta is False


def test_a_task_has_its_own_settings():
    found = read().for_task(
        task(
            lease_ttl=timedelta(seconds=30),
            heartbeat_interval=5,
            revoke_grace=0,
            max_crashes=None,
            durable_eta=False,
        )
    )

    assert (found.lease_ttl, found.heartbeat_interval, found.revoke_grace) == (30, 5, 0)
    assert found.max_crashes is None
    assert found.eta is False


def test_the_app_s_heartbeat_fits_itself_to_the_short_ttl_of_a_task():
    assert read(heartbeat_interval=20).for_task(task(lease_ttl=6)).heartbeat_interval == 2


@pytest.mark.parametrize("pair", [{"lease_ttl": 6, "heartbeat_interval": 3}, {"heartbeat_interval": 30}])
def test_a_task_s_own_bad_pair_is_refused(pair):
    with pytest.raises(ConfigurationError, match=r"task proj\.export: heartbeat_interval is"):
        read().for_task(task(**pair))


def test_a_task_s_wrong_values_are_all_told_with_the_task_s_name():
    with pytest.raises(ConfigurationError) as caught:
        read().for_task(task(lease_ttl=True, max_crashes=-1, durable_eta="no", revoke_grace=None))

    problems = str(caught.value).splitlines()
    assert len(problems) == 4
    assert all(problem.startswith("task proj.export: ") for problem in problems)
    assert "durable_eta must be True or False" in problems[3]


def test_an_object_without_the_attributes_has_the_settings_of_the_app():
    assert read().for_task(object()).lease_ttl == 60
