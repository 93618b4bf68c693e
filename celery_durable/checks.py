"""What one setting may be.

Each check takes what the user wrote and returns the value to use, or raises ValueError with the
end of a sentence that starts with the setting's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta

URL_VARIABLE = "CELERY_DURABLE_DATABASE_URL"
POLL_FLOOR = 0.001

# A hundred years: `threading.Event.wait` overflows at some three hundred.
_LONGEST = 100 * 365 * 86_400.0
_LARGEST = 2**31 - 1
_LONGEST_TEXT = 255

_SCHEMES = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
}


def seconds(value: object) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be seconds or a timedelta, not {_shown(value)}")
    # Before any conversion: an int may be too large for a float.
    if not 0 <= value <= _LONGEST:
        raise ValueError(f"must be from 0 to {_LONGEST:.0f} seconds, not {_shown(value)}")
    return float(value)


def positive_seconds(value: object) -> float:
    span = seconds(value)
    if span == 0:
        raise ValueError("must be more than 0 seconds")
    return span


def poll_seconds(value: object) -> float:
    return max(seconds(value), POLL_FLOOR)


def count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, not {_shown(value)}")
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"must be from 0 to {_LARGEST}, not {_shown(value)}")
    return value


def positive_count(value: object) -> int:
    number = count(value)
    if number == 0:
        raise ValueError("must be at least 1")
    return number


def optional_count(value: object) -> int | None:
    return None if value is None else count(value)


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be True or False, not {_shown(value)}")
    return value


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a str, not {_shown(value)}")
    if not value.strip() or not value.isprintable() or len(value) > _LONGEST_TEXT:
        raise ValueError(f"must be 1 to {_LONGEST_TEXT} printable characters, not {_shown(value)}")
    return value


def namespace(value: object) -> str:
    if value is None:
        raise ValueError(
            "is needed, since the app has no name of its own: name it, as in "
            'Celery("proj"), or set durable_namespace = "proj"'
        )
    return text(value)


def identifier(value: object) -> str:
    # 32 of PostgreSQL's 63 characters, so that names of indexes find room.
    name = text(value)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name):
        raise ValueError(
            f"must be a letter or _, then letters, digits or _, at most 32 in all, not {_shown(value)}"
        )
    return name


def optional_text(value: object) -> str | None:
    return None if value is None else text(value)


def options(value: object) -> dict[str, object]:
    # The options may hold a password: they are never shown.
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"must be a mapping with str keys, not a {type(value).__name__}")
    return dict(value)


def url(value: object) -> str:
    if value is None:
        raise ValueError(
            f"is needed: set it, or the environment variable {URL_VARIABLE}, to "
            "postgresql+psycopg://user@host/database or sqlite:////absolute/path.db"
        )
    # SQLAlchemy's URL object; its str() has the password replaced.
    render = getattr(value, "render_as_string", None)
    written = render(hide_password=False) if render else value
    if not isinstance(written, str):
        raise ValueError(f"must be a str, not a {type(value).__name__}")
    scheme, separator, rest = written.partition("://")
    if not separator or not re.fullmatch(r"[\w+]+", scheme):
        raise ValueError("is no URL: write postgresql+psycopg://… or sqlite:///…")
    if scheme in _SCHEMES:
        return f"{_SCHEMES[scheme]}://{_escaped(rest)}"
    raise ValueError(f"is {redacted(written)}: {_scheme_advice(scheme)}")


def _escaped(rest: str) -> str:
    """What follows the scheme, with each "@" but the last as it must be written in a password.

    A driver would take the rest of such a password for its host, and show it in its errors.
    """
    found = re.match(r"([^/?#]*)@(.*)", rest, flags=re.DOTALL)
    return rest if found is None else f"{found[1].replace('@', '%40')}@{found[2]}"


def redacted(url: str) -> str:
    """A database URL without its passwords, whatever else is wrong with it."""
    if url.startswith("sqlite"):
        return url
    # Greedy up to the last "@": a password with an unescaped "@" must not show its tail.
    shown = re.sub(r"^([^:]*://[^:]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)([?&][^=&]*(?:password|secret)[^=&]*)=[^&]*", r"\1=***", shown)


def _scheme_advice(scheme: str) -> str:
    if scheme.startswith("postgres"):
        return f"PostgreSQL is used through psycopg 3, write postgresql+psycopg:// for {scheme}://"
    if scheme.startswith("sqlite"):
        return f"SQLite is used through Python's own driver, write sqlite:// for {scheme}://"
    return f"{scheme} is not supported, use PostgreSQL (postgresql+psycopg://) or SQLite"


def _shown(value: object) -> str:
    # Python refuses to print an int of more than some thousand digits.
    if isinstance(value, int) and abs(value) > 2**63:
        return "one that large"
    return f"{value!r} ({type(value).__name__})"
