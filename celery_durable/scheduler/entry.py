"""Celery's schedule entry, with a policy for runs that were missed."""

from __future__ import annotations

from typing import Any

from celery.beat import ScheduleEntry

from celery_durable.calendar import check_misfire
from celery_durable.errors import ConfigurationError
from celery_durable.texts import flaw_of_id, shortened

_POLICY = ("misfire", "misfire_grace")


class DurableEntry(ScheduleEntry):
    """One line of ``beat_schedule``.

    ``misfire``: what becomes of runs that were missed while no scheduler was up: ``"coalesce"`` (one run
    makes up for them all) or ``"skip"``. ``misfire_grace``: by how many seconds a run may be late. Both may
    stand in ``options`` too, where ``app.add_periodic_task(…, misfire="skip")`` puts them.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        policy = {name: fields.pop(name, None) for name in _POLICY}
        options = fields.get("options")
        if options and not policy.keys().isdisjoint(options):
            fields["options"] = {name: value for name, value in options.items() if name not in policy}
            policy |= {name: options[name] for name in policy if name in options}
        super().__init__(*args, **fields)
        flaw = flaw_of_id(self.name)
        if flaw is not None:
            raise ConfigurationError(f"the name of a beat_schedule entry, {shortened(self.name)}, {flaw}")
        try:
            self.misfire, self.misfire_grace = check_misfire(
                policy["misfire"] or "coalesce", policy["misfire_grace"]
            )
        except ValueError as problem:
            raise ConfigurationError(f"beat_schedule entry {self.name!r}: {problem}") from None

    def update(self, other: Any) -> None:
        """Take over what a configuration says; when it last ran stays."""
        super().update(other)
        for name in _POLICY:
            if hasattr(other, name):
                setattr(self, name, getattr(other, name))

    def __reduce__(self) -> Any:
        fields = {name: value for name, value in vars(self).items() if name != "app"}
        return _rebuild, (type(self), fields)


def _rebuild(kind: type[DurableEntry], fields: dict[str, Any]) -> DurableEntry:
    return kind(**fields)
