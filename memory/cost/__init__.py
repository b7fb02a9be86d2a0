"""What one way to run a step takes, in bytes and in seconds, predicted from shapes.
`prediction` is the face: it adds up blocks, step peaks, heap, speed and sharing of a `work`; `shapes` are its batches.
Imported by `memory.plan` and its neighbours, the engine (`shapes`) and training.
"""
