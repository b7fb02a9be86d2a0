"""What happens around the step. `live` is a run while it trains; beside it stands what is done with one: `evaluating`,
`saving`, `averaging`, `recovering` (after `divergence`, too) and `recording`; `probing` measures the largest steps
before the first one. Folders: `report`, `processes`, `evaluation`, `checkpoints` and `setup`, of which the last imports
from the others. The trainer and the commands import from here, nothing below does.
"""
