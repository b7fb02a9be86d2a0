"""Imported last by the fork server of `warm.py`."""

from tests import warm

warm.set_imports_aside()
