"""The loss of a machine: a run over two "hosts" on this one, one of which is lost in the middle.

    python -m benchmarks.two_hosts            (Linux, root)

Each host is a network namespace with an address of its own; a pair of virtual cables joins them. Both start the very
same torchrun command. When the run is in its middle, the second host's cable is cut and everything on it killed, as
when a machine loses power: nothing tells the first host but silence. Then the second host comes back and types its
command again. The first host's launcher restarts its process meanwhile, both meet again, and the run continues from its
last checkpoint. Its losses have to be those of a run that nobody disturbed.
Source: ip-netns(8), veth(4); torchrun's elastic launch.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page import ROOT
from benchmarks.parts.children import TINY_BLOCKS
from benchmarks.parts.rows import read_rows

STEPS, LOST_AT, PORT = 60, 15, 29400
TINY = (
    *TINY_BLOCKS,
    "--vocab_size=512",
    "--max_seq_len=64",
    f"--max_steps={STEPS}",
    "--save_steps=5",
    "--eval_steps=30",
    "--effective_batch_size=7",
    "--dropout_rate=0.1",
    "--mixed_precision=no",
    "--sample_rows=0",
)

# A launcher that has come back asks for an address that the others have told in the first round alone, unless so.
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Hosts:
    """Two network namespaces, joined, while the context is open.

    Args:
        number: keeps several rehearsals on one machine apart.
    """

    def __init__(self, number: int | None = None) -> None:
        number = os.getpid() if number is None else number
        self.names = [f"host{side}_{number}" for side in "ab"]
        self.cables = [f"v{side}{number}" for side in "ab"]
        self.addresses = [f"10.{77 + number % 100}.{number // 100 % 250}.{last}" for last in (1, 2)]

    def __enter__(self) -> Hosts:
        for name in self.names:
            _ip("netns", "add", name)
            names = Path("/etc/netns", name)  # what these hosts see as /etc: no name server to wait for
            names.mkdir(parents=True)
            (names / "resolv.conf").write_text("")
            known = "".join(f"{a} {n}\n" for a, n in zip(self.addresses, self.names, strict=True))
            (names / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{known}")
        _ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", cable, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for side, name in enumerate(self.names):
            self.kill(side)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def start(self, side: int, command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        """Start a command on one host; its messages go into a file of `folder`."""
        environment = {**os.environ, **ELASTIC, "GLOO_SOCKET_IFNAME": self.cables[side], "OMP_NUM_THREADS": "1"}
        with open(folder / f"host_{side}.txt", "ab") as messages:
            inside = ["ip", "netns", "exec", self.names[side], *command]
            return subprocess.Popen(inside, cwd=folder, env=environment, stdout=messages, stderr=messages)

    def cut(self, side: int, is_cut: bool = True) -> None:
        """Pull one host's cable, or put it back."""
        _ip("-n", self.names[side], "link", "set", self.cables[side], "down" if is_cut else "up")

    def kill(self, side: int) -> None:
        """End everything on one host at once."""
        found = subprocess.run(["ip", "netns", "pids", self.names[side]], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def can_make_hosts() -> bool:
    """Whether this user may make network namespaces here."""
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    name = f"probe_{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


def rehearse(folder: Path, text: Path, cache: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Run the same work undisturbed and over two hosts, one of which is lost.

    Returns:
        step -> loss of the undisturbed run, and of the other.
    """
    work = [
        f"--train_file={text}",
        f"--cache_dir={cache}",
        f"--log_dir={folder / 'logs'}",
        f"--output_dir={folder / 'runs'}",
    ]
    program = str(ROOT / "train_low_mem.py")
    command = [program, "train", *work, *TINY, "--is_keep_training=auto"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command, "--run_name=alone"], cwd=folder, env=alone, check=True, capture_output=True
    )
    with Hosts() as hosts:
        launches = [_torchrun(hosts, side, [*command, "--run_name=hosts"]) for side in (0, 1)]
        first, second = (hosts.start(side, launches[side], folder) for side in (0, 1))
        _wait_for_step(folder / "logs/hosts/metrics.jsonl", LOST_AT, first)
        hosts.cut(1)
        hosts.kill(1)
        second.wait()
        time.sleep(1.0)
        hosts.cut(1, is_cut=False)
        second = hosts.start(1, launches[1], folder)
        codes = first.wait(180), second.wait(60)
    if codes != (0, 0):
        raise RuntimeError(f"exit codes {codes}\n" + (folder / "host_0.txt").read_text(errors="replace")[-5000:])
    return losses(folder / "logs/alone/metrics.jsonl"), losses(folder / "logs/hosts/metrics.jsonl")


def losses(metrics: Path) -> dict[int, float]:
    """Step -> loss of a run."""
    return {event["step"]: event["loss"] for event in read_rows(metrics) if event["event"] == "step"}


def _torchrun(hosts: Hosts, side: int, command: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--max_restarts=5",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={hosts.addresses[0]}:{PORT}",
        "--rdzv_id=rehearsal",
        f"--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=3,is_host={1 - side}",
        f"--local_addr={hosts.addresses[side]}",
        *command,
    ]


def _wait_for_step(metrics: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and max(losses(metrics), default=0) >= step):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended or hangs before step {step}")
        time.sleep(0.02)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def main() -> int:
    """Rehearse on the texts of this program, and tell."""
    if not can_make_hosts():
        print("network namespaces take Linux, `ip` and root")
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text(
            "".join((ROOT / page).read_text(encoding="utf8") for page in ("README.md", "docs/data.md")), "utf8"
        )
        began = time.monotonic()
        expected, found = rehearse(folder, text, folder / "cache")
        worst = max(abs(found[step] / expected[step] - 1) for step in expected)
        print(f"{len(found)} steps over two hosts, one lost after step {LOST_AT}, {time.monotonic() - began:.0f} s")
        print(f"largest relative difference of the losses to an undisturbed run: {worst:.1e}")
        return 0 if found.keys() == expected.keys() and worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
