"""Runs that are killed anywhere, or whose disk or mirror fails, each a command:
`kills` with its cases and pairs, `disk_faults`, `mirror_faults`, `soak`, `warm`.
Imported by benchmarks and their tests only.
"""
