"""What do several processes change in memory and time? Shares of weights and state, and bytes on the wire.

Sharded, a process holds 1/p of every matrix and of its state, and the whole of one block while it runs. The gradient of
a block is whole until it is summed, while the rows of the block before wait for their update. The head is gathered for
the loss, with a whole gradient beside it; between that and the end only its rows are held.
"""

from __future__ import annotations

STATE_BYTES = 4  # of a number of the optimizer's state, which is gathered for a save as weights are
WIRE_BYTES_PER_SECOND = 10e9  # of one process, where nothing is measured: what two processes of a machine reach


def share_out(
    phases: dict[str, dict[str, int]],
    shards: int,
    counts: dict[str, int],
    compute_bytes: int,
    storage_bytes: int,
    saved_blocks: int = 0,
    ahead: int = 1,
    padded: int = 0,
) -> None:
    """Turn the parts of each phase into those of one of `shards` processes, in place; 1 changes nothing.

    Args:
        counts: weights of embedding, head, one encoder and one decoder block.
        compute_bytes, storage_bytes: of one number.
        saved_blocks: see `Choice`. No gathered weight outlives its block, but a run with 12 saved blocks took that much
            more: heap fragmentation, between the tensors of the graphs.
        ahead: blocks whose weights are gathered at a time: on a GPU the next one too.
        padded: weights of the embedding where its rows do not part evenly: to be summed they are copied, with rows of padding.
    """
    if shards == 1:
        return
    shared = counts["embedding"] + counts["head"]
    block = max(counts["encoder"], counts["decoder"])
    held = saved_blocks * block * storage_bytes
    for phase, parts in phases.items():
        for name in ("weights", "optimizer state"):
            parts[name] = parts[name] // shards
        gathered = {
            "loss": counts["embedding"],
            "evaluation": max(counts["embedding"], block),
            "save": counts["embedding"],
        }
        if phase in gathered:
            parts["gathered weights"] = gathered[phase] * (STATE_BYTES if phase == "save" else storage_bytes)
        elif "backward" in phase:
            parts["gathered weights"] = ahead * block * storage_bytes
        if phase in ("loss", "decoder backward", "encoder backward", "block update"):
            parts["gathered weights"] = parts.get("gathered weights", 0) + held
        if "gradients" in parts and phase != "loss":
            whole = min(max(0, parts["gradients"] // compute_bytes - shared), block)
            waiting = 0 if phase == "last update" else block // shards  # of the block before: its rows alone
            parts["gradients"] = (shared // shards + whole + waiting) * compute_bytes
        if phase == "loss" and "gradients" in parts:
            parts["gradients"] += padded * compute_bytes
    if "decoder backward" in phases:  # the tokens' gradients are added up in a whole table, twice
        rest = {k: v for k, v in phases["decoder backward"].items() if k not in ("one block", "saved blocks")}
        # beside it its rows of the sum, those of the first time, and those of the head
        rows = (2 * counts["embedding"] + counts["head"]) // shards
        rest["gradients"] = (counts["embedding"] + rows + padded) * compute_bytes
        phases["embedded tokens"] = rest


def communication_seconds(
    count: int,
    num_processes: int,
    shards: int,
    storage_bytes: int,
    compute_bytes: int,
    rate: float = WIRE_BYTES_PER_SECOND,
) -> float:
    """Predict the time on the wire of one step.

    Args:
        count: weights of the model. rate: bytes a second that one process sends.
    Returns:
        an all-reduce of all gradients, 2 (p-1)/p n; sharded: a gather for each way and a reduce-scatter, (p-1)/p n each.
    """
    away = (num_processes - 1) / num_processes
    sent = 2 * compute_bytes if shards == 1 else 2 * storage_bytes + compute_bytes
    return count * away * sent / rate
