"""What may be said of a broker that cannot be reached."""

from __future__ import annotations

from urllib.parse import urlsplit

from celery_durable.checks import redacted


def why_unreachable(url: object, error: BaseException) -> str:
    """The error in words that show no part of the password in the broker's URL."""
    if isinstance(url, str) and isinstance(error, ValueError) and not _can_be_read(url):
        # The error quotes what it took for the port: the beginning of a password with a "/" in it.
        return (
            f"its URL cannot be read: {redacted(url)} (in a password, write %2F for a slash"
            " and %40 for an at sign)"
        )
    return " ".join((str(error) or repr(error)).split())


def _can_be_read(url: str) -> bool:
    try:
        urlsplit(url).port  # noqa: B018 - it is read when it is asked for
    except ValueError:
        return False
    return True
