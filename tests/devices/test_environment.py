from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devices.environment import HIGH, LOW, PRODUCT_CACHES, prepare_environment

ROOT = Path(__file__).resolve().parent.parent.parent


def prepared(tmp_path, platform, **environ):
    prepare_environment(environ, platform, tmp_path)
    return environ


def test_arrow_uses_malloc_everywhere(tmp_path):
    for platform in ("linux", "darwin", "win32"):
        assert prepared(tmp_path, platform)["ARROW_DEFAULT_MEMORY_POOL"] == "system"
        assert (
            prepared(tmp_path, platform, ARROW_DEFAULT_MEMORY_POOL="jemalloc")["ARROW_DEFAULT_MEMORY_POOL"]
            == "jemalloc"
        )


def test_macs_get_fallback_and_watermarks(tmp_path):
    got = prepared(tmp_path, "darwin")
    assert got["PYTORCH_ENABLE_MPS_FALLBACK"] == "1" and (got[HIGH], got[LOW]) == ("0.8", "0.6")
    assert HIGH not in prepared(tmp_path, "linux")


@pytest.mark.parametrize(
    ("user", "high", "low"),
    [
        ({HIGH: "0.4"}, "0.4", 0.3),
        ({LOW: "1.4"}, "1.4", 1.4),
        ({LOW: "0.2"}, "0.8", 0.2),
        ({HIGH: "0.0"}, "0.0", 0.6),
        ({HIGH: "1.2", LOW: "1.1"}, "1.2", 1.1),
        ({HIGH: "much"}, "much", 0.6),
    ],
)
def test_the_users_watermarks_are_kept_and_the_other_one_fits_to_them(tmp_path, user, high, low):
    got = prepared(tmp_path, "darwin", **user)
    assert got[HIGH] == high and float(got[LOW]) == pytest.approx(low)


def test_expandable_segments_where_there_is_an_nvidia_driver(tmp_path):
    assert "PYTORCH_ALLOC_CONF" not in prepared(tmp_path, "linux")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert prepared(tmp_path, "linux")["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in prepared(tmp_path, "win32")
    assert "PYTORCH_ALLOC_CONF" not in prepared(tmp_path, "linux", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64")
    assert prepared(tmp_path, "linux", PYTORCH_ALLOC_CONF="x")["PYTORCH_ALLOC_CONF"] == "x"


def test_it_tells_what_it_has_set(tmp_path):
    environ = {"PYTORCH_ENABLE_MPS_FALLBACK": "0"}
    new = prepare_environment(environ, "darwin", tmp_path)
    assert (
        set(new) == {"ARROW_DEFAULT_MEMORY_POOL", *PRODUCT_CACHES, HIGH, LOW}
        and environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "0"
    )
    assert prepare_environment(environ, "darwin", tmp_path) == {}


@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_mac_has_them_before_torch_is_imported(tmp_path, command):
    """The whole way from the command line, on a platform that says it is a Mac, with a torch that tells what it finds."""
    (tmp_path / "torch.py").write_text(
        f"import os\nprint(os.environ.get('{HIGH}'), os.environ['PYTORCH_ENABLE_MPS_FALLBACK'], flush=True)\nos._exit(0)\n"
    )
    program = "import sys, sysconfig; sysconfig.get_config_vars(); sys.platform = 'darwin'; import train_low_mem; train_low_mem.main(sys.argv[1:])"
    flags = {"train": ["--max_steps=1"], "generate": ["--input=x"]}[command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), HIGH: "0.5"}
    done = subprocess.run(
        [sys.executable, "-c", program, command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["0.5", "1"], done.stderr


def test_a_notebook_has_it_before_torch_is_imported():
    watch = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': print(*(os.environ.get(each) for each in sys.argv[1:]))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from config import load\n"
        "import trainer_low_mem\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in PRODUCT_CACHES}
    told = subprocess.run(
        [sys.executable, "-c", watch, *PRODUCT_CACHES],
        cwd=ROOT,
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.split() == list(PRODUCT_CACHES.values())


@pytest.mark.parametrize(("first", "variables", "is_late"), [("import torch", {}, True), ("pass", {}, False), ("import torch", PRODUCT_CACHES, False)])  # fmt: skip
def test_torch_that_was_there_first_is_known(first: str, variables: dict[str, str], is_late: bool) -> None:
    told = subprocess.run(
        [sys.executable, "-c", f"{first}\nimport trainer_low_mem\nprint(trainer_low_mem.IS_UNBOUNDED)"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in PRODUCT_CACHES} | variables,
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.split() == [str(is_late)]
