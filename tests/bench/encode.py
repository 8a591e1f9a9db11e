"""Benchmark of encoders: attention statistics, throughput, and the default text encoder.

    python -m tests.bench encode
    python -m tests.bench encode --only text
    python -m tests.bench encode --only taps --family colqwen2 --layers 28 --device cuda
    python -m tests.bench encode --only pipeline stages --items 64 --workers 14

Models have the shapes of published ones with random weights and `--layers` layers (default: all on
a GPU, four on a CPU). Only `actors` needs Ray. The parts are:

- `taps`: forward passes without attention statistics, with SAP's column sums, with AGC's appended
  tokens, with these and their saliency, and with eager attention that returns all probabilities;
  and, on a GPU, the memory of the column sums by number of tokens.
- `appended`: a forward pass without learned tokens, with them, and with AGC's saliency; and the
  memory that the gradient of the saliency needs, by number of tokens, next to the size of the
  attention matrix of one layer.
- `pipeline`: pages/s and the share of the GPU's peak rate (MFU) of the model on preprocessed
  inputs, and of encoding JPEG files that `--workers` processes decode and preprocess.
- `stages`: the stages of the index job in one process over bundled PDF pages, photos and clips, and
  the time that the formula of `jobs.plan` predicts.
- `actors`: the index job with one and with two encoder actors.
- `text`: the default text encoder and sentence-transformers on windows of Cranfield abstracts: in
  units of 64 abstracts, as in the index job, against one `encode` call over all windows with the
  default batch size.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import torch

import jobs
from pipeline import extras
from pipeline.config import parse
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.attention import (
    AttentionInputs,
    kernel_module,
    selected_rows,
    weighted_rows,
)
from pipeline.encoders.minilm import MiniLM
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.registry import ENCODERS
from pipeline.taps import MIDDLE, Tap, single_layer_taps
from tests.bench import encode_models
from tests.bench.encode_stream import pass_times, pipeline, stages, timed, wait
from tests.bench.harness import Bench, Repeats, parse_on_device, table

ABSTRACTS = Path(jobs.__file__).parent / "data/cranfield/corpus.jsonl"
UNIT_ITEMS = 64  # the index job's default
NUM_APPENDED = 32  # as in the AGC paper


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    on_gpu = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0))
    families = list(encode_models.SHAPES)
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=["text", *FIGURES], help="parts to run (default: all)"
    )
    parser.add_argument("--family", nargs="+", choices=families, default=families)
    parser.add_argument("--layers", type=jobs.positive, help="layers of the language model")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of checkpoints, which are reused if they exist"
    )
    parser.add_argument("--items", type=jobs.positive, default=256 if on_gpu else 12)
    parser.add_argument(
        "--batch", type=jobs.positive, default=8 if on_gpu else 1, help="pages per batch"
    )
    parser.add_argument(
        "--workers",
        type=jobs.positive,
        default=max(1, cores - 2),
        help="processes that decode and preprocess in `pipeline`",
    )
    parser.add_argument(
        "--unit-items",
        type=jobs.positive,
        default=32 if on_gpu else 2,
        help="pages per unit in `pipeline`",
    )
    parser.add_argument(
        "--eager",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure eager attention in `taps`",
    )
    parser.add_argument(
        "--abstracts", type=jobs.positive, default=256, help="number of abstracts for `text`"
    )
    arguments = list(arguments or [])
    args = parse_on_device(parser, arguments, repeats=5)
    args.layers = args.layers or (None if args.device == "cuda" else 4)
    bench = Bench("encode", arguments, args.out)
    if not args.only or "text" in args.only:
        text(bench, args)
    with tempfile.TemporaryDirectory(prefix="encode-") as folder:
        for family in args.family if args.only != ["text"] else ():
            encoder = _load(args.checkpoints or Path(folder), family, args)
            for name, figure in FIGURES.items():
                if not args.only or name in args.only:
                    figure(bench, family, encoder, args)


def _load(folder: Path, family: str, args: Any) -> SequenceEncoder[Any]:
    start = time.perf_counter()
    checkpoint = folder / f"{family}-{args.layers or 'all'}"
    spec = encode_models.spec(checkpoint, family, args.layers, args.device, args.batch)
    written = time.perf_counter()
    encoder: Any = ENCODERS.build(spec)
    loaded = time.perf_counter()
    weights = sum(parameter.numel() for parameter in encoder.model.parameters())
    print(
        f"\n{family}: {weights / 1e9:.2f} B weights, written in {written - start:.1f} s"
        f" and loaded in {loaded - written:.1f} s",
        flush=True,
    )
    return encoder


# -- measuring -------------------------------------------------------------------------------------


def _peak(do: Callable[[], object]) -> float | None:
    """Measures the peak GPU memory that a call allocates, in GiB."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    do()
    wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _repeated(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, Repeats]:
    """Returns the seconds of each side, which alternate in going first after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for repeat in range(repeats):
        for name in reversed(sides) if repeat % 2 else sides:
            seconds[name].append(sides[name]())
    return {name: Repeats(tuple(each)) for name, each in seconds.items()}


def _encode_pages(
    encoder: SequenceEncoder[Any], items: pa.Table, taps: Sequence[Tap] = ()
) -> float:
    with pass_times(encoder) as passes:
        for _ in encoder.encode(items, taps):
            pass
        return sum(passes())


@contextmanager
def _eager(encoder: SequenceEncoder[Any]) -> Iterator[None]:
    model, implementation = encoder.model, encoder.spec.attention
    forward = functools.partial(model.forward, output_attentions=True)
    model.set_attn_implementation("eager")
    with mock.patch.object(model, "forward", forward):
        yield
    model.set_attn_implementation(implementation)


def taps(bench: Bench, family: str, encoder: SequenceEncoder[Any], args: Any) -> None:
    """Compares forward passes with and without attention statistics to eager attention."""
    items = encoder.preprocessor(encoder.spec)(encode_models.pages(args.batch))
    num_layers = encoder.attention_module().config.num_hidden_layers
    sums = single_layer_taps([Tap("column_sums", layers=MIDDLE)], num_layers)
    saliency = single_layer_taps([Tap("appended_rows")], num_layers)
    extended = _extended(encoder)

    def eagerly() -> float:
        with _eager(encoder):
            return _encode_pages(encoder, items)

    plain, with_tokens = "fused", f"with {NUM_APPENDED} appended tokens"
    with_sums, with_saliency = f"with column sums of {len(sums)} layers", "with their saliency"
    sides: dict[str, Callable[[], float]] = {
        plain: lambda: _encode_pages(encoder, items),
        with_sums: lambda: _encode_pages(encoder, items, sums),
        with_tokens: lambda: _encode_pages(extended, items),
        with_saliency: lambda: _encode_pages(extended, items, saliency),
    }
    # The pass without the statistics of a pass, whose cost is the difference.
    bases = {with_sums: plain, with_saliency: with_tokens}
    if args.eager:
        sides["eager, all probabilities returned"] = eagerly
        bases["eager, all probabilities returned"] = plain
    found, rows = _repeated(sides, args.repeats), []
    for name, side in sides.items():
        peak = _peak(side)
        times = Repeats(tuple(1e3 * s for s in found[name].values))
        overhead = "-"
        if name in bases:
            overhead = f"{found[name].over(found[bases[name]]).median - 1:+.1%}"
        memory = "-" if peak is None else f"{peak:.2f}"
        rows.append([name, times, found[name].over(found[plain]), overhead, memory])
    what = _describe(family, encoder, items)
    text = table(["pass", "ms", "x fused", "statistics", "peak, GiB"], rows)
    bench.add(f"taps {family}", what, {"seconds": found}, text)
    if args.device == "cuda":
        _column_sums_memory(bench, family, encoder)


def _column_sums_memory(bench: Bench, family: str, encoder: SequenceEncoder[Any]) -> None:
    """Measures the GPU memory that the column sums of one layer need, by number of tokens."""
    heads, groups, dim = _heads(encoder)
    has_mask = family == "colpali"  # a mask per row; the attention of the others is causal
    memory, rows, kernels = {}, [], None
    for number in (1024, 2048, 4096, 8192, 16384):
        query, key = (
            torch.randn(1, count, number, dim, device="cuda", dtype=torch.bfloat16)
            for count in (heads, groups)
        )
        weights = torch.ones(1, 1, number, device="cuda")
        kernels = kernel_module(query)
        mask = None
        if has_mask:
            mask = torch.ones(1, 1, number, number, dtype=torch.bool, device="cuda")
        sums = functools.partial(weighted_rows, query, key, mask, weights, is_causal=not has_mask)
        memory[number] = 1024 * (_peak(sums) or 0.0)
        matrix = 4 * heads * number**2 / 2**20
        rows.append([f"{number:,}", f"{memory[number]:,.0f}", f"{matrix:,.0f}"])
    text = table(["tokens", "column sums, MiB", "attention matrix, MiB"], rows)
    path = "torch" if kernels is None else "Triton"
    what = f"{family}: one layer of {heads} heads, one item, {path}, matrix in float32"
    bench.add(f"column sums memory {family}", what, {"peak_mib": memory}, text)


def _extended(encoder: SequenceEncoder[Any]) -> SequenceEncoder[Any]:
    """Returns an encoder of the same model that appends random tokens to items."""
    extended = copy.copy(encoder)
    extended.append_tokens(AppendedTokens.create(NUM_APPENDED, encoder.embedding))
    return extended


def _describe(family: str, encoder: SequenceEncoder[Any], items: pa.Table) -> str:
    num_tokens = sum(int(batch.mask.sum()) for _, batch in encoder.encode(items))
    num_layers = encoder.attention_module().config.num_hidden_layers
    what = f"{items.num_rows} pages, {num_tokens:,} tokens, {num_layers} layers"
    return f"{family}: {what}, {encoder.spec.dtype}"


def _heads(encoder: SequenceEncoder[Any]) -> tuple[int, int, int]:
    settings = encoder.attention_module().config
    heads = settings.num_attention_heads
    dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    return heads, settings.num_key_value_heads, dim


def appended(bench: Bench, family: str, encoder: SequenceEncoder[Any], args: Any) -> None:
    """Compares passes without appended tokens, with them, and with AGC's saliency."""
    items = encoder.preprocessor(encoder.spec)(encode_models.pages(args.batch))
    num_layers = encoder.attention_module().config.num_hidden_layers
    saliency = single_layer_taps([Tap("appended_rows")], num_layers)
    extended = _extended(encoder)
    sides: dict[str, Callable[[], float]] = {
        "without appended tokens": lambda: _encode_pages(encoder, items),
        f"with {NUM_APPENDED} appended tokens": lambda: _encode_pages(extended, items),
        "with their saliency": lambda: _encode_pages(extended, items, saliency),
    }
    found = _repeated(sides, args.repeats)
    before, rows = None, []
    for name, each in found.items():
        times = Repeats(tuple(1e3 * s for s in each.values))
        rows.append([name, times, "-" if before is None else each.over(before)])
        before = each
    text = table(["pass", "ms", "x the row above"], rows)
    what = _describe(family, encoder, items)
    bench.add(f"appended {family}", what, {"seconds": found}, text)

    heads, groups, dim = _heads(encoder)
    memory = {
        number: _saved_megabytes(number, heads, groups, dim) for number in (512, 1024, 2048, 4096)
    }
    rows = [[str(n), f"{mib:.1f}", f"{4 * heads * n * n / 2**20:.0f}"] for n, mib in memory.items()]
    text = table(["tokens", "saved for the gradient, MiB", "attention matrix, MiB"], rows)
    what = f"{NUM_APPENDED} appended tokens, {heads} heads, one item, float32"
    bench.add(f"saliency memory {family}", f"{family}: {what}", {"saved_mib": memory}, text)


