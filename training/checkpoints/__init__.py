"""What is written so that nothing is lost: runs, checkpoints and their state.
`folder` writes, `content` and `state` say what, `runs` and `run_lock` who.
Imports `report`, `processes` and `evaluation`; rooms after it and the commands import from here.
"""
