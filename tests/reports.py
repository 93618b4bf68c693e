"""What users of Celery report again and again about waiting and liveness, and the rules of a durable sleep.

Each entry has tests that would fail if this extension behaved as the report complains: they carry the mark
`@pytest.mark.report("its-name")`. `pytest -m report` runs them all; `tests/unit/test_reports.py` holds the
list and the marks together.
"""

from __future__ import annotations

#: Reports of Celery's users: what went wrong for them.
REPORTS = {
    "redelivery-window": "a countdown beyond the broker's patience is handed out again and runs many times",
    "second-copy": "a long task is started again while its first copy still works",
    "consumer-timeout": "RabbitMQ closes the channel over a message that waits unacknowledged",
    "worker-killed": "a killed worker takes its task with it, or hides it until the broker's window ends",
    "many-schedulers": "two schedulers send everything twice, and one is a single point of failure",
    "sleepers-fill-worker": "delayed tasks fill the memory and the prefetch of the first worker",
    "database-restart": "the scheduler does not come back from a restart of its database, nor does it end",
    "forked-connection": "a connection is inherited over a fork and used by two processes",
    "broker-reconnect": "a broker that comes back is the end of consuming, or of what was running",
    "terminate-by-pool": "terminate does nothing outside of the prefork pool",
    "deploy": "what waits disappears at a deploy, or comes back twice",
    "missed-runs": "what fell due while no scheduler was up is dropped, or never comes in a crash loop",
    "many-timers": "thousands of timers make the scheduler late",
    "taken-for-dead": "a live task is declared dead because its renewal was held up",
    "connection-lost-mid-run": "the broker's connection drops in mid-run and the work is done twice",
    "native-delay": "RabbitMQ's native delayed delivery holds on to messages or drops them",
    "running-for-ever": "a task is shown as running for ever after its worker died",
    "kills-its-worker": "a task that kills its worker is recovered for ever",
    "time-limits": "time limits count the wrong time, or mean something else in each pool",
    "swallowed-control-flow": "a decorator or an `except Exception` catches what should end the run quietly",
    "sent-before-commit": "a task starts before its transaction commits, or after it was rolled back",
    "eager": "tasks behave differently in eager mode and in tests",
    "connections-per-task": "each task or thread takes a database connection of its own",
    "received-twice": "one retry or wake is received several times, and runs as often",
    "expiry": "what expires while it waits runs all the same, or is revoked for no reason",
    "missing-signals": "hooks and signals never come, or come twice",
    "results-expire": "results and chord counters expire before the wait is over",
    "wrong-lane": "delayed work comes back with another priority, or in another queue",
    "recycled-children": "children that are replaced in mid-flight stall the pool or leave something behind",
    "lock-out": "sweeps, renewals and updates lock each other out",
    "absurd-times": "a negative, huge or broken time brings a process down",
}

#: What a durable sleep, a step and a lease have to hold to.
RULES = {
    "timer-id": "the timer of a task and position has one id, always the same, and nobody else's",
    "due-is-inclusive": "what is due now is found, what is due later is not",
    "one-dispatcher": "of many dispatchers one sends a due row, the others say nothing",
    "short-sleep-alone": "a sleep of some milliseconds needs no scheduler",
    "overdue-returns-at-once": "a sleep that was over while the task was away returns at once",
    "stored-time-wins": "a replay with another time keeps the stored one",
    "racing-arms": "two that write the same sleep leave one, and no error",
    "unreadable-row": "one row that cannot be read holds up nobody; a failed look is made again",
    "backlog": "a backlog drains in batches, oldest first",
    "ended-never-wakes": "what was cancelled, failed or has finished is not woken",
    "first-poll": "what fell due in a downtime is sent at the first poll",
    "lost-and-doubled-wakes": "a wake that was lost is sent again; one that came twice resumes once",
    "killed-while-parking": "killed between writing the sleep and leaving the body: one sleep, on time",
    "moved-clock": "no sleep ends early, whatever the clocks say",
    "step-once": "a journaled step is replayed and not run; one that raised leaves no result",
    "divergence": "another call at a journaled place is an error that names both",
    "limits": "the limits of steps and payloads hold to the one, before anything is written",
    "one-outcome": "finished twice, or finished and cancelled: one final status",
    "pruning": "pruning takes what is old and ended, with its journal, in batches",
    "guard": "a loss is sticky; an error of a renewal is no loss before the deadline",
    "lost-ends-heartbeat": "a heartbeat that hears of a loss renews no more",
    "local-deadline": "a holder stops to believe before its stored expiry, counted from the send",
    "heartbeat-stop": "to stop a heartbeat does not wait for the database",
    "fencing": "a claim raises the token, and the old one's writes are refused and change nothing",
    "takeover-at-expiry": "a lease is taken over at its expiry, not before; a late renewal is accepted",
    "handed-back": "a lease handed back makes the task due and counts no crash",
    "shutdown-before-body": "when the worker stops before the body began, it does not begin",
    "loss-is-no-failure": "a loss, a renewal timeout and a shutdown spend no retry and write no failure",
    "loss-stops-the-run": "a lost lease ends a blocked call; who ignores it commits nothing",
    "crash-limit": "a task whose workers die again and again is taken out at the limit",
    "two-processes": "killed or cut off, an owner stops before the next one begins, and changes nothing",
}

ENTRIES = REPORTS | RULES
