"""What memory.observe.monitor asks a device, answered as the CPU does, without importing torch."""


class NoDevice:
    name, is_separate_memory = "cpu", False

    def memory_now_bytes(self) -> int:
        return 0

    memory_idle_bytes = memory_peak_bytes = memory_total_bytes = pinned_bytes = memory_now_bytes
