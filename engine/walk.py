"""How does one step pass through the model? Forward through the blocks and back, one block at a time.

    forward:   for each block, for each micro-batch: run it, hold its input (a checkpointed activation; of saved blocks, the local graph)
    loss:      in chunks, for each micro-batch; the head's gradient goes into one buffer
    backward:  for each block from the last to the first, for each micro-batch: (recompute,) backward through this block alone;
               then the block is handed over: reduce between processes -> update -> free its gradients
    shared:    embedding, head and position bias gather their gradients on the way and are handed over at the end

The order of blocks is `engine.schedule`'s, the way through one stack `engine.passage`'s; every mode of the program is a policy
of this loop. What a step holds is exactly: the checkpointed activations of all micro-batches,
the graphs of saved blocks, one micro-batch's activations of one block, one block's gradients, and those of the shared weights.
Gradients equal those of plain autograd over `T5.forward`, whatever the micro-batches and the policies (tests hold it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.checkpointing import Checkpointing
from engine.finite import OnReady
from engine.micro_batches import MicroBatch
from engine.objectives.objective import Objective
from engine.offload import CheckpointedActivations
from engine.passage import Passage, Policies
from engine.scaling import LossScaling
from engine.schedule import BlockInputs, Schedule
from engine.weights import WeightStore
from model.loss import LossSettings, token_losses
from model.t5 import T5


def no_trim() -> None:
    """What is free stays with the allocator."""


def no_check(loss: Tensor) -> None:
    """Any loss goes backward."""


class Walk:
    """The walk through one model.

    Args:
        model: its weights may rest in another dtype than they are computed in (see `weight_store`).
        checkpointing, weight_store, checkpointed, between_blocks_dtype, trim: see `engine.passage.Policies`; None: the
            checkpointed activations stay on the device, and have the dtype of the products.
        loss: chunking, label smoothing, z-loss.
        dropout_rate: of training; evaluation never drops.
        objective: what is made of the decoder's output.
        scaling: the factor on the loss of which gradients are formed; None: 1. The same object divides it out of the
            update (`engine.update`).
        check_loss: sees the summed loss of all micro-batches before backward, which it may abort.
    """

    def __init__(
        self,
        model: T5,
        checkpointing: Checkpointing,
        weight_store: WeightStore,
        loss: LossSettings,
        dropout_rate: float,
        objective: Objective | None = None,
        scaling: LossScaling | None = None,
        checkpointed: CheckpointedActivations | None = None,
        between_blocks_dtype: torch.dtype | None = None,
        trim: Callable[[], object] = no_trim,
        check_loss: Callable[[Tensor], object] = no_check,
    ) -> None:
        self.model, self.loss_settings = model, loss
        between = between_blocks_dtype or weight_store.compute_dtype
        checkpointed = checkpointed or CheckpointedActivations()
        self.policies = Policies(checkpointing, weight_store, checkpointed, between, trim)
        self.dropout_rate, self.objective = dropout_rate, objective or Objective()
        self.scaling, self.check_loss = scaling, check_loss

    @property
    def weight_store(self) -> WeightStore:
        return self.policies.weight_store

    def follow(
        self,
        checkpointing: Checkpointing,
        chunk_bytes: int,
        checkpointed: CheckpointedActivations,
        trim: Callable[[], object],
    ) -> None:
        """From the next step on, other blocks are saved, the loss has other chunks, and so on; dtypes stay."""
        self.policies = replace(self.policies, checkpointing=checkpointing, checkpointed=checkpointed, trim=trim)
        self.loss_settings = replace(self.loss_settings, chunk_bytes=chunk_bytes)

    def gradients(self, micro_batches: Sequence[MicroBatch], total_labels: int, on_ready: OnReady) -> Tensor:
        """Form the gradient of sum(loss) / total_labels over all micro-batches, handing over each block's when complete.

        Args:
            micro_batches: the micro-batches that pass through each block together.
            total_labels: labels (or pairs of answers) of the whole effective batch, over all micro-batches and processes.
            on_ready: called with weights whose `.grad` is complete; it must leave `.grad` None or accumulate on purpose.
        Returns:
            the summed loss, a fp32 scalar on the device.
        """
        trim, schedule = self.policies.trim, Schedule(self.model)
        trim()
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        encoder, decoder = self._passages(schedule, micro_batches, is_training=True)
        self.policies.checkpointed.begin()

        needed, outputs = schedule.encoder.backward_range.is_needed, encoder.forward()
        outputs = [mb.spread(output).requires_grad_(needed) for mb, output in zip(micro_batches, outputs, strict=True)]
        hidden = deque(decoder.forward(_for_decoder(micro_batches, outputs)))
        trim()
        total, grads = self._loss(schedule, hidden, micro_batches, total_labels)
        self.check_loss(total)
        decoder.backward(grads, on_ready)
        pairs = zip(micro_batches, outputs, strict=True)
        grads = deque([mb.gather(output.grad) for mb, output in pairs if output.grad is not None])
        del outputs, pairs
        trim()
        encoder.backward(grads, on_ready)
        encoder.finish_bias()
        decoder.finish_bias()
        on_ready(schedule.shared)
        return total

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The summed loss of the micro-batches, without dropout or gradients: evaluation."""
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        losses = self.token_losses(micro_batches)
        return torch.stack(
            [self.objective.loss(each, mb) for each, mb in zip(losses, micro_batches, strict=True)]
        ).sum()

    @torch.no_grad()
    def token_losses(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The cross-entropy of each token (N',) of each micro-batch, fp32, without dropout."""
        schedule, settings = Schedule(self.model), LossSettings(self.loss_settings.chunk_bytes)
        encoder, decoder = self._passages(schedule, micro_batches, is_training=False)
        outputs = encoder.forward()
        outputs = [mb.spread(output) for mb, output in zip(micro_batches, outputs, strict=True)]
        hidden = decoder.forward(_for_decoder(micro_batches, outputs))
        self.policies.trim()
        with schedule.head.bring(self.weight_store):
            head = self.model.output_weight
            return [token_losses(h, head, mb.labels, settings) for h, mb in zip(hidden, micro_batches, strict=True)]

    def accompany(self) -> None:
        """Take part in gathering the weights for one `loss` of another process, where all processes gather together."""
        for stage in Schedule(self.model).forward():
            with stage.bring(self.weight_store):
                pass

    def zero_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Give weights the gradients of their shapes and dtypes that `gradients` would hand over, all zero."""
        shared = {id(table) for table in Schedule(self.model).bias_tables}  # used outside of blocks, in the rest dtype
        with self.weight_store.in_compute_dtype([weight for weight in weights if id(weight) not in shared]):
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None

    def _passages(
        self, schedule: Schedule, micro_batches: Sequence[MicroBatch], is_training: bool
    ) -> tuple[Passage, Passage]:
        dropouts = (self.dropout_rate, self.model.adapter_dropout) if is_training else (0.0, 0.0)
        encoder, decoder = (
            Passage(stack, self.policies, micro_batches, dropouts, schedule.num_blocks, is_training)
            for stack in (schedule.encoder, schedule.decoder)
        )
        return encoder, decoder

    def _loss(
        self, schedule: Schedule, hidden: deque[Tensor], micro_batches: Sequence[MicroBatch], total_labels: int
    ) -> tuple[Tensor, deque[Tensor]]:
        """The summed loss, and the gradients of the hidden states, which go micro-batch by micro-batch."""
        weight, total = self.model.output_weight, hidden[0].new_zeros((), dtype=torch.float32)
        scale, grads = (1.0 if self.scaling is None else self.scaling.scale) / total_labels, deque[Tensor]()
        with torch.no_grad(), schedule.head.bring(self.weight_store):
            if weight.requires_grad:
                self.weight_store.open_gradient(weight)
            for micro_batch in micro_batches:
                loss, grad = self.objective.loss_and_gradients(
                    hidden.popleft(), weight, micro_batch, scale, self.loss_settings, weight.grad
                )
                total += loss
                grads.append(grad)
        self.weight_store.close_gradient(weight)
        return total, grads


def _for_decoder(micro_batches: Sequence[MicroBatch], outputs: Sequence[Tensor]) -> list[BlockInputs]:
    pairs = zip(micro_batches, outputs, strict=True)
    return [{"encoder_output": output, "encoder_rows": mb.encoder_output_rows} for mb, output in pairs]
