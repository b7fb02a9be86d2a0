"""How one step runs in little memory: the walk through the blocks and back, and its policies."""
