"""How long a day is here: EXAMPLE_DAY_SECONDS, so that a demo need not take a week."""

from __future__ import annotations

import os
from datetime import timedelta

DAY_SECONDS = float(os.environ.get("EXAMPLE_DAY_SECONDS", "86400"))


def days(count: float) -> timedelta:
    return timedelta(seconds=count * DAY_SECONDS)
