"""Do the tests find what they should (`covered`, `mutants`), the readers what is damaged (`fuzz`), a step its GPU (`launches`)?
`plan_table` keeps the READMEs true. Each is a command: `python -m benchmarks.checks.NAME`.
Nothing imports from here.
"""
