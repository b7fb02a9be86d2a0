"""How one step runs in little memory: `step` is one optimizer step, `blockwise` the loop over blocks and its order,
`optimizer_in_backward` what follows each block's backward. `gradient_checkpointing`, `weight_offload` and `all_reduce`
are one technique each; `objectives` is what is minimised, `optimizers` what changes a weight.
Imports model, data and memory; training imports from here.
"""
