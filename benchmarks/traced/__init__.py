"""What does a step ask of a GPU that is not here? `traced_step` runs a real one on meta tensors, `tracing` counts.
The command is `benchmarks.checks.launches`.
Tests import from here, and that command.
"""
