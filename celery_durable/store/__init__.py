"""The store: the only package that knows SQL, and it knows nothing else."""

from __future__ import annotations

from celery_durable.store.store import Store

__all__ = ["Store"]
