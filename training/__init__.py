"""What happens around the step. In front: `ahead`, all before torch; `opening`, all before the first step; `live`, what is in
training now, and what is done with it: `evaluating`, `saving`, `averaging`, `recovering`, `recording`, `divergence`. Rooms, each of which may
import those before it: `report`, `processes`, `evaluation`, `checkpoints`, `start`, `budget`. The trainer and the commands import
from here, nothing below.
"""
