"""Which device does this process use? CUDA first, then MPS, then the CPU, or the one that the user named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from settings.fields import AUTO, UserError, counted

if TYPE_CHECKING:
    from devices.base import Device


def pick(requested: str = AUTO, local_rank: int = 0) -> Device:
    """Choose the device of this process. Imports torch.

    Args:
        requested: "auto", "cuda", "mps" or "cpu".
        local_rank: number of this process on this machine, from 0; CUDA gives each its own GPU.
    Raises:
        UserError: the device asked for is not here, or there are more processes than GPUs.
    """
    from devices import cpu, cuda, mps

    missing = {"cuda": cuda.why_missing(), "mps": mps.why_missing(), "cpu": ""}
    here = [name for name, reason in missing.items() if not reason]
    name = here[0] if requested == AUTO else requested
    if name not in missing:
        raise UserError(f"--device = {requested}, is not known; allowed: auto, {', '.join(missing)}")
    if missing[name]:
        raise UserError(
            f"--device = {requested}, is not here ({missing[name]}); here: {', '.join(here)}; use one of them or auto"
        )
    if name == "cuda":
        count = cuda.count()
        if local_rank >= count:
            raise UserError(
                f"--num_processes = {local_rank + 1} or more, but this machine has {counted(count, 'CUDA device')}; "
                f"allowed: at most {counted(count, 'process')} here; lower it or use --device=cpu"
            )
        return cuda.CudaDevice(local_rank)
    return mps.MpsDevice() if name == "mps" else cpu.CpuDevice()
