"""A folder that looks like the / of a Linux machine: /proc with processes, /sys/fs/cgroup with limits."""

from __future__ import annotations

from pathlib import Path

from support.units import GIB

ME = 100


class FakeMachine:
    """Sizes are in bytes. Process 100, a child of 50, is the one whose budget is asked for."""

    def __init__(self, root: Path, available: int = 16 * GIB, anon: int = 0) -> None:
        self.root = root
        self.parents = dict[int, int]()
        self.write("proc/meminfo", f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {available // 1024} kB\n")
        self.process(ME, parent=50, anon=anon)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(
        self,
        pid: int,
        parent: int,
        anon: int = 0,
        file: int = 0,
        shared: int = 0,
        mapped: int = 0,
        highest: int = 0,
        name: str = "py",
        environ: str = "",
    ) -> None:
        self.parents[pid] = parent
        for above in self.parents:
            children = (str(child) for child, its_parent in self.parents.items() if its_parent == above)
            self.write(f"proc/{above}/task/{above}/children", " ".join(children))
        sizes = dict(VmSize=mapped, VmData=mapped, VmHWM=highest, RssAnon=anon, RssFile=file, RssShmem=shared)
        lines = "".join(f"{field}:\t{size // 1024:8} kB\n" for field, size in sizes.items())
        for folder in (pid, "self") if pid == ME else (pid,):
            self.write(f"proc/{folder}/status", f"Name:\t{name}\nPPid:\t{parent}\n{lines}Threads:\t2\n")
        self.write(f"proc/{pid}/environ", environ)

    def groups(self, lines: str, mounts: str = "") -> None:
        self.write(f"proc/{ME}/cgroup", lines)
        self.write(f"proc/{ME}/mountinfo", mounts)

    def v2(
        self, folder: str, limit: int | str = "max", used: int = 0, file_pages: int = 0, high: int | str = "max"
    ) -> None:
        base = f"sys/fs/cgroup/{folder}".rstrip("/")
        self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.high", f"{high}\n")
        self.write(f"{base}/memory.current", f"{used}\n")
        self.write(f"{base}/memory.stat", f"anon 1\ninactive_file {file_pages}\nactive_file 0\nslab_reclaimable 0\n")

    def v1(self, folder: str, limit: int, used: int = 0, file_pages: int = 0) -> None:
        base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{base}/memory.stat", f"cache 5\ntotal_inactive_file {file_pages}\ntotal_active_file 0\n")
