"""Runs that are killed anywhere, or whose disk fails, each a command:
`kills` with its cases and pairs, `disk_faults`, `soak`, `warm`.
Imported by benchmarks and their tests only.
"""
