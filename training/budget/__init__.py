"""How a run gets its plan and keeps it: `planning` before, `keeping` during.
`probing` is the child process in which the worst steps are measured; nothing imports it.
May import every other room of training; the trainer and the front of training import from here.
"""
