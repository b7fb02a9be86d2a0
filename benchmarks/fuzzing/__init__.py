"""Damaged and hostile files: makers of sound ones, mutations, and a child process that reads the copies.

`python -m benchmarks.checks.fuzz` runs it for hours, `tests/end_to_end/test_damaged_files.py` for seconds.
Imports every reader of foreign files.
"""
