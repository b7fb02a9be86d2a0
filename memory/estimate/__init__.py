"""Peak memory and time of an execution plan, by formulas: `peaks` adds up blocks, attention and what malloc keeps; `time`.

`workload` has the terms they speak in, `shapes` the batches. Imports devices and settings alone.
"""
