"""Golden figures of the world's runs and of plans: python -m tests.end_to_end.goldens writes them anew.

The file changes only in a commit of its own that says why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.end_to_end.running import Place
from tests.end_to_end.world import RUNS, World

FILE = Path(__file__).with_name("goldens.json")
STEP = 20
# `pairs` takes 120 large steps, in which sums of another order become other weights.
COMPARED = tuple(name for name in RUNS if name != "pairs")
PLANS = (
    "--model_preset=t5-small --memory_budget=2G --target=laptop_16gb",
    "--model_preset=t5-base --memory_budget=4G --target=laptop_16gb",
    "--model_preset=t5-base --target=gpu_16gb_t4 --max_seq_len=512",
    "--model_preset=chatlm-0.2b --memory_budget=1500M --effective_batch_size=16 --target=laptop_16gb",
    "--model_preset=byt5-small --target=laptop_16gb --max_seq_len=1024",
    "--model_preset=tiny --memory_budget=500M --memory_mode=ultra --target=laptop_16gb",
)


def losses(world: World) -> dict[str, float]:
    """Run -> its loss at step 20."""
    for name in COMPARED:
        world.path(name)
    return {name: world.place.losses(name)[STEP] for name in COMPARED}


def figures_of_plan(place: Place, flags: str) -> dict[str, int]:
    """The peak that is planned, in MiB, and the rows of a step."""
    plan = json.loads(place.do("plan", *flags.split(), "--json=True").stdout)["plan"]
    return {"peak_mib": plan["peak_bytes"] >> 20, "rows": plan["effective_batch_size"]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        world = World.open(Path(made))
        plans = {flags: figures_of_plan(world.place, flags) for flags in PLANS}
        recorded = {"losses": losses(world), "plans": plans}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf8")
