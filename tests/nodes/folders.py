"""Temporary folders that servers of another user can reach."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.nodes import guard


def new_folder(name: str) -> Path:
    """A new folder; whoever makes it removes it, and the guard does so after a crash.

    Not pytest's `tmp_path`: its parents are closed to other users, PostgreSQL refuses to run as
    root, and a data folder per run should not be kept for three runs.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"nodes-{name}-"))
    folder.chmod(0o711)
    guard.watch_folder(folder)
    return folder
