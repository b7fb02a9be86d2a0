"""Record the six runs of the world as an earlier version trains them: python -m tests.end_to_end.record CHECKOUT

Folders that users have keep answering: `tests/end_to_end/recorded` holds these runs as that version left them, of
`whole` with its newest checkpoint. Paths of the machine are taken out.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.end_to_end.running import ENVIRONMENT, Place
from tests.end_to_end.world import NAMES, RUNS, World

RECORDED = Path(__file__).parent / "recorded"
SMALLER = ("--d_model=16", "--d_kv=8", "--d_ff=32", "--vocab_size=384")
LEFT_OUT = ("checkpoints", "logs", "README.md", "*.lock")


def record(checkout: Path, folder: Path) -> None:
    """Train the six runs below a folder, and copy what answers from them."""
    place: Place = World.open(folder).place
    for name, (command, *flags) in RUNS.items():
        words = [NAMES.sub(lambda found: str(_path(place, found[1])), flag) for flag in flags]
        smaller = SMALLER if "--vocab_size=512" in words else ()
        line = [str(checkout / "train_low_mem.py"), command, *place.flags(), *words, *smaller, f"--run_name={name}"]
        subprocess.run([sys.executable, *line], cwd=folder, env=ENVIRONMENT, check=True)
        shutil.copytree(place.runs / name, RECORDED / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    losses = {}
    for name in ("pairs", "labels"):
        shutil.copy(place.folder / f"{name}.jsonl", RECORDED)
        line = [
            "evaluate",
            f"--model={place.runs / name}",
            f"--validation_file={place.folder / name}.jsonl",
            "--json=True",
        ]
        done = subprocess.run(
            [sys.executable, str(checkout / "train_low_mem.py"), *line],
            env=ENVIRONMENT,
            check=True,
            capture_output=True,
        )
        losses[name] = json.loads(done.stdout)["loss"]
    (RECORDED / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")
    newest = (place.runs / "whole" / "checkpoints" / "latest").resolve()
    shutil.copytree(newest, RECORDED / "whole" / "checkpoints" / newest.name)
    for path in RECORDED.rglob("*.json"):
        text = path.read_text("utf8")
        clean = text.replace(f"{place.runs}/", "../").replace(f"{folder}/", "")
        if clean != text:
            path.write_text(clean, encoding="utf8")
    (RECORDED / "lora" / "checksums.json").unlink()  # Its base lies elsewhere now.


def _path(place: Place, name: str) -> Path:
    return place.runs / name if name in RUNS else place.folder / name


if __name__ == "__main__":
    shutil.rmtree(RECORDED, ignore_errors=True)
    RECORDED.mkdir()
    with tempfile.TemporaryDirectory() as made:
        record(Path(sys.argv[1]).resolve(), Path(made))
