"""A folder that looks like the / of a Linux machine: /proc with processes, /sys/fs/cgroup with limits."""

from __future__ import annotations

from pathlib import Path

GIB, MIB = 2**30, 2**20
ME = 100


class FakeMachine:
    """Sizes are in bytes. Process 100, a child of 50, is the one whose budget is asked for."""

    def __init__(self, root: Path, available: int = 16 * GIB, anon: int = 0) -> None:
        self.root, self.parents = root, dict[int, int]()
        self.write("proc/meminfo", f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {available // 1024} kB\n")
        self.process(ME, parent=50, anon=anon)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(
        self, pid: int, parent: int, anon: int = 0, file: int = 0, shared: int = 0, mapped: int = 0, name: str = "py"
    ) -> None:
        self.write(f"proc/{pid}/stat", f"{pid} ({name}) S {parent} 0 0 0")
        self.parents[pid] = parent
        for above in self.parents:
            children = (str(child) for child, its_parent in self.parents.items() if its_parent == above)
            self.write(f"proc/{above}/task/{above}/children", " ".join(children))
        rows = {"VmSize": mapped, "VmData": mapped, "RssAnon": anon, "RssFile": file, "RssShmem": shared}
        self.write(f"proc/{pid}/status", "".join(f"{name}:\t{size // 1024} kB\n" for name, size in rows.items()))

    def groups(self, lines: str, mounts: str = "") -> None:
        self.write(f"proc/{ME}/cgroup", lines)
        self.write(f"proc/{ME}/mountinfo", mounts)

    def v2(self, folder: str, limit: int | str = "max", used: int = 0, file_pages: int = 0, high: int | str = "max"):
        base = f"sys/fs/cgroup/{folder}".rstrip("/")
        self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.high", f"{high}\n")
        self.write(f"{base}/memory.current", f"{used}\n")
        self.write(f"{base}/memory.stat", f"anon 1\ninactive_file {file_pages}\nactive_file 0\nslab_reclaimable 0\n")

    def v1(self, folder: str, limit: int, used: int = 0, file_pages: int = 0, hierarchy: int = 1):
        base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{base}/memory.use_hierarchy", f"{hierarchy}\n")
        self.write(f"{base}/memory.stat", f"cache 5\ntotal_inactive_file {file_pages}\ntotal_active_file 0\n")
