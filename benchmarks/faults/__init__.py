"""What becomes of a run that is killed anywhere, or whose disk or mirror fails? Long runs, by command.
`kills` with its cases and pairs, `disk_faults`, `mirror_faults`, `soak`, `warm`.
Imported by benchmarks and their tests alone.
"""
