"""A GPU step traced without a GPU: `traced_step` runs it on meta tensors, `tracing` counts.
The command is `benchmarks.checks.launches`.
Imported by tests and that command.
"""
