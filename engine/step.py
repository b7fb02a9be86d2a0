"""One optimizer step: gradients of all micro-batches, some applied in backward; loss and norm in one synchronisation;
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.batches.collate import Batch, PreferenceBatch, flat_labels
from devices.base import Device, has_fused_attention, place, placed_together, set_score_elements
from devices.malloc import HeapTrimmer
from devices.sizes import filled_tokens
from devices.threads import follow_machine
from engine.all_reduce import StepFailed
from engine.blockwise import Blockwise, Schedule
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import Step
from memory.cleanup import drop_frames
from memory.estimate.shapes import Sizes
from memory.estimate.workload import ExecutionPlan
from model.attention import attends_compiled
from model.loss import IGNORED
from model.micro_batch import MicroBatch, label_rows
from model.rows import Rows, dense_sides
from settings.declared import T5ModelConfig


@dataclass(eq=False)
class Engine:
    """Everything that the steps of one model need.

    Args:
        sum_over: sums each of some numbers over all processes.
        before_wait: called in each step before the host waits for the device, for work that may be done meanwhile.
    """

    blockwise: Blockwise
    update: OptimizerInBackward
    device: Device
    plan: ExecutionPlan
    sum_over: Callable[..., list[float]] = lambda *numbers: list(numbers)
    before_wait: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.model = self.blockwise.model
        self.apply_plan(self.plan)

    def step(self, step: Step, batches: Sequence[Batch], total_labels: int) -> Done | OutOfMemory | NotFinite:
        """One optimizer step: the micro-batches of this process, out of `total_labels` labels over all processes.

        The outcome is the same on all processes. A step that is not done leaves no gradients.
        Raises UserError where fp16 overflows whatever the loss scale is, and any error that is not for lack of memory.
        """
        error: Exception | None = None
        loss = norm = 0.0
        try:
            loss, norm = self.attempt(step, batches, total_labels)
        except StepFailed:
            pass  # The process that has failed says so in the sum below.
        except Exception as raised:
            if not self.device.is_out_of_memory(raised):
                raise
            error = raised
            drop_frames(error)
            if not self.blockwise.objective.abort():
                self.update.abort(Schedule(self.model).backward(), self.blockwise.zero_gradients)
        loss, failures, changes = self.sum_over(loss, float(error is not None), float(self.update.has_changed_weights))
        if failures:
            self.model.zero_grad()
            return OutOfMemory(changes > 0, error)
        scaling = self.update.scaling
        if not math.isfinite(loss) or (scaling is None and not math.isfinite(norm)):
            return NotFinite(changes > 0)
        if scaling is not None:
            scaling.count(math.isfinite(norm))
        return Done(loss, norm)

    def attempt(self, step: Step, batches: Sequence[Batch], total_labels: int) -> tuple[float, float]:
        """Gradients and update of a step; returns the summed loss of this process and the norm of all gradients."""
        follow_machine()
        self.blockwise.objective.clear()
        self.update.begin(step)
        loss = torch.zeros((), device=self.model.embedding.device)
        pass_size = len(batches) if self.plan.accumulation_passes == 1 else self.plan.micro_batches_per_pass
        for first in range(0, len(batches), max(1, pass_size)):
            is_last = first + pass_size >= len(batches)
            with placed_together():  # One copy to the device for all indices of a pass.
                if is_last:
                    self.update.optimizer.place_keys(self.update.step)
                micro_batches = [
                    to_micro_batch(batch, self.model.config, self.device.torch_device, self.plan.sizes)
                    for batch in batches[first : first + pass_size]
                ]
                loss += self.blockwise.gradients(micro_batches, total_labels, self.update, is_last)
        self.before_wait()
        return self.update.finish(loss)

    def apply_plan(self, plan: ExecutionPlan) -> None:
        """Save blocks, form scores, chunk the loss, hold gradients and trim the heap as a plan says, from the next step
        on; dtypes stay.
        """
        self.plan = plan
        set_score_elements(plan.scores)
        self.update.holds_gradients = self.update.needs_norm or plan.hold_gradients
        self.blockwise.saved_blocks = plan.saved_blocks
        self.blockwise.loss_settings = replace(self.blockwise.loss_settings, chunk_bytes=plan.loss_chunk_bytes)
        self.blockwise.heap = HeapTrimmer("small" if self.device.is_separate_memory else plan.malloc)


class Done(NamedTuple):
    """The step counts. Where the norm of fp16's gradients is not finite, they have overflowed and no weight was
    updated.
    """

    loss: float  # Summed over all labels of the effective batch.
    norm: float  # The norm of all gradients before they are clipped.


class OutOfMemory(NamedTuple):
    """Memory did not suffice on some process. Where any has changed weights, the step cannot be run again."""

    has_changed_weights: bool
    error: Exception | None  # None: it was another process's.


class NotFinite(NamedTuple):
    """The loss or a gradient is inf or nan, and any process may have changed weights by it."""

    has_changed_weights: bool


# --- what goes through the model


def to_micro_batch(batch: Batch, shape: T5ModelConfig, device: torch.device, sizes: Sizes = ((), ())) -> MicroBatch:
    """Lay a padded batch out as the device attends to it: end to end for compiled kernels, elsewhere in groups of like
    length.

    Args:
        shape: whose token ids of padding and start are used.
        sizes: what source and target are filled up to where rows lie end to end (`devices.sizes`), with tokens
            that no row sees and no label judges, so that products meet few sizes.
    """
    keys = torch.from_numpy(np.ascontiguousarray(batch.keys))
    answers = len(batch.target_lengths) // len(batch.input_lengths)
    sources = tuple(batch.input_lengths.tolist())
    targets = sources if batch.reads_inputs else tuple(batch.target_lengths.tolist())
    if attends_compiled(shape.d_kv, device):
        source = _end_to_end(sources, keys, sizes[0])
        target = _end_to_end(targets, keys.repeat(answers), sizes[1])
    else:
        source, target = dense_sides(sources, targets, keys, few_shapes=not has_fused_attention(device))
    ids = torch.from_numpy(batch.input_ids)
    if batch.reads_inputs:
        target = source
        written = ids
        labels = torch.from_numpy(flat_labels(batch))
    else:
        written = torch.from_numpy(batch.labels)
        labels = label_rows(target).flatten(written, IGNORED)
    # A decoder reads what it writes, behind the start token.
    decoder_ids = torch.full_like(written, shape.start_token_id)
    decoder_ids[:, 1:] = written[:, :-1].masked_fill(written[:, :-1] == IGNORED, shape.pad_token_id)
    on_host = (source.flatten(ids, shape.pad_token_id), target.flatten(decoder_ids, shape.pad_token_id))
    reference = None
    if isinstance(batch, PreferenceBatch) and batch.reference is not None:
        reference = torch.from_numpy(batch.reference)
    micro_batch = MicroBatch(
        place(on_host[0], device),
        place(on_host[1], device),
        place(labels, device),
        source,
        target,
        answers,
        reference,
        None if device.type == "cpu" else on_host,
        batch,
    )
    if source.groups:  # The indices of rows that attention and loss need go to the device with the ids.
        source.is_padding(device)
        target.token_index(device, micro_batch.label_rows.num_tokens)
    return micro_batch


def _end_to_end(lengths: tuple[int, ...], keys: Tensor, sizes: tuple[int, ...]) -> Rows:
    tokens = sum(lengths)
    return Rows(lengths, keys, filled_tokens(tokens, sizes) - tokens)
