"""Peak memory and time of an execution plan: `peaks` adds up a step from `blocks`, `time` predicts its seconds.

`workload` has the terms they speak in, `shapes` the batches, `disk` what a run writes. Imports devices and settings
alone.
"""
