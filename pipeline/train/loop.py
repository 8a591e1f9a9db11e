"""The loop of all training: plain torch, one worker or many, resumable at every checkpoint."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipeline import config, distributed
from pipeline.config import JobError, SpecError
from pipeline.encoders.batching import prefetch
from pipeline.registry import LEARNERS, TRAINING_DATA
from pipeline.train import masters, sharding
from pipeline.train.checkpoints import Checkpoints, only_one, random_state, set_random_state
from pipeline.train.learner import Embedded, Learner, joined
from pipeline.train.metrics import Metrics
from pipeline.train.spec import HELD_OUT, TrainSpec
from pipeline.training_data.base import Batch, TrainingData
from pipeline.training_data.quality import means


def check(spec: TrainSpec) -> TrainingData:
    """The data of a run, if it can be done; no weights are loaded.

    Raises:
        SpecError: it cannot.
    """
    with config.within("learner"):
        LEARNERS.load(spec.learner.name).check(spec.learner)
    data = data_of(spec)
    if data.num_batches < spec.accumulate:
        rule = f"at most {data.num_batches}, the number of batches of {spec.batch_size} per epoch"
        if data.num_batches == 0:
            rule = "at most the number of examples per epoch"
            raise SpecError("batch_size", spec.batch_size, rule)
        raise SpecError("accumulate", spec.accumulate, rule)
    with config.within("learner"):
        LEARNERS.load(spec.learner.name).check_data(spec.learner, data)
    return data


def data_of(spec: TrainSpec) -> TrainingData:
    """What a run is trained on."""
    return TRAINING_DATA.build(spec.data, batch_size=spec.batch_size, seed=spec.seed)


class Loop:
    """One worker's part of a run, brought to its last checkpoint.

    Args:
        say: what gets a line of progress at a time, on the first worker.
        report: called with the step and its figures at every checkpoint, on all workers: what a
            scheduler around the loop is told.
        data: those of the spec, if they have been read already.

    Raises:
        SpecError: the checkpoint in the output folder is one of another run.
    """

    def __init__(
        self,
        spec: TrainSpec,
        say: Callable[[str], None] = print,
        report: Callable[[int, dict[str, float]], None] | None = None,
        data: TrainingData | None = None,
    ):
        self.spec, self._say, self._report = spec, say, report
        torch.manual_seed(spec.seed)
        self.learner = LEARNERS.build(spec.learner)
        self._dtypes = masters.to_float32(self.learner)
        if distributed.rank():  # dropout differs by worker
            torch.manual_seed(spec.seed + distributed.rank())
        self.data = data or data_of(spec)
        self.device = next(self.learner.parameters()).device
        self.steps_an_epoch = self.data.num_batches // spec.accumulate
        num_steps = self.steps_an_epoch * spec.epochs
        self.num_steps = min(num_steps, spec.max_steps or num_steps)
        self.folder = Path(spec.output)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", spec)
        if distributed.rank() == 0:
            self._lock = only_one(self.folder)
        self.step = self.checkpoints.restore_weights(self.learner)
        self.metrics = Metrics(self.folder, self.step) if distributed.rank() == 0 else None
        self.learner.prepare(self.data)  # with the whole model, before it is spread
        self.parallel = self._parallel()
        self.trained = [p for p in self.learner.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.trained,
            lr=spec.optimiser.learning_rate,
            betas=spec.optimiser.betas,
            weight_decay=spec.optimiser.weight_decay,
        )
        self.checkpoints.restore(self.optimiser, self.device)
        self.learner.train()

    def _parallel(self) -> torch.nn.Module:
        """The learner's forward pass, of which workers share the gradients."""
        learner = self.learner
        of_model = set(learner.model.parameters())
        of_loss = [p for p in learner.parameters() if p not in of_model]
        self._of_loss = [p for p in of_loss if p.requires_grad]  # in one order on all workers
        if self.spec.recompute:
            sharding.recompute(learner.model)
        if distributed.num_workers() == 1:
            return learner
        if self.spec.shard:
            dtype = torch.bfloat16 if self.spec.precision == "bfloat16" else None
            sharding.shard(learner, set(of_loss), dtype)
            return learner
        return DistributedDataParallel(_Forward(learner), find_unused_parameters=True)

    def run(self) -> None:
        """Trains to the end; then the artefact stands in `model/` of the output folder."""
        try:
            self._run()
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _run(self) -> None:
        spec, started, first = self.spec, time.monotonic(), self.step
        if spec.evaluate_every and first == 0:
            self._evaluate()
        num_documents = 0
        for read in self._batches():
            figures = self._step(read)
            num_documents += spec.batch_size * spec.accumulate
            self.step += 1
            is_last = self.step == self.num_steps
            seconds = time.monotonic() - started
            figures["documents_a_second"] = num_documents / seconds
            figures["seconds"] = seconds
            if self.step % spec.log_every == 0 or is_last:
                left = seconds / (self.step - first) * (self.num_steps - self.step)
                self._log(figures, left)
            if spec.evaluate_every and (self.step % spec.evaluate_every == 0 or is_last):
                self._evaluate()
            if self.step % spec.checkpoint_every == 0 or is_last:
                self.checkpoints.save(self.step, self.learner, self.optimiser)
                if self._report:
                    self._report(self.step, figures)
        with sharding.whole(self.learner), masters.as_loaded(self.learner, self._dtypes):
            if distributed.rank() == 0:
                self.checkpoints.publish(self.folder / "model", self.learner)
        distributed.wait_for_all()

    # -- a step ------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[tuple[Batch, Any]]]:
        """By step, its batches and what the learner read of them, from the next step on."""

        def batches() -> Iterator[Batch]:
            worker, num_workers = distributed.rank(), distributed.num_workers()
            step = self.step
            while step < self.num_steps:
                epoch, within = divmod(step, self.steps_an_epoch)
                count = min(self.steps_an_epoch - within, self.num_steps - step)
                first = within * self.spec.accumulate
                there = self.data.batches(epoch, first, worker, num_workers)
                for _ in range(count * self.spec.accumulate):
                    yield next(there)
                step += count

        of_step: list[tuple[Batch, Any]] = []
        for pair in prefetch(batches(), self.learner.read):
            of_step.append(pair)
            if len(of_step) == self.spec.accumulate:
                yield of_step
                of_step = []

    def _step(self, batches: list[tuple[Batch, Any]]) -> dict[str, float]:
        """One step of the optimiser on the mean of the batches' losses."""
        spec = self.spec
        self.optimiser.zero_grad(set_to_none=True)
        total: dict[str, float] = {}
        for number, (batch, read) in enumerate(batches):
            figures = self._backward(batch, read, is_last=number == len(batches) - 1)
            for name, value in figures.items():
                total[name] = total.get(name, 0.0) + value / len(batches)
        for parameter in self._of_loss:  # of which what shares gradients knows nothing
            parameter.grad = distributed.mean(parameter.grad)
        gradients = [p.grad for p in self.trained if p.grad is not None]
        norm = sharding.norm(gradients)
        if spec.optimiser.clip is not None and norm > spec.optimiser.clip:
            for gradient in gradients:
                gradient.mul_(spec.optimiser.clip / norm)
        names = sorted(total)
        both = torch.tensor([*(total[name] for name in names), norm], dtype=torch.float64)
        *means, total["gradient_norm"] = distributed.mean(both).tolist()
        total |= dict(zip(names, means, strict=True))
        if not all(math.isfinite(total[name]) for name in ("loss", "gradient_norm")):
            kept = self.checkpoints.last()
            good = f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"
            raise JobError(
                f"step {self.step + 1}: the loss is {total['loss']:.4g} and its gradient"
                f" {total['gradient_norm']:.4g}; {good}"
            )
        total["learning_rate"] = rate = spec.optimiser.rate(self.step, self.num_steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        return total

    def _backward(self, batch: Batch, read: Any, is_last: bool) -> dict[str, float]:
        """Adds the gradients of a batch to those that are there."""
        parts = self.learner.parts(read, self.spec.part_size or len(batch.documents))
        share = 1 / self.spec.accumulate
        if len(parts) == 1:
            with self._syncing(is_last), self._autocast():
                embedded = self.parallel(parts[0])
            loss, figures = self.learner.loss(embedded, batch, self.data)
            with self._syncing(is_last):
                (loss * share).backward()
            return {"loss": loss.item(), **figures}

        # GradCache: the loss first, then each part once more with the gradients of what it gave.
        states, every = [], []
        for part in parts:
            states.append(random_state(self.device))
            with torch.no_grad(), self._autocast():
                every.append(self.learner(part))
        whole: Embedded = {
            name: joined([embedded[name] for embedded in every]) for name in every[0]
        }
        for tensor in whole.values():
            tensor.requires_grad_(tensor.is_floating_point())
        loss, figures = self.learner.loss(whole, batch, self.data)
        (loss * share).backward()
        after = random_state(self.device)
        starts = dict.fromkeys(whole, 0)
        for number, (part, state) in enumerate(zip(parts, states, strict=True)):
            syncing = self._syncing(is_last and number == len(parts) - 1)
            set_random_state(state, self.device)
            with syncing:
                with self._autocast():
                    embedded = self.parallel(part)
                product = torch.zeros((), device=self.device)
                for name, tensor in embedded.items():
                    grad = whole[name].grad
                    if grad is not None:
                        grad = grad[starts[name] : starts[name] + len(tensor)]
                        own = tuple(slice(size) for size in tensor.shape)
                        product = product + (tensor * grad[own]).sum()
                    starts[name] += len(tensor)
                product.backward()
        set_random_state(after, self.device)  # else the next loss draws as this one did
        return {"loss": loss.item(), **figures}

    def _syncing(self, is_wanted: bool) -> contextlib.AbstractContextManager[None]:
        """Whether the backward passes inside tell other workers their gradients."""
        if isinstance(self.parallel, DistributedDataParallel) and not is_wanted:
            return self.parallel.no_sync()
        if isinstance(self.parallel, FSDPModule):
            self.parallel.set_requires_gradient_sync(is_wanted)
        return contextlib.nullcontext()

    def _autocast(self) -> torch.autocast:
        is_on = self.spec.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_on)

    # -- what is told and kept ---------------------------------------------------------------------

    def _log(self, figures: dict[str, float], seconds_left: float) -> None:
        if self.metrics is None:
            return
        self.metrics.add(self.step, figures)
        self._say(
            f"step {self.step}/{self.num_steps}: loss {figures['loss']:.4f},"
            f" {figures['documents_a_second']:.1f} documents/s, {seconds_left / 60:.0f} min left"
        )

    @cached_property
    def _held_out(self) -> Batch | None:
        return self.data.held_out()

    def _evaluate(self) -> None:
        """Measures quality and keeps the model if it is the best; on the first worker."""
        is_first, is_spread = distributed.rank() == 0, isinstance(self.parallel, FSDPModule)
        quality = {}
        # Where each has a share of the weights all have to compute, the same.
        if (is_first or is_spread) and self._held_out is not None:
            self.learner.eval()
            with self._autocast():
                each = self.learner.evaluate(self._held_out, self.data)
            self.learner.train()
            quality = means(each)
        with sharding.whole(self.learner), masters.as_loaded(self.learner, self._dtypes):
            if self.metrics is not None and quality:
                self.metrics.add(self.step, quality)
                measured = self.folder / HELD_OUT
                measured.mkdir(exist_ok=True)
                np.savez_compressed(measured / f"step-{self.step:08d}.npz", **each)
                figures = ", ".join(f"{name} {value:.4f}" for name, value in quality.items())
                self._say(f"step {self.step}: {figures}")
                self.checkpoints.keep_best(self.step, quality, self.learner)
        distributed.wait_for_all()


class _Forward(torch.nn.Module):
    """A learner's forward pass with the parameters that it uses, to be wrapped for many workers."""

    def __init__(self, learner: Learner):
        super().__init__()
        self.model = learner.model
        self._embed = [learner]  # in a list, so that its other parameters are not this module's

    def forward(self, part: Any) -> Embedded:
        """Embeds a part of a batch."""
        return self._embed[0](part)
