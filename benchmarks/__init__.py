"""Benchmarks: what durable tasks cost beside plain ones, beside the peers, and beside the limits.

``python -m benchmarks --help``; what each row means is said in ``docs/performance.md``.
"""
