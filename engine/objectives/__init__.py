"""A step's loss, given what the decoder hands to the head. One file an objective.
`objective` is the interface and cross-entropy; `preference` compares two answers.
Imports the model's loss and micro-batches; training chooses one (`training.setup.build`).
"""
