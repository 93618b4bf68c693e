"""What each process has of its own."""

from __future__ import annotations

import multiprocessing

from celery import Celery

from celery_durable import Durable


def test_a_child_that_is_forked_while_its_parent_makes_its_runtime_makes_its_own(tmp_path):
    app = Celery("proj", broker="memory://", set_as_current=False)
    durable = Durable(app, database_url=f"sqlite:///{tmp_path}/durable.db")

    with durable._lock:  # as a thread of the parent holds it at that moment
        child = multiprocessing.get_context("fork").Process(target=lambda: durable.runtime)
        child.start()
        child.join(20)
        child.kill()

    assert child.exitcode == 0
