"""What a user sees of a run: `run_log` has each event heard once by the screen (`progress`), the files (`log_files`),
`trackers` and callbacks; `summary` is what is shown before and after, `card` what is published, `history` what is drawn
afterwards. Imports no other room; every other room may import from here.
"""
