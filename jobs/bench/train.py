"""Training: kept states against a model that runs each time; a large backbone with LoRA.

    python -m jobs.bench train
    python -m jobs.bench train --only states --scenes 512
    python -m jobs.bench train --only lora --family colqwen2 --batch 16 --device cuda

`states`: an epoch of a projection alone, of the shipped ColPali through SaMer, with the frozen
model running and with its states kept. `lora`: steps of a model of a published shape with random
weights (all layers on a GPU, two on a CPU), and the share of this machine's own matrix rate.
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
from jobs.bench import encode
from jobs.bench.harness import Bench, Repeats, parse_on_device, table
from pipeline import config
from pipeline.config import ComponentSpec
from pipeline.train.contrastive import Contrastive
from pipeline.train.learner import Learner
from pipeline.train.loop import Loop
from pipeline.train.spec import TrainSpec
from pipeline.training_data.base import Batch, TrainingData

MODEL = Path(__file__).parents[1] / "data" / "models" / "shapes_colpali"
#: Rows and columns of the matrices whose product is the machine's rate.
RATE_SIZE = {"cpu": 2048, "cuda": 8192}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and takes the figures."""
    on_gpu = torch.cuda.is_available()
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="default: all")
    parser.add_argument("--scenes", type=jobs.positive, default=256, help="of an epoch")
    parser.add_argument("--family", choices=encode.SHAPES, default="colqwen2")
    parser.add_argument("--layers", type=jobs.positive, help="of the language model")
    parser.add_argument("--batch", type=jobs.positive, default=16 if on_gpu else 2, help="pages")
    parser.add_argument("--steps", type=jobs.positive, default=10 if on_gpu else 2)
    parser.add_argument("--recompute", action="store_true", help="activations, see TrainSpec")
    arguments = list(arguments or [])
    args = parse_on_device(parser, arguments, repeats=3)
    args.layers = args.layers or (None if args.device == "cuda" else 2)
    bench = Bench("train", arguments, args.out)
    for name, figure in FIGURES.items():
        if not args.only or name in args.only:
            with tempfile.TemporaryDirectory(prefix="train-") as folder:
                figure(bench, Path(folder), args)


# -- kept states -----------------------------------------------------------------------------------


def states(bench: Bench, folder: Path, args: Any) -> None:
    """An epoch with and without kept states, in turn; and what it takes to keep them."""

    def loop(name: str, states: str | None) -> Loop:
        learner = {
            "name": "contrastive",
            "encoder": {
                "name": "colpali",
                "model": str(MODEL),
                "dtype": "float32",
                "keep": "visual",
                "query_prefix": "",
                "num_augmentation": 0,
            },
            "trains": "projection",
            "states": states,
            "compressor": {"name": "samer", "num_vectors": 16, "object_prior": True},
        }
        given = {
            "name": name,
            "output": str(folder / name),
            "learner": learner,
            "data": {"name": "shapes", "num_scenes": args.scenes, "fresh": False, "held_out": 2},
            "batch_size": min(64, args.scenes),
        }
        return Loop(config.parse(TrainSpec, given), say=lambda line: None)

    runs: dict[str, list[float]] = {"the model runs": [], "its states are kept": []}
    keeping = []
    for number in range(args.repeats):
        beginning = []
        for name, times in runs.items():
            cache = str(folder / f"states-{number}") if "kept" in name else None
            started = time.perf_counter()
            one = loop(f"{number}-{cache is None}", cache)
            beginning.append(time.perf_counter() - started)
            started = time.perf_counter()
            for batches in one._batches():
                one._step(batches)
            times.append(time.perf_counter() - started)
        keeping.append(beginning[1] - beginning[0])
    seconds = {name: Repeats(tuple(times)) for name, times in runs.items()}
    plain, kept = seconds.values()
    ratio = plain.over(kept)
    rows = [[name, str(times)] for name, times in seconds.items()]
    rows.append(["keeping them, once", str(Repeats(tuple(keeping)))])
    rows.append(["**without / with kept states**", f"**{ratio}**"])
    title = f"An epoch of {args.scenes} scenes, the projection alone through SaMer, K = 16: seconds"
    figures = {"seconds": seconds, "keeping": Repeats(tuple(keeping)), "ratio": ratio}
    bench.add("states", title, figures, table(["", "seconds"], rows))