def _saved_megabytes(num_tokens: int, heads: int, groups: int, dim: int) -> float:
    """Returns the size of the tensors that autograd saves for the saliency of one item, in MiB."""
    num_rows = num_tokens + NUM_APPENDED
    query = torch.randn(1, heads, num_rows, dim, requires_grad=True)
    key = torch.randn(1, groups, num_rows, dim, requires_grad=True)
    storages: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = AttentionInputs(query, key, None, None, False)
    rows_1M = torch.arange(num_tokens, num_rows).unsqueeze(0)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        saliency = selected_rows(inputs, rows_1M).mean(dim=(1, 2))
    saliency.sum().backward()
    return sum(storages.values()) / 2**20


def actors(bench: Bench, family: str, encoder: SequenceEncoder[Any], args: Any) -> None:
    """Compares the index job with one encoder actor and with two."""
    from pipeline.index import job
    from pipeline.index.spec import IndexResources, IndexSpec

    rows, figures = [], {}
    with jobs.cluster(), tempfile.TemporaryDirectory() as pages:
        items = encode_models.pages(args.items)
        for name, image in zip(*(items[c].to_pylist() for c in items.column_names), strict=True):
            Path(pages, f"{name}.jpg").write_bytes(image)
        for name, number in (("one actor", 1), ("two actors", 2)):
            rates = []
            for repeat in range(args.repeats):
                with tempfile.TemporaryDirectory() as index:
                    spec = parse(
                        IndexSpec,
                        {
                            "index": f"{index}/index",
                            "source": {"name": "images", "path": pages},
                            "encoder": encoder.spec.model_dump(mode="json"),
                            "representations": [{"compressor": "none"}],
                            "unit_items": max(1, args.items // 4),
                        },
                    )
                    share = 1.0 / number if args.device == "cuda" else 0
                    pool = {"num_cpus": 0.5, "num_gpus": share, "num_threads": 1}
                    pool |= {"min_actors": number, "max_actors": number}
                    profile = parse(IndexResources, {"encode": pool, "prepare": {"num_cpus": 0.5}})
                    progress = job.run(spec, profile, job=str(repeat), report=lambda line: None)
                    rates.append(progress.new / progress.phases["index"])
            figures[name] = Repeats(tuple(rates))
            rows.append([name, figures[name], figures[name].over(figures["one actor"])])
    text = table(
        ["encoder actors, one thread each", "pages/s including start-up", "x one actor"], rows
    )
    bench.add(f"actors {family}", f"{family}: {args.items} pages", figures, text)


def text(bench: Bench, args: Any) -> None:
    """Compares the default text encoder with sentence-transformers in alternating runs."""
    extras.require("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    dtypes = dict.fromkeys([MiniLM.Spec().dtype, MiniLM.Spec(dtype="auto").dtype])
    encoders = {dtype: MiniLM(MiniLM.Spec(dtype=dtype)) for dtype in dtypes}
    encoder = encoders["float32"]
    with ABSTRACTS.open(encoding="utf-8") as file:
        lines = itertools.islice(file, args.abstracts)
        texts = [json.loads(line)["text"] for line in lines]
    units = [texts[i : i + UNIT_ITEMS] for i in range(0, len(texts), UNIT_ITEMS)]
    tables = [pa.table({"text": pa.array(unit, pa.string())}) for unit in units]
    windows = [w for text in texts for w in _windows(encoder, text)]
    others = {
        dtype: SentenceTransformer(
            str(encoder.model.name_or_path),
            device=args.device,
            model_kwargs={"dtype": getattr(torch, dtype)},
        )
        for dtype in dtypes
    }
    limit = others["float32"].max_seq_length
    tokens = encoder.tokenizer(windows, truncation=True, max_length=limit)
    num_tokens = sum(map(len, tokens["input_ids"]))

    def maxray(dtype: Any) -> object:
        return [list(encoders[dtype].encode(table)) for table in tables]

    def sentence_transformers(dtype: Any) -> object:
        return others[dtype].encode(
            windows, output_value="token_embeddings", show_progress_bar=False
        )

    systems = {"maxray": maxray, "sentence-transformers": sentence_transformers}
    sides = [(system, dtype) for dtype in dtypes for system in systems]
    wall: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    cpu: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    for system, dtype in sides:
        systems[system](dtype)
    for repeat in range(args.repeats):
        # The sides alternate in going first, so that all see the same load of the machine.
        for system, dtype in reversed(sides) if repeat % 2 else sides:
            start = time.process_time()
            with timed(wall[system, dtype]):
                systems[system](dtype)
            cpu[system, dtype].append(time.process_time() - start)
    rates = {side: Repeats(tuple(len(texts) / s for s in each)) for side, each in wall.items()}
    cpu_rates = {side: Repeats(tuple(len(texts) / s for s in each)) for side, each in cpu.items()}
    rows = [[*side, rates[side], cpu_rates[side]] for side in sides]
    pairs = [(("maxray", d), ("sentence-transformers", d)) for d in dtypes]
    pairs += [(("maxray", d), ("maxray", "float32")) for d in dtypes if d != "float32"]
    for one, other in pairs:
        ratios = [f"**{each[one].over(each[other])}**" for each in (rates, cpu_rates)]
        rows.append([f"**{one[0]} / {' '.join(other)}**", one[1], *ratios])
    head = ["encoder", "dtype", "abstracts/s", "abstracts per CPU second"]
    what = f"{len(texts)} abstracts, {len(windows)} windows, {num_tokens:,} tokens"
    what += f", {torch.get_num_threads()} threads"
    figures = {
        " ".join(side): {"rates": rates[side], "cpu_rates": cpu_rates[side]} for side in sides
    }
    bench.add("text", what, figures, table(head, rows))


def _windows(encoder: MiniLM, text: str) -> list[str]:
    encoded = encoder.tokenizer(
        text,
        truncation=True,
        max_length=encoder.spec.window,
        stride=encoder.spec.overlap_tokens,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    return [text[offsets[1][0] : offsets[-2][1]] for offsets in encoded["offset_mapping"]]


FIGURES = {
    "taps": taps,
    "appended": appended,
    "pipeline": pipeline,
    "stages": stages,
    "actors": actors,
}
