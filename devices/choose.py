"""Which device this process uses: the first of `config.DEVICES` that is here, or the one that the user named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from settings.errors import UserError
from settings.fields import AUTO, counted
from support.language import Message, join, say

if TYPE_CHECKING:
    from devices.base import Device
    from devices.cpu import CpuDevice
    from devices.cuda import CudaDevice
    from devices.mps import MpsDevice


def backends() -> dict[str, type[CudaDevice | MpsDevice | CpuDevice]]:
    """The kinds of devices by name, in the order of choice. Imports torch."""
    from devices.cpu import CpuDevice
    from devices.cuda import CudaDevice
    from devices.mps import MpsDevice

    return {kind.name: kind for kind in (CudaDevice, MpsDevice, CpuDevice)}


def pick(requested: str = AUTO, local_rank: int = 0, local_processes: int = 1) -> Device:
    """Choose the device of this process. Imports torch.

    Args:
        requested: "auto" or one of `DEVICES`.
        local_rank: number of this process on this machine, from 0; each gets a GPU of its own. local_processes: of the
            same run.
    Raises:
        UserError: the device asked for is not here, or there are more processes than GPUs.
    """
    kinds = backends()
    serving = [name for name, kind in kinds.items() if kind.supports_several_processes or local_processes == 1]
    # A backend that is not requested is not asked whether it is here: the question loads the driver of a GPU.
    name = requested if requested != AUTO else next(name for name in serving if not kinds[name].why_missing())
    if name not in kinds:
        raise UserError(
            "--device = {requested}, is not known; allowed: auto, {known}",
            requested=requested,
            known=join(", ", kinds),
        )
    if reason := kinds[name].why_missing():
        here = [other for other, kind in kinds.items() if not kind.why_missing()]
        raise UserError(
            "--device = {requested}, is not here ({reason}); here: {here}; use one of them or auto",
            requested=requested,
            reason=reason,
            here=join(", ", here),
        )
    if name not in serving:
        raise UserError(
            "--device = {requested}, cannot be shared by {local_processes} processes: torch.distributed has no "
            "backend for it; start one process, or use --device=cpu",
            requested=requested,
            local_processes=local_processes,
        )
    count = kinds[name].count()
    if count is not None and local_rank >= count:
        raise UserError(
            "--num_processes = {local_rank} or more, but this machine has {devices}; allowed: at most "
            "{processes} here; lower it or use --device=cpu",
            local_rank=local_rank + 1,
            devices=say(
                "{count} {kind} device" if count == 1 else "{count} {kind} devices", count=count, kind=name.upper()
            ),
            processes=counted(count, "process"),
        )
    try:
        return kinds[name](local_rank)
    except RuntimeError as error:  # Others may have filled a GPU, or hold it alone.
        reason = next(iter(error.args), "unknown")
        if not isinstance(reason, Message):
            reason = str(reason).partition("\n")[0]  # torch adds lines of advice for programmers.
        raise UserError(
            "--device = {requested}, {upper} device {local_rank} cannot be used ({reason}); free it, choose "
            "another by CUDA_VISIBLE_DEVICES, or use --device=cpu",
            requested=requested,
            upper=name.upper(),
            local_rank=local_rank,
            reason=reason,
        ) from error


def passed_over(requested: str, device: Device, root: Path = Path("/")) -> list[str]:
    """What is to be told of a GPU that lies here and is not used, though nobody has chosen another device."""
    reason = backends()["cuda"].why_missing()
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if requested != AUTO or is_hidden or device.name != "cpu" or not reason or not (root / "dev/nvidiactl").exists():
        return []
    return [say("an NVIDIA GPU is in this machine and is not used: {reason}", reason=reason)]
