"""Whether a run fits: `budget` says what there is, `plan` chooses, `probe` measures the choice, `controller` keeps the
run to it.

`answers` says how a model is held that answers, and for how many rows. `estimate` has the formulas, `system_limits` and
`processes` read the system, `monitor` a run's memory, `cleanup` frees what nobody uses. Imports devices and settings
alone; engine, training and commands import from here.
"""
