"""Where it runs: the only code that names a backend. Importing this package does not import torch."""

from devices.choose import pick

__all__ = ["pick"]
