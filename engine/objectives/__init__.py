"""A step's loss, given what the last stack hands to the head. One file an objective.
The interface and cross-entropy stand in `engine.blockwise`; `preference` compares two answers, `labels` learns classes
and numbers. Imports the model's loss and micro-batches; training chooses one (`training.setup.build`).
"""
