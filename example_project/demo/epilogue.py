"""What was to be seen, in plain words, and what plain Celery would have made of it."""

from __future__ import annotations

from textwrap import wrap

from example_project.demo.verdict import Dark

WIDTH = 96
PLAIN_CELERY = (
    "With plain Celery, a countdown cannot stand in the middle of a task; its message waits in the memory of"
    " a worker, unacknowledged, and after a kill the broker has to send it again, which Redis does after an"
    " hour. A time.sleep holds a pool process for three days (three tasks, and here are two) and ends with"
    " it: the task is lost, or with acks_late begins again and sends its welcome twice."
)


def epilogue(dark: Dark) -> list[str]:
    seconds = dark.restarted_at - dark.killed_at
    killed = (
        f"Killed without a warning: worker and beat, {dark.killed} processes, while {len(dark.states)} tasks"
        f" slept; for {seconds:.1f} s there was no process at all."
    )
    kept = (
        f"Kept meanwhile: {dark.rows} rows in a database, {dark.messages or 'no'} messages in the broker."
        " Then each task went on behind its sleep, with no step done twice."
    )
    return [text for part in (killed, kept, PLAIN_CELERY) for text in wrap(part, WIDTH)]