# -- a large backbone ------------------------------------------------------------------------------


def lora(bench: Bench, folder: Path, args: Any) -> None:
    """Steps on pages with LoRA of rank 128 beside the language model's layers."""
    args.items = args.batch
    encoder = encode.write(folder, args.family, args)
    given = {
        "name": "lora",
        "output": str(folder / "run"),
        "learner": {
            "name": "contrastive",
            "encoder": {**encoder, "max_batch_tokens": 1 << 20},
            "trains": "lora",
        },
        "data": {"name": "shapes", "num_scenes": 2, "held_out": 2},
        "batch_size": 2,
        "precision": "bfloat16",
        "recompute": args.recompute,
    }
    pages = [path.read_bytes() for path in sorted((folder / "pages").glob("*.jpg"))]
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
    tokens = sum(len(one) for own in (*read.queries, *read.documents) for one in own)
    loop._step([(batch, read)])  # what is compiled or allocated at first
    rates, peaks = [], []
    for _ in range(args.repeats):
        peaks.append(matrix_rate(args.device))
        seconds = _timed(lambda: loop._step([(batch, read)]), args.steps)
        rates.append(args.steps / seconds)
    language = language_model(loop.learner)
    weights = sum(p.numel() for n, p in language.named_parameters() if "lora_" not in n)
    weights -= sum(p.numel() for p in language.get_input_embeddings().parameters())
    own = sum(p.numel() for p in loop.learner.parameters() if p.requires_grad)
    # Frozen weights are multiplied with forward and backward, trained ones once more: 2 each.
    flops = tokens * (4 * weights + 6 * own)
    steps, peak = Repeats(tuple(rates)), Repeats(tuple(peaks))
    used = Repeats(tuple(flops * rate for rate in rates)).over(peak)
    rows = [
        ["steps/s", str(steps)],
        ["tokens/s", str(Repeats(tuple(tokens * rate for rate in rates)))],
        ["weights of the language model", f"{weights / 1e9:.2f} G, {own / 1e6:.1f} M trained"],
        [
            "matrix rate in bfloat16, TFLOP/s",
            str(Repeats(tuple(p / 1e12 for p in peaks))),
        ],
        ["**share of it, of the language model alone**", f"**{used}**"],
    ]
    depth = f"{args.layers or 'all'} layers"
    title = f"{args.family}, {depth}, {len(pages)} pages a step, {args.device}"
    figures = {"steps_a_second": steps, "tokens_a_step": tokens, "mfu": used, "peak_flops": peak}
    bench.add("lora", title, figures, table(["", ""], rows))


class OneBatch(TrainingData[ComponentSpec]):
    """Training data of one batch, with the default relevance of documents.

    Args:
        spec: Spec of the data that the batch replaces.
        batch_size: Documents per step.
        seed: Seed of the run.
        batch: Batch of every step.
    """

    num_batches = 1

    def __init__(self, spec: ComponentSpec, *, batch_size: int, seed: int, batch: Batch):
        super().__init__(spec, batch_size=batch_size, seed=seed)
        self.batch = batch

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields the batch."""
        yield self.batch


def language_model(learner: Learner[Any]) -> PreTrainedModel:
    """Returns the language model of a contrastive learner's encoder.

    Raises:
        TypeError: The learner is not a contrastive one.
    """
    if not isinstance(learner, Contrastive):
        raise TypeError(f"learner must be Contrastive, got {type(learner).__name__}")
    return learner.encoder.attending()


def matrix_rate(device: str) -> float:
    """Operations a second of a large product in bfloat16."""
    size = RATE_SIZE[device]
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    _timed(lambda: one @ one, 2)
    return 10 * 2 * size**3 / _timed(lambda: one @ one, 10)


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
