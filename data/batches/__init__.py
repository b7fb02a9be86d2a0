"""Token rows to batches: `order` says which row is where, `mixture` from which source, its task what is trained.
`collate` makes a rectangle, `loader` gives a process its batches, `step_lengths` counts for the plan.
`loader` is the face; engine takes `collate`.
"""
