"""What a user sees of a run. `run_log` hands each event once to the screen (`progress`), the files (`log_files`),
`trackers` and callbacks; `run_files` reads them again for the page, `card`, which is published, and `history`, which is
drawn; `summary` is shown before and after. Imports no other part of `training`; every other part may import from here.
"""
