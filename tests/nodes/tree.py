"""A process with all that it started: find it, freeze it, kill it as a whole."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.nodes.waiting import wait_for


def members(root: int) -> list[int]:
    """The living pids of a process tree, the root first.

    A process belongs to the tree when it descends from the root or is in the session that the
    root leads: that finds the children of a parent that is dead already. Zombies are dead.
    """
    living = _living()
    found = {pid for pid, (_, session) in living.items() if root in (pid, session)}
    while more := {pid for pid, (parent, _) in living.items() if parent in found} - found:
        found |= more
    return sorted(found, key=lambda pid: (pid != root, pid))


def children(root: int) -> list[int]:
    """The living direct children of a process."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(root).children()
        return sorted(child.pid for child in found if is_alive(child.pid))
    return []


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def freeze(root: int) -> None:
    """SIGSTOP the whole tree, and come back when all of it stands still."""
    frozen: set[int] = set()
    # Parents first, and again until nothing new is found: a process may fork meanwhile.
    while new := [pid for pid in members(root) if pid not in frozen]:
        for pid in new:
            send(pid, signal.SIGSTOP)
        wait_for(partial(_all_stand_still, new), message="SIGSTOP has taken effect")
        frozen.update(new)


def thaw(root: int) -> None:
    """SIGCONT the whole tree."""
    for pid in members(root):
        send(pid, signal.SIGCONT)


def kill(root: int) -> None:
    """SIGKILL the whole tree at one instant, and come back when all of it is gone."""
    # Frozen first: no parent sees a child die, none starts another, nobody cleans up.
    while doomed := members(root):
        for pid in doomed:
            send(pid, signal.SIGSTOP)
        if doomed == members(root):
            break
    for pid in doomed:
        send(pid, signal.SIGKILL)
    wait_for(lambda: not members(root), message=f"process tree {root} is gone")


def send(pid: int, number: int) -> None:
    """Send a signal; a process that is gone already is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _all_stand_still(pids: list[int]) -> bool:
    return all(map(_stands_still, pids))


def _stands_still(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return True


def _living() -> dict[int, tuple[int, int]]:
    """The parent and the session of every living process.

    A kill looks at all of them several times, and a test kills dozens: one file for each is enough.
    """
    found: dict[int, tuple[int, int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                # The name in parentheses may hold anything.
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in ("Z", "X"):
                    found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found
