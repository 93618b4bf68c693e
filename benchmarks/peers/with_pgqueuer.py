"""pgqueuer: jobs with a time after which they start."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from benchmarks.marks import mark
from benchmarks.peers.run import Jobs


def prepare(url: str) -> None:
    async def install() -> None:
        await Queries(AsyncpgDriver(await asyncpg.connect(url))).install()

    asyncio.run(install())


def fill(url: str, jobs: Jobs) -> None:
    async def enqueue() -> None:
        queries = Queries(AsyncpgDriver(await asyncpg.connect(url)))
        payloads = [json.dumps({"label": jobs.label, "due": due}).encode() for due in jobs.dues]
        now = time.time()
        waits = [timedelta(seconds=max(due - now, 0.0)) for due in jobs.dues]
        await queries.enqueue(["noop"] * jobs.count, payloads, [0] * jobs.count, waits)

    asyncio.run(enqueue())


def work(url: str, tuned: bool) -> None:
    async def run() -> None:
        queuer = PgQueuer.from_asyncpg_connection(await asyncpg.connect(url))

        @queuer.entrypoint("noop")
        async def noop(job: Any) -> None:
            said = json.loads(job.payload)
            mark(said["label"], said["due"])

        if tuned:
            await queuer.run(batch_size=100, dequeue_timeout=timedelta(seconds=0.1))
        else:
            await queuer.run()

    asyncio.run(run())
