"""Training loop in plain PyTorch for one or several workers. It can resume from checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipeline import config
from pipeline.config import JobError
from pipeline.encoders.batching import prefetch
from pipeline.registry import LEARNERS, TRAINING_DATA
from pipeline.runtime import distributed
from pipeline.train import lora, sharding
from pipeline.train.checkpoints import Checkpoints, only_one, random_state, set_random_state
from pipeline.train.data.base import Batch, TrainingData
from pipeline.train.data.quality import means
from pipeline.train.learner import Embedded, Learner, concatenate
from pipeline.train.spec import VALIDATION, TrainSpec


def check(spec: TrainSpec, data: TrainingData | None = None) -> TrainingData:
    """Checks a spec without loading weights and returns the data of the run."""
    with config.within("learner"):
        LEARNERS.load(spec.learner.name).check(spec.learner)
    data = data or data_of(spec)
    spec.require(data.num_batches > 0, "batch_size", "at most the number of examples per epoch")
    rule = f"at most {data.num_batches}, the number of batches of {spec.batch_size} per epoch"
    is_valid = spec.gradient_accumulation_steps <= data.num_batches
    spec.require(is_valid, "gradient_accumulation_steps", rule)
    with config.within("learner"):
        LEARNERS.load(spec.learner.name).check_data(spec.learner, data)
    return data


def data_of(spec: TrainSpec) -> TrainingData:
    """Returns the training data of a run."""
    return TRAINING_DATA.build(spec.data, batch_size=spec.batch_size, seed=spec.seed)


def train(
    runs: Mapping[str, TrainSpec],
    say: Callable[[str], None] = print,
    report: Callable[[int, dict[str, float]], None] | None = None,
    data: TrainingData | None = None,
) -> None:
    """Trains runs in order, in this process or as one of several workers."""
    for number, (title, spec) in enumerate(runs.items(), start=1):
        if len(runs) > 1:
            say(f"run {number} of {len(runs)}: {title}")
        Loop(spec, say, report, data if len(runs) == 1 else None).run()
        say(f"{spec.output}/model")


class Loop:
    """Training loop of one worker, which continues from the latest checkpoint.

    Args:
        report: Called with the step and its metrics at every checkpoint, on all workers.
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
        self._dtypes = sharding.to_float32(self.learner)
        if spec.precision == "bfloat16":
            lora.leave_casts_to_autocast(self.learner)
        if distributed.rank():  # dropout differs by worker
            torch.manual_seed(spec.seed + distributed.rank())
        self.data = data or data_of(spec)
        self.device = next(self.learner.parameters()).device
        self.steps_per_epoch = self.data.num_batches // spec.gradient_accumulation_steps
        num_steps = self.steps_per_epoch * spec.epochs
        self.num_steps = min(num_steps, spec.max_steps or num_steps)
        self.folder = Path(spec.output)
        self.checkpoints = Checkpoints(spec)
        if distributed.rank() == 0:
            self._lock = only_one(self.folder)
        self.step = self.checkpoints.restore_weights(self.learner)
        self.metrics = Metrics(self.folder, self.step) if distributed.rank() == 0 else None
        self.learner.prepare(self.data)  # before the weights are sharded
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
        """Returns the forward pass of the learner, which synchronises gradients between workers."""
        learner = self.learner
        model_parameters = set(learner.model.parameters())
        loss_parameters = [p for p in learner.parameters() if p not in model_parameters]
        # In one order on all workers.
        self._loss_parameters = [p for p in loss_parameters if p.requires_grad]
        if self.spec.activation_checkpointing:
            sharding.checkpoint_activations(learner.model)
        is_sharded = self.spec.fsdp and torch.distributed.is_initialized()
        if distributed.num_workers() == 1 and not is_sharded:
            return learner
        if is_sharded:
            dtype = torch.bfloat16 if self.spec.precision == "bfloat16" else None
            sharding.shard(learner, set(loss_parameters), dtype)
            return learner
        if not any(parameter.requires_grad for parameter in model_parameters):
            return learner  # DDP requires trainable parameters
        return DistributedDataParallel(_Forward(learner), find_unused_parameters=True)

    def run(self) -> None:
        """Trains to the end and writes the trained model to `model/` in the output folder."""
        try:
            self._run()
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _run(self) -> None:
        spec, started, first = self.spec, time.monotonic(), self.step
        if spec.eval_every and first == 0:
            self._evaluate()
        num_documents = 0
        for batches in self._batches():
            metrics = self._step(batches)
            num_documents += spec.batch_size * spec.gradient_accumulation_steps
            self.step += 1
            is_last = self.step == self.num_steps
            seconds = time.monotonic() - started
            metrics["documents_per_second"] = num_documents / seconds
            metrics["seconds"] = seconds
            if self.step % spec.log_every == 0 or is_last:
                left = seconds / (self.step - first) * (self.num_steps - self.step)
                self._log(metrics, left)
            if spec.eval_every and (self.step % spec.eval_every == 0 or is_last):
                self._evaluate()
            if self.step % spec.checkpoint_every == 0 or is_last:
                self.checkpoints.save(self.step, self.learner, self.optimiser)
                if self._report:
                    self._report(self.step, metrics)
        with sharding.whole(self.learner), sharding.as_loaded(self.learner, self._dtypes):
            if distributed.rank() == 0:
                self.checkpoints.publish(self.folder / "model", self.learner)
        distributed.wait_for_all()

    # -- a step ------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[tuple[Batch, Any]]]:

        def batches() -> Iterator[Batch]:
            worker, num_workers = distributed.rank(), distributed.num_workers()
            step = self.step
            while step < self.num_steps:
                epoch, within = divmod(step, self.steps_per_epoch)
                count = min(self.steps_per_epoch - within, self.num_steps - step)
                first = within * self.spec.gradient_accumulation_steps
                of_epoch = self.data.batches(epoch, first, worker, num_workers)
                for _ in range(count * self.spec.gradient_accumulation_steps):
                    yield next(of_epoch)
                step += count

        step_batches: list[tuple[Batch, Any]] = []
        for pair in prefetch(batches(), self.learner.read):
            step_batches.append(pair)
            if len(step_batches) == self.spec.gradient_accumulation_steps:
                yield step_batches
                step_batches = []

    def _step(self, batches: list[tuple[Batch, Any]]) -> dict[str, float]:
        """Takes one optimiser step on the mean of the batches' losses; returns its metrics."""
        spec = self.spec
        self.optimiser.zero_grad(set_to_none=True)
        total: dict[str, float] = {}
        for number, (batch, inputs) in enumerate(batches):
            metrics = self._backward(batch, inputs, is_last=number == len(batches) - 1)
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value / len(batches)
        for parameter in self._loss_parameters:  # DDP and FSDP synchronise those of the model
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = distributed.mean(gradient)
        gradients = [p.grad for p in self.trained if p.grad is not None]
        norm = sharding.norm(gradients)
        max_norm = spec.optimiser.max_grad_norm
        if max_norm is not None and norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        names = sorted(total)
        both = torch.tensor([*(total[name] for name in names), norm], dtype=torch.float64)
        *means, total["gradient_norm"] = distributed.mean(both).tolist()
        total |= dict(zip(names, means, strict=True))
        if not all(math.isfinite(total[name]) for name in ("loss", "gradient_norm")):
            values = f"{total['loss']:.4g}) or gradient norm ({total['gradient_norm']:.4g}"
            raise self._non_finite(self.step + 1, f"non-finite loss ({values})")
        total["learning_rate"] = rate = spec.optimiser.rate(
            self.step, self.num_steps, self.steps_per_epoch
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        return total

    def _non_finite(self, step: int, problem: str) -> JobError:
        last = self.checkpoints.last()
        good = f"the last good checkpoint is {last}" if last else "no checkpoint was written yet"
        return JobError(f"step {step}: {problem}; {good}")

    def _backward(self, batch: Batch, inputs: Any, is_last: bool) -> dict[str, float]:
        """Adds the gradients of a batch; returns its metrics. Workers exchange if `is_last`."""
        size = self.spec.mini_batch_size or len(batch.documents)
        mini_batches = self.learner.mini_batches(inputs, size)
        weight = 1 / self.spec.gradient_accumulation_steps
        if len(mini_batches) == 1:
            with self._syncing(is_last), self._autocast():
                embedded = self.parallel(mini_batches[0])
            loss, metrics = self.learner.loss(embedded, batch, self.data)
            with self._syncing(is_last):
                (loss * weight).backward()
            return {"loss": loss.item(), **metrics}

        # GradCache: the gradients of the embeddings first, then each mini-batch again with them.
        random_states, embeddings = [], []
        for mini_batch in mini_batches:
            random_states.append(random_state(self.device))
            with torch.no_grad(), self._autocast():
                embeddings.append(self.learner(mini_batch))
        whole: Embedded = {
            name: concatenate([embedded[name] for embedded in embeddings]) for name in embeddings[0]
        }
        for tensor in whole.values():
            tensor.requires_grad_(tensor.is_floating_point())
        loss, metrics = self.learner.loss(whole, batch, self.data)
        (loss * weight).backward()
        after = random_state(self.device)
        starts = dict.fromkeys(whole, 0)
        for number, (mini_batch, state) in enumerate(zip(mini_batches, random_states, strict=True)):
            syncing = self._syncing(is_last and number == len(mini_batches) - 1)
            set_random_state(state, self.device)
            with syncing:
                with self._autocast():
                    embedded = self.parallel(mini_batch)
                product = torch.zeros((), device=self.device)
                for name, tensor in embedded.items():
                    grad = whole[name].grad
                    if grad is not None:
                        grad = grad[starts[name] : starts[name] + len(tensor)]
                        unpadded = tuple(slice(size) for size in tensor.shape)
                        product = product + (tensor * grad[unpadded]).sum()
                    starts[name] += len(tensor)
                product.backward()
        set_random_state(after, self.device)  # or the next loss would draw the same numbers
        return {"loss": loss.item(), **metrics}

    def _syncing(self, is_wanted: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.parallel, DistributedDataParallel) and not is_wanted:
            return self.parallel.no_sync()
        if isinstance(self.parallel, FSDPModule):
            self.parallel.set_requires_gradient_sync(is_wanted)
        return contextlib.nullcontext()

    def _autocast(self) -> torch.autocast:
        is_on = self.spec.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_on)

    # -- logging and evaluation --------------------------------------------------------------------

    def _log(self, metrics: dict[str, float], seconds_left: float) -> None:
        if self.metrics is None:
            return
        self.metrics.add(self.step, metrics)
        self._say(
            f"step {self.step}/{self.num_steps}: loss {metrics['loss']:.4f},"
            f" {metrics['documents_per_second']:.1f} documents/s, {seconds_left / 60:.0f} min left"
        )

    @cached_property
    def _validation(self) -> Batch | None:
        return self.data.validation()

    def _evaluate(self) -> None:
        """Evaluates the model. The first worker saves it if it is the best one so far."""
        is_first, is_spread = distributed.rank() == 0, isinstance(self.parallel, FSDPModule)
        quality = {}
        # With sharded weights all workers have to take part in the forward pass.
        if (is_first or is_spread) and self._validation is not None:
            self.learner.eval()
            with self._autocast():
                try:
                    values = self.learner.evaluate(self._validation, self.data)
                except FloatingPointError as error:
                    raise self._non_finite(self.step, f"validation: {error}") from None
            self.learner.train()
            quality = means(values)
        with sharding.whole(self.learner), sharding.as_loaded(self.learner, self._dtypes):
            if self.metrics is not None and quality:
                self.metrics.add(self.step, quality)
                folder = self.folder / VALIDATION
                folder.mkdir(exist_ok=True)
                path = folder / f"step-{self.step:08d}.npz"
                np.savez_compressed(path, allow_pickle=False, **values)
                self._say(f"step {self.step}: {_summary(quality)}")
                self.checkpoints.keep_best(self.step, quality, self.learner)
        distributed.wait_for_all()


