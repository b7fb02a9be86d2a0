"""What is written so that nothing is lost: runs, checkpoints, their state, copies elsewhere.
`folder` writes, `content` and `state` say what, `runs` and `run_lock` who; `mirror` copies.
Imports `report`, `processes` and `evaluation`; rooms after it and the commands import from here.
"""
