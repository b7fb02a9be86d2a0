"""Weight offload: blocks' weights are stored on a disk, or in the RAM beside a device, and loaded while their block
works. `store` is the weight store in front, `prefetch` the buffers that blocks are loaded into beside the computation,
`backends` where they are stored.
"""
