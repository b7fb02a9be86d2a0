"""Checks of the code itself, each a command `python -m benchmarks.checks.NAME`: tests (`mutants`), damaged files
(`fuzz`), a step's GPU kernels (`launches`), the README's tables (`plan_table`).
Nothing imports from here.
"""
