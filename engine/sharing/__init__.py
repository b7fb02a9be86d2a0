"""What several processes do together in a step.
`reduce` sums each block's gradients as soon as they are complete; `sharding` gives each process its rows of a matrix.
Imported by the walk's policies, the optimizers and training.
"""
