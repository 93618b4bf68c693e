"""The settings, their defaults and their checks, in one frozen object."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from celery_durable import checks
from celery_durable.checks import URL_VARIABLE, redacted
from celery_durable.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

PREFIX = "durable_"
EMBEDDED_DATABASE_URL = "sqlite:///celery-durable.db"

_DAY = 86_400.0
_LEASE_TTL = 60.0
_HEARTBEAT_INTERVAL = 10.0


class Unset(Enum):
    """The type of UNSET, which differs from None where None is a value."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What one task may set for itself. Times are in seconds."""

    lease_ttl: float
    heartbeat_interval: float
    revoke_grace: float
    max_crashes: int | None
    eta: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """The ``durable_…`` settings of one Celery app. Times are in seconds, sizes in bytes."""

    database_url: str = field(repr=False)
    namespace: str
    engine_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    table_prefix: str = "durable_"
    schema: str | None = None
    auto_upgrade: bool = True
    lease_ttl: float = _LEASE_TTL
    heartbeat_interval: float = _HEARTBEAT_INTERVAL
    revoke_grace: float = 10.0
    max_crashes: int | None = 3
    poll_interval: float = 2.0
    notify: bool = True
    resend_delay: float = 120.0
    batch_size: int = 100
    eta: bool = True
    retention: float = 7 * _DAY
    retention_failed: float = 30 * _DAY
    step_limit: int = 10_000
    payload_limit: int = 1024 * 1024
    serializer: str | None = None

    @property
    def redacted_url(self) -> str:
        """The database URL, fit for a log: without its passwords."""
        return redacted(self.database_url)

    @classmethod
    def from_conf(
        cls,
        conf: Mapping[str, Any],
        *,
        app_name: str | None,
        embedded: bool,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, object] | None = None,
        serializers: Collection[str] | None = None,
    ) -> Settings:
        """Read and check the settings in Celery's configuration, or in a dict of that kind.

        ``embedded`` says that everything runs in one process, which makes a local database file
        and any app name good enough. ``overrides``, with or without the ``durable_`` prefix, win
        over ``conf``; the environment wins over both for the database URL.
        ``serializers`` are the names that kombu knows.

        Raises ConfigurationError with every problem found.
        """
        problems: list[str] = []
        given = _given(conf, overrides or {}, problems)
        url = (os.environ if environ is None else environ).get(URL_VARIABLE)
        if url or given.get("database_url") in (None, ""):
            given["database_url"] = url or _default_url(embedded)
        if given.get("namespace") is None:
            given["namespace"] = _default_namespace(app_name, embedded)
        values = _checked(given, PREFIX, problems)
        if serializers is not None and values.get("serializer") not in (None, *serializers):
            problems.append(
                f"durable_serializer {values['serializer']!r} is not known: "
                f"use one of {', '.join(sorted(serializers))}, or register it with kombu"
            )
        if values.get("schema") and values.get("database_url", "").startswith("sqlite"):
            problems.append("durable_schema needs PostgreSQL: SQLite has no schemas. Remove it")
        _fit_interval(values, given, (_LEASE_TTL, _HEARTBEAT_INTERVAL), PREFIX, problems)
        if problems:
            raise ConfigurationError(*problems)
        return cls(**values)

    def for_task(self, task: object) -> TaskSettings:
        """What holds for this task: its own attributes where set, else these settings.

        Raises ConfigurationError, with every problem found, naming the task.
        """
        problems: list[str] = []
        attributes = {name: getattr(task, name, UNSET) for name in _TASK_ATTRIBUTES}
        given = {name: value for name, value in attributes.items() if value is not UNSET}
        label = f"task {getattr(task, 'name', None) or repr(task)}: "
        values = _checked(given, label, problems)
        inherited = (self.lease_ttl, self.heartbeat_interval)
        _fit_interval(values, given, inherited, label, problems)
        if problems:
            raise ConfigurationError(*problems)
        return TaskSettings(
            lease_ttl=values.get("lease_ttl", self.lease_ttl),
            heartbeat_interval=values["heartbeat_interval"],
            revoke_grace=values.get("revoke_grace", self.revoke_grace),
            max_crashes=values.get("max_crashes", self.max_crashes),
            eta=values.get("durable_eta", self.eta),
        )


# Where a setting comes from


