"""What a user sees of a run. `run_log` hands each event once to the screen (`progress`), the files (`log_files`),
`trackers` and callbacks; `run_files` reads them again for `card`, which is published, `history`, which is drawn, and the
page; `summary` is shown before and after. Imports no other part of `training`; every other part may import from here.
"""
