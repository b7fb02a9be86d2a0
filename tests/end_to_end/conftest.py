"""One small pretraining run, made once, from which the end-to-end tests go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.running import Place, write_pairs, write_text

STEPS = 24
SHAPE = (
    "--d_model=32", "--d_kv=16", "--d_ff=64", "--num_heads=2", "--num_layers=1", "--num_decoder_layers=2",
    "--vocab_size=512",
)  # fmt: skip
# dropout is on and the batch is odd: neither may make a difference to any of the comparisons
WORK = (
    "--max_seq_len=64", f"--max_steps={STEPS}", "--save_steps=5", "--eval_steps=12", "--effective_batch_size=7",
    "--dropout_rate=0.1", "--mixed_precision=no", "--seed=5", "--sample_rows=1", "--eval_rows=16",
)  # fmt: skip
# Sums in another order differ by 1e-7. Where that puts one unit of one token on the other side of ReLU's kink, its gradient is
# another, which made 1.5e-5 in 24 steps (a processor with AVX2); 1e-4 more of dropout already makes 2e-3.
SAME = 1e-4


@dataclass(frozen=True)
class World:
    """The data files, the flags of the small run, and the folders in which it was made."""

    place: Place
    text: Path
    pairs: Path

    @property
    def train_flags(self) -> tuple[str, ...]:
        return (f"--train_file={self.text}", *SHAPE, *WORK)

    def beside(self, folder: Path) -> Place:
        """Empty folders of another test, with the same cache."""
        return Place(folder, self.place.cache)

    def difference(self, place: Place, name: str) -> float:
        """Largest relative difference of a run's losses to those of the undisturbed run, `whole`."""
        ours, theirs = place.losses(name), self.place.losses("whole")
        assert ours.keys() == theirs.keys()
        return max(abs(ours[step] / theirs[step] - 1) for step in ours)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Data files; nothing is trained yet."""
    folder = tmp_path_factory.mktemp("world")
    place = Place(folder, folder / "cache")
    return World(place, write_text(folder / "text.txt"), write_pairs(folder / "pairs.jsonl"))


@pytest.fixture(scope="session")
def pretrained(world: World) -> World:
    """The same with one pretraining run, `whole`, that nothing has disturbed."""
    done = world.place.do("train", *world.train_flags, "--run_name=whole")
    (world.place.folder / "screen.txt").write_text(done.stdout, encoding="utf8")
    return world
