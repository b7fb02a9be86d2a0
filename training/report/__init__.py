"""What a user sees of a run: `progress` on the screen, `summary` before and after, `tracking` in the log.
`journal` tells each event once to all of them; `results` is what evaluations find.
Imports no other room; every other room may import from here.
"""
