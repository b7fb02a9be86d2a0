"""What is really there and really used: budget, control groups, processes, peaks.
`system_limits` tell what there is, `monitor` a run's memory now; `processes` and `high_water` are their sources.
Imports devices and settings alone; `memory`'s front, training and commands import from here.
"""
