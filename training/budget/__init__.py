"""How a run gets its plan: `planning`.
`probing` is the child process in which the worst steps are measured; nothing imports it.
May import every other room of training; the trainer and the front of training import from here.
"""