def _summary(quality: dict[str, float]) -> str:
    """Formats metrics. Of additional compressors, only the first metric is shown.

    >>> _summary({"R@1": 0.5, "R@5": 0.75, "R@1 (eos)": 0.25, "R@5 (eos)": 0.5})
    'R@1 0.5000, R@5 0.7500, R@1 (eos) 0.2500'
    """
    first = next(iter(quality))
    shown = (name for name in quality if " (" not in name or name.startswith(f"{first} ("))
    return ", ".join(f"{name} {quality[name]:.4f}" for name in shown)


class Metrics:
    """Writes `metrics.jsonl`, one line per call, and the same values as events in `tensorboard/`.

    Events are written only if the package tensorboardX is installed.

    Args:
        step: Step from which the run resumes. Events of later steps are discarded.
    """

    def __init__(self, folder: Path, step: int):
        self._path = folder / "metrics.jsonl"
        self._writer: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        events = str(folder / "tensorboard")
        self._writer = SummaryWriter(events, purge_step=step + 1, flush_secs=10)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of a step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._writer is not None:
            for name, value in metrics.items():
                # The library warns about each name with other characters.
                self._writer.add_scalar(re.sub(r"[^\w./-]+", "_", name), value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()


class _Forward(torch.nn.Module):
    """Module that wraps the forward pass of a learner and its parameters for use with DDP."""

    def __init__(self, learner: Learner):
        super().__init__()
        self.model = learner.model
        self._embed = [learner]  # in a list, so that its other parameters are not this module's

    def forward(self, mini_batch: Any) -> Embedded:
        return self._embed[0](mini_batch)
