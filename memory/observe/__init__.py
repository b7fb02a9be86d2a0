"""What is really there and really used: budget, control groups, processes, peaks.
`budget` is the limit of a run, `monitor` its memory now; `cgroup`, `processes`, `high_water`, `growth` are their sources.
Imports devices and settings alone; `memory`'s front, training and commands import from here.
"""
