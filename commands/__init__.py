"""What can be typed besides training: one file a command, named like it, with a function of that name.
`answering` finds a trained model and its settings of answers, `loading` opens it inside the budget,
`new_folder` writes a folder whole or not at all; `diagnosis/`.
Only `train_low_mem` imports from here; a command may import everything below, and what another command offers.
"""
