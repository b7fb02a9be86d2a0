"""Do the tests find what they should? `covered` and `mutants` ask the tests, `fuzz` the readers.
`launches` counts the kernels of a GPU that is not here; `plan_table` keeps the READMEs true. Each is a command: `python -m benchmarks.checks.NAME`.
Nothing imports from here.
"""
