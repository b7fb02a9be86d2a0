"""Faults for processes that are started anew: Python imports this file first where its folder is on PYTHONPATH."""

from benchmarks.faults.disk_faults import start_as_told

start_as_told()
