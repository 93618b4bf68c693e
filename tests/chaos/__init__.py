"""Chaos: real workers, schedulers and servers under a seeded random schedule of faults.

    python -m tests.chaos --minutes 10 --seed 7

Everything is healed at the end and left to settle; then each task is checked against the witness. See
``__main__`` for the options; ``test_chaos.py`` is a slice of it for the suite.
"""
