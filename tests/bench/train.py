"""Benchmark of training: cached hidden states, and LoRA on a large model.

    python -m tests.bench train
    python -m tests.bench train --only states --scenes 512
    python -m tests.bench train --only lora --family colqwen2 --batch 16 --device cuda

`states` trains only the projection of the shipped ColPali with SaMer for an epoch, with and without
cached hidden states. `lora` runs steps of a model with a published shape and random weights (all
layers on a GPU, two on a CPU), and reports the fraction of the machine's peak rate of matrix
products.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import jobs
from examples.papers.synthetic import SHAPES
from pipeline import config
from pipeline.config import ComponentSpec
from pipeline.train.contrastive import Contrastive
from pipeline.train.data.base import Batch, TrainingData
from pipeline.train.learner import Learner
from pipeline.train.loop import Loop
from pipeline.train.spec import TrainSpec
from tests.bench import encode_models
from tests.bench.harness import Bench, Repeats, parse_on_device, table

MODEL = Path(jobs.__file__).parent / "data/models" / "shapes_colpali"
#: Fields of the learner by compressor of the pages.
COMPRESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "samer": {"compressor": {"name": "samer", "num_vectors": 64}},
    "agc": {"compressor": {"name": "agc", "num_vectors": 64}, "num_appended_tokens": 32},
}
#: Size of the square matrices that measure the peak rate of matrix products.
RATE_SIZE = {"cpu": 2048, "cuda": 8192}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    on_gpu = torch.cuda.is_available()
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument("--scenes", type=jobs.positive, default=256, help="scenes per epoch")
    parser.add_argument("--family", choices=["colpali", "colqwen2"], default="colqwen2")
    parser.add_argument("--layers", type=jobs.positive, help="layers of the language model")
    parser.add_argument(
        "--batch", type=jobs.positive, default=16 if on_gpu else 2, help="pages per batch"
    )
    parser.add_argument("--steps", type=jobs.positive, default=10 if on_gpu else 2)
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument(
        "--mini-batch", type=jobs.positive, help="pages per mini-batch (GradCache) of `lora`"
    )
    parser.add_argument(
        "--compressor", choices=COMPRESSORS, default="none", help="compressor of `lora`"
    )
    arguments = list(arguments or [])
    args = parse_on_device(parser, arguments, repeats=3)
    args.layers = args.layers or (None if args.device == "cuda" else 2)
    bench = Bench("train", arguments, args.out)
    for name, figure in FIGURES.items():
        if not args.only or name in args.only:
            with tempfile.TemporaryDirectory(prefix="train-") as folder:
                figure(bench, Path(folder), args)


# -- cached hidden states --------------------------------------------------------------------------


def states(bench: Bench, folder: Path, args: Any) -> None:
    """Measures an epoch with and without cached hidden states, and the time to cache them."""

    def loop(name: str, states: str | None) -> Loop:
        learner = {
            "name": "contrastive",
            "encoder": {
                "name": "colpali",
                "model": str(MODEL),
                "dtype": "float32",
                "output_tokens": "visual",
                "query_prefix": "",
                "num_augmentation": 0,
            },
            "trainable": "projection",
            "hidden_states_cache": states,
            "compressor": {"name": "samer", "num_vectors": 16, "object_prior": True},
        }
        given = {
            "name": name,
            "output": str(folder / name),
            "learner": learner,
            "data": {
                "class": SHAPES,
                "num_scenes": args.scenes,
                "fresh": False,
                "validation": 2,
            },
            "batch_size": min(64, args.scenes),
        }
        return Loop(config.parse(TrainSpec, given), say=lambda line: None)

    runs: dict[str, list[float]] = {"without cache": [], "with cached hidden states": []}
    caching = []
    for number in range(args.repeats):
        setup = []
        for name, times in runs.items():
            cache = str(folder / f"states-{number}") if "cached" in name else None
            started = time.perf_counter()
            training = loop(f"{number}-{cache is None}", cache)
            setup.append(time.perf_counter() - started)
            started = time.perf_counter()
            for batches in training._batches():
                training._step(batches)
            times.append(time.perf_counter() - started)
        caching.append(setup[1] - setup[0])
    seconds = {name: Repeats(tuple(times)) for name, times in runs.items()}
    uncached, cached = seconds.values()
    ratio = uncached.over(cached)
    rows = [[name, str(times)] for name, times in seconds.items()]
    rows.append(["caching the hidden states, once", str(Repeats(tuple(caching)))])
    rows.append(["**without / with cached hidden states**", f"**{ratio}**"])
    title = f"An epoch of {args.scenes} scenes, only the projection, SaMer, K = 16: seconds"
    figures = {"seconds": seconds, "caching": Repeats(tuple(caching)), "ratio": ratio}
    bench.add("states", title, figures, table(["", "seconds"], rows))


# -- a large backbone ------------------------------------------------------------------------------


def lora(bench: Bench, folder: Path, args: Any) -> None:
    """Measures training steps on pages with LoRA of rank 128 applied to the language model."""
    encoder = encode_models.spec(
        folder / "model", args.family, args.layers, args.device, args.batch
    )
    given = {
        "name": "lora",
        "output": str(folder / "run"),
        "learner": {
            "name": "contrastive",
            "encoder": {**encoder.model_dump(mode="json"), "max_batch_tokens": 1 << 20},
            "trainable": "lora",
            **COMPRESSORS[args.compressor],
        },
        "data": {
            "class": SHAPES,
            "num_scenes": 2,
            "validation": 2,
        },
        "batch_size": 2,
        "precision": "bfloat16",
        "activation_checkpointing": args.activation_checkpointing,
        "mini_batch_size": args.mini_batch,
    }
    pages = encode_models.pages(args.batch)["image"].to_pylist()
    facts = torch.arange(len(pages)).unsqueeze(1)
    batch = Batch(
        [f"what does page {number} say" for number in range(len(pages))],
        [{"image": page} for page in pages],
        [str(number) for number in range(len(pages))],
        facts,
        facts,
    )
    spec = config.parse(TrainSpec, given)
    data = OneBatch(spec.data, batch_size=spec.batch_size, seed=0, batch=batch)
    loop = Loop(spec, say=lambda line: None, data=data)
    read = loop.learner.read(batch)
    tokens = sum(len(ids) for chunks in (*read.queries, *read.documents) for ids in chunks)
    loop._step([(batch, read)])  # warm-up
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rates, peaks = [], []
    for _ in range(args.repeats):
        peaks.append(matrix_rate(args.device))
        seconds = _timed(lambda: loop._step([(batch, read)]), args.steps)
        rates.append(args.steps / seconds)
    memory = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    language = language_model(loop.learner)
    weights = sum(p.numel() for n, p in language.named_parameters() if "lora_" not in n)
    weights -= sum(p.numel() for p in language.get_input_embeddings().parameters())
    trained = sum(p.numel() for p in loop.learner.parameters() if p.requires_grad)
    # Two operations per weight and product: frozen weights take part in two, trained ones in three.
    flops = tokens * (4 * weights + 6 * trained)
    with torch.no_grad(), loop._autocast(), encode_models.Operations() as operations:
        loop.learner(loop.learner.mini_batches(read, len(pages))[0])
    # The frozen vision tower and the attention products. Only their forward pass counts.
    rest = operations.count - 2 * tokens * (weights + trained)
    steps, peak = Repeats(tuple(rates)), Repeats(tuple(peaks))
    used, whole = (
        Repeats(tuple(count * rate for rate in rates)).over(peak) for count in (flops, flops + rest)
    )
    rows = [
        ["steps/s", str(steps)],
        ["tokens/s", str(Repeats(tuple(tokens * rate for rate in rates)))],
        ["weights of the language model", f"{weights / 1e9:.2f} G, {trained / 1e6:.1f} M trained"],
        [
            "matrix rate in bfloat16, TFLOP/s",
            str(Repeats(tuple(p / 1e12 for p in peaks))),
        ],
        ["fraction of it, language model only", str(used)],
        ["**MFU, with the vision tower's forward pass**", f"**{whole}**"],
    ]
    if memory:
        rows.append(["peak GPU memory, GB", f"{memory / 1e9:.1f}"])
    depth = f"{args.layers or 'all'} layers"
    title = f"{args.family}, {depth}, {len(pages)} pages per step, {args.device}"
    if args.compressor != "none":
        title += f", through {args.compressor} with 64 vectors"
    if args.mini_batch:
        title += f", mini-batches of {args.mini_batch} (GradCache)"
    figures = {"steps_a_second": steps, "tokens_a_step": tokens, "peak_flops": peak}
    figures |= {"mfu": whole, "mfu_language": used}
    bench.add("lora", title, figures, table(["", ""], rows))


class OneBatch(TrainingData[ComponentSpec]):
    """Training data that repeats a single batch, with default relevance labels.

    Args:
        batch_size: Number of documents per step.
    """

    num_batches = 1

    def __init__(self, spec: ComponentSpec, *, batch_size: int, seed: int, batch: Batch):
        super().__init__(spec, batch_size=batch_size, seed=seed)
        self.batch = batch

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields the batch."""
        yield self.batch


def language_model(learner: Learner[Any]) -> PreTrainedModel:
    """Returns the language model inside the encoder of a contrastive learner.

    Raises:
        TypeError: The learner is not a contrastive one.
    """
    if not isinstance(learner, Contrastive):
        raise TypeError(f"learner must be Contrastive, got {type(learner).__name__}")
    return learner.encoder.attention_module()


def matrix_rate(device: str) -> float:
    """Measures the operations per second of a large matrix product in bfloat16."""
    size = RATE_SIZE[device]
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    _timed(lambda: matrix @ matrix, 2)
    return 10 * 2 * size**3 / _timed(lambda: matrix @ matrix, 10)


def _timed(do: Callable[[], object], times: int) -> float:
    _wait()
    started = time.perf_counter()
    for _ in range(times):
        do()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


FIGURES = {"states": states, "lora": lora}
