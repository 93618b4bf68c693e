"""One run: the stage, the traffic, the faults, the settling, the audit, the report."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import record
from tests.chaos.audit import Audit, Findings
from tests.chaos.faults import FAULTS
from tests.chaos.injector import Injector
from tests.chaos.site import Stage
from tests.chaos.traffic import Traffic
from tests.nodes import DEPLOYMENTS, FAST_REDELIVERY, Bench, Servers

MODULE = "tests.chaos.proj"


@dataclass(frozen=True)
class Plan:
    """What is to be done. All times in seconds."""

    seed: int
    seconds: float
    broker: str = "rabbitmq"
    kinds: tuple[str, ...] = tuple(FAULTS)
    #: From one fault to the next, on average.
    pause: float = 2.0
    #: Sends: a task, a chain or a chord each.
    per_second: float = 1.0
    #: From the last fault until every task has to be at its end.
    settle: float = 120.0
    #: Where the evidence is put; None: in a new temporary folder, which is removed when all is well.
    folder: Path | None = None


@dataclass
class Report:
    """What a run has come to."""

    plan: Plan
    folder: Path
    struck: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    #: What is wrong apart from single tasks.
    complaints: list[str] = field(default_factory=list)
    sent: int = 0
    #: What kept tasks from being sent.
    send_errors: Counter[str] = field(default_factory=Counter)
    settled_in: float = 0.0
    looks: int = 0
    refused_starts: int = 0
    celerys_own: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        return not self.complaints and not self.findings.complaints

    def text(self) -> str:
        """The report as printed."""
        findings = self.findings
        lines = [f"seed {self.plan.seed}, {self.plan.broker}, {self.plan.seconds:.0f} s"]
        lines += [f"{sum(self.struck.values())} faults survived:"] if self.is_good else ["faults:"]
        lines += [f"  {count:5d}  {kind}" for kind, count in sorted(self.struck.items())]
        lines.append(f"{self.sent} tasks, {findings.runs} runs, {findings.replays} of them replays:")
        lines += [f"  {count:5d}  {outcome}" for outcome, count in sorted(findings.outcomes.items())]
        if findings.lateness:
            late = sorted(findings.lateness)
            median, most = statistics.median(late), late[-1]
            lines.append(f"{len(late)} sleeps, late by {median:.2f} s in the median, {most:.1f} s at most")
        lines.append(f"settled in {self.settled_in:.0f} s; the tables were looked at {self.looks} times")
        lines += [f"  {count:5d}  sends: {error}" for error, count in sorted(self.send_errors.items())]
        if self.refused_starts:
            lines.append(f"{self.refused_starts} starts without a database, each tried again")
        for reason, count in self.celerys_own.items():
            lines.append(f"{count} workers ended by Celery itself and started again: {reason}")
        if findings.stale_states:
            lines.append(f"{len(findings.stale_states)} states left behind by a process that died")
        lost, doubled = len(findings.lost), len(findings.double_writes)
        lines.append(f"{lost} tasks lost, {doubled} accepted double writes")
        wrong = [*self.complaints, *findings.complaints]
        if wrong:
            lines += [f"WRONG ({len(wrong)}):", *(f"* {complaint}" for complaint in wrong)]
            lines.append(f"the evidence is in {self.folder}")
        return "\n".join(lines)


def play(plan: Plan, say: Callable[[str], None] = print) -> Report:
    """Do the whole of it."""
    folder = plan.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"seed {plan.seed}: {plan.broker} and PostgreSQL for {plan.seconds:.0f} s, in {folder}")
    report = Report(plan, folder)
    servers = Servers()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(record.VARIABLE, str(folder / "witness.jsonl"))
        bench = Bench(DEPLOYMENTS[f"{plan.broker}-postgres"], servers, folder, MODULE, monkeypatch)
        bench.env[record.VARIABLE] = str(folder / "witness.jsonl")
        try:
            _configure(bench)
            _play(plan, bench, report, say)
        finally:
            _keep(report, servers)
            bench.close()
            servers.remove()
    if report.is_good and plan.folder is None:
        shutil.rmtree(folder)
    return report


def _configure(bench: Bench) -> None:
    if bench.deployment.broker == "redis":
        bench.configure(
            broker_transport_options={**FAST_REDELIVERY, "socket_timeout": 4, "socket_connect_timeout": 3},
            redis_socket_timeout=4,
            redis_socket_connect_timeout=3,
        )
    else:
        bench.configure(broker_transport_options={"confirm_publish": True})


def _play(plan: Plan, bench: Bench, report: Report, say: Callable[[str], None]) -> None:
    bench.app().durable.upgrade()
    stage = Stage(bench)
    stage.observer.start()
    traffic = Traffic(bench.project, f"{plan.seed} traffic", plan.per_second)
    injector = Injector(stage, f"{plan.seed} faults", plan.kinds, plan.pause, bench.folder / "faults.jsonl")
    traffic.start()
    try:
        say(f"running for {plan.seconds:.0f} s")
        injector.run(plan.seconds)
    finally:
        report.struck = injector.struck
        stage.heal()
        traffic.stop()
    say(f"{sum(injector.struck.values())} faults; settling")
    began = time.monotonic()
    stage.wait_until(lambda: _is_settled(stage), plan.settle)
    report.settled_in = time.monotonic() - began
    stage.observer.stop()
    tables = stage.observer.look()
    report.looks = stage.observer.looks
    report.sent, report.send_errors = len(traffic.sent), Counter(traffic.errors)
    states = _states(bench, traffic.sent)
    lines = record.read(bench.folder / "witness.jsonl")
    losses = stage.flushes
    if plan.broker == "redis":
        # Redis hands a message to a connection and keeps no copy until the worker has noted it.
        losses = [*losses, *_deaths(bench.folder / "faults.jsonl")]
    report.findings = Audit(traffic.sent, lines, tables, states, losses).run()
    report.refused_starts, report.celerys_own = stage.refused_starts, stage.celerys_own
    report.complaints = [*stage.observer.complaints, *stage.deaths]


def _is_settled(stage: Stage) -> bool:
    """Whether no row waits for anything, and the broker holds nothing."""
    tables = stage.observer.latest
    if tables is None:
        return False
    if any(row["wake_at"] is not None for row in tables.rows.values()):
        return False
    return stage.bench.queue_is_empty()


def _states(bench: Bench, task_ids: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """The state and the result of each task in the result store."""
    backend: Any = bench.app().backend
    metas: dict[str, Any] = {}
    if hasattr(backend, "task_cls"):
        # All at once: the database store makes a connection for each that it is asked for.
        session = backend.ResultSession()
        for row in session.query(backend.task_cls):
            data = row.to_dict()
            if hasattr(backend, "_decode_stored_result"):
                data["result"] = backend._decode_stored_result(data["result"])
            metas[row.task_id] = backend.meta_from_decoded(data)
        session.close()
    else:
        metas = {task_id: backend.get_task_meta(task_id, cache=False) for task_id in task_ids}
    absent = {"status": "PENDING", "result": None}
    found = {task_id: metas.get(task_id, absent) for task_id in task_ids}
    return {task_id: (meta["status"], meta["result"]) for task_id, meta in found.items()}


def _deaths(log: Path) -> list[float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["time"] for line in lines if not line["what"].startswith("healed")]


def _keep(report: Report, servers: Servers) -> None:
    """Put the servers' logs beside the others."""
    for server in servers.made():
        if server.log_file.exists():
            shutil.copy(server.log_file, report.folder)


def new_seed() -> int:
    """A seed that nobody has chosen."""
    return random.SystemRandom().randrange(1_000_000)
