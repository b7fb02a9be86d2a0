"""How one step runs in little memory: `walk` goes through the blocks and back, the other files are its policies.
Rooms: `objectives`, what is minimised; `optimizers`, what changes a weight; `homes`, where weights rest; `sharing`, many processes.
Imports model, data and memory; training imports from here.
"""
