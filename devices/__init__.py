"""Where it runs: the only code that names a backend. `base` is what a device can tell and do, `choose` picks one.
`cpu`, `cuda` and `mps` fulfil it, `pointwise` has kernels for GPUs; beside them what machines are like: processor,
cores, speeds, malloc, environment. Imports settings and config; all but those import from here, mostly `pick` and
`base`. Importing the package loads no torch.
"""

from devices.choose import pick

__all__ = ["pick"]