def _given(
    conf: Mapping[str, Any], overrides: Mapping[str, object], problems: list[str]
) -> dict[str, object]:
    """What the user has set, by field name. Names that nothing reads become problems."""
    # Never add_defaults(): Celery 5.7 lets it win over what config_from_object() brought.
    found = {name: conf.get(PREFIX + name, UNSET) for name in _NAMES}
    # After the first get(): only then has Celery loaded the configuration and its namespace.
    spelling = _Spelling(getattr(conf, "prefix", None) or "")
    problems.extend(spelling.misnamed(conf.keys()))
    given = {name: value for name, value in found.items() if value is not UNSET}
    for key, value in overrides.items():
        name = key.removeprefix(PREFIX)
        if name in _NAMES:
            given[name] = value
        else:
            problems.append(f"Durable() does not know the setting {key}{_nearest(name, str)}")
    return given


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How settings are spelled in one configuration. ``namespace`` ends in "_" or is empty."""

    namespace: str

    def of(self, name: str) -> str:
        """As the user is to write it: ``durable_x``, ``CELERY_DURABLE_X``."""
        key = self.namespace + PREFIX + name
        return key.upper() if self.namespace.isupper() else key.lower()

    def misnamed(self, keys: Iterable[object]) -> Iterable[str]:
        for key in keys:
            if isinstance(key, str) and PREFIX in key.lower():
                yield from self._problem(key)

    def _problem(self, key: str) -> Iterable[str]:
        for style in (self.of, _plain):
            if key.startswith(style("")):
                name = key.removeprefix(style("")).lower()
                if key != style(name) or name not in _NAMES:
                    yield f"{key} is no setting of celery_durable{_nearest(name, style)}"
                return
        # In any other spelling it may be somebody else's, unless the name is one of ours.
        stem = key.lower().removeprefix(self.namespace.lower()).removeprefix("celery_")
        name = stem.removeprefix(PREFIX)
        if stem.startswith(PREFIX) and name in _NAMES:
            yield f"{key} is not read in this configuration: write {self.of(name)}"


def _plain(name: str) -> str:
    return PREFIX + name


def _nearest(name: str, style: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name, _NAMES, n=1)
    return f"; did you mean {style(near[0])}?" if near else ""


def _default_url(embedded: bool) -> object:
    return EMBEDDED_DATABASE_URL if embedded else None


def _default_namespace(app_name: str | None, embedded: bool) -> object:
    if embedded:
        return app_name or "default"
    return None if app_name == "__main__" else app_name


# What a setting may be


def _checked(given: Mapping[str, object], label: str, problems: list[str]) -> dict[str, Any]:
    """The values that pass; the others become problems, named with the label in front."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = _CHECKS[name](value)
        except ValueError as problem:
            problems.append(f"{label}{name} {problem}")
    return values


def _fit_interval(
    values: dict[str, Any],
    given: Mapping[str, object],
    defaults: tuple[float, float],
    label: str,
    problems: list[str],
) -> None:
    """Put a heartbeat_interval of at most a third of lease_ttl among the values.

    Only one that was not given shrinks to fit. ``defaults``: of lease_ttl, of the interval.
    """
    if not given.keys() & {"lease_ttl", "heartbeat_interval"} <= values.keys():
        return
    ttl: float = values.get("lease_ttl", defaults[0])
    interval: float = values.setdefault("heartbeat_interval", defaults[1])
    # With some room for a third that floats cannot say, such as 0.1 of 0.3.
    if interval * 3 <= ttl * (1 + 1e-9):
        return
    if "heartbeat_interval" in given:
        problems.append(
            f"{label}heartbeat_interval is {interval:g} s, more than a third of lease_ttl, "
            f"{ttl:g} s: set it to at most {ttl / 3:g}, or raise lease_ttl"
        )
    values["heartbeat_interval"] = ttl / 3


_CHECKS: dict[str, Callable[[object], object]] = {
    "database_url": checks.url,
    "engine_options": checks.options,
    "table_prefix": checks.identifier,
    "schema": checks.optional_text,
    "namespace": checks.namespace,
    "auto_upgrade": checks.switch,
    "lease_ttl": checks.positive_seconds,
    "heartbeat_interval": checks.positive_seconds,
    "revoke_grace": checks.seconds,
    "max_crashes": checks.optional_count,
    "poll_interval": checks.poll_seconds,
    "notify": checks.switch,
    "resend_delay": checks.positive_seconds,
    "batch_size": checks.positive_count,
    "eta": checks.switch,
    "retention": checks.seconds,
    "retention_failed": checks.seconds,
    "step_limit": checks.positive_count,
    "payload_limit": checks.positive_count,
    "serializer": checks.optional_text,
    "durable_eta": checks.switch,
}

_NAMES = tuple(f.name for f in fields(Settings))
_TASK_ATTRIBUTES = (
    "lease_ttl",
    "heartbeat_interval",
    "revoke_grace",
    "max_crashes",
    "durable_eta",
)
