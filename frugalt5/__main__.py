"""`frugalt5 COMMAND` and `python -m frugalt5 COMMAND`: the same as `python train_low_mem.py COMMAND`."""

from __future__ import annotations

import sys

from support.signals import leave_at_ctrl_c

leave_at_ctrl_c()  # before what takes time to import

import train_low_mem  # noqa: E402


def main() -> None:
    """Run the command line of this process."""
    sys.exit(train_low_mem.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
