"""Benchmark of encoders: attention statistics, throughput, and the default text encoder.

    python -m jobs.bench encode
    python -m jobs.bench encode --only text
    python -m jobs.bench encode --only taps --family colqwen2 --layers 28 --device cuda
    python -m jobs.bench encode --only pipeline actors --items 64

Models have the shapes of published ones with random weights and `--layers` layers (default: all on
a GPU, four on a CPU). The parts are:

- `taps`: a forward pass without SAP's column sums, with them, and with eager attention that returns
  all probabilities.
- `appended`: a forward pass without learned tokens, with them, and with AGC's saliency; and the
  memory that the gradient of the saliency needs, by number of tokens, next to the size of the
  attention matrix of one layer.
- `pipeline`: encoding JPEG files, and the model on preprocessed inputs.
- `actors`: the index job with one and with two encoder actors.
- `text`: the default text encoder and sentence-transformers on windows of Cranfield abstracts: in
  units of 64 abstracts, as in the index job, against one `encode` call over all windows with the
  default batch size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

import jobs
from jobs.bench.harness import Bench, Repeats, parse_on_device, table
from pipeline import extras
from pipeline.config import parse
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.attention import AttentionInputs, selected_rows
from pipeline.encoders.colpali import ColPali
from pipeline.encoders.colqwen2 import ColQwen2
from pipeline.encoders.minilm import MiniLM
from pipeline.encoders.retrieval import Retrieval
from pipeline.taps import MIDDLE, Tap, single_layer_taps

PAGE = (1240, 1754)  # A4 at 150 dpi
ABSTRACTS = Path(jobs.__file__).parent / "data/cranfield/corpus.jsonl"
UNIT_ITEMS = 64  # the index job's default
NUM_APPENDED = 32  # as in the AGC paper


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    on_gpu = torch.cuda.is_available()
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=["text", *FIGURES], help="parts to run (default: all)"
    )
    parser.add_argument("--family", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layers", type=jobs.positive, help="layers of the language model")
    parser.add_argument("--items", type=jobs.positive, default=256 if on_gpu else 12)
    parser.add_argument(
        "--batch", type=jobs.positive, default=8 if on_gpu else 1, help="pages per batch"
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
    for family in args.family if args.only != ["text"] else ():
        with tempfile.TemporaryDirectory(prefix="encode-") as folder:
            spec = write(Path(folder), family, args)
            for name, figure in FIGURES.items():
                if not args.only or name in args.only:
                    figure(bench, family, spec, Path(folder), args)


# -- models and pages ------------------------------------------------------------------------------


def write(folder: Path, family: str, args: Any) -> dict[str, Any]:
    """Writes a checkpoint with random weights and some JPEG pages.

    Returns the spec of the encoder.
    """
    model = folder / "model"
    SHAPES[family](model, args.layers)
    generator = np.random.default_rng(0)
    (folder / "pages").mkdir()
    for number in range(args.items):
        small = generator.integers(0, 255, (PAGE[1] // 16, PAGE[0] // 16, 3), dtype=np.uint8)
        page = Image.fromarray(small).resize(PAGE)  # about the size of a scan
        page.save(folder / f"pages/{number:04}.jpg", quality=85)
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    budget = args.batch * 1100
    return {"name": family, "model": str(model), "dtype": dtype, "max_batch_tokens": budget}


def _words(folder: Path, *special: str, pad: str, eos: str, bos: str | None = None) -> Any:
    """Creates a byte-level tokenizer, which is sufficient to measure a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [name for name in (pad, eos, bos, *special) if name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate([*names, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, bos_token=bos
    )
    words.add_special_tokens({"additional_special_tokens": list(special)})
    return words


def _save(folder: Path, model_class: Any, settings: Any, processor: Any) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # 2 B weights in float32 need too much memory
    try:
        model_class(settings).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    processor.save_pretrained(folder)


def _colpali(folder: Path, num_layers: int | None) -> None:
    """Writes a model with the architecture of ColPali: SigLIP so400m at 448 pixels and Gemma 2B."""
    from transformers import ColPaliConfig, ColPaliForRetrieval, ColPaliProcessor
    from transformers.models.siglip import SiglipImageProcessorPil

    words = _words(folder, "<image>", pad="<pad>", eos="<eos>", bos="<bos>")
    fields = {"size": {"height": 448, "width": 448}, "image_seq_length": 1024}
    images = SiglipImageProcessorPil.from_dict(fields)
    processor = ColPaliProcessor(images, words)
    text = {
        "model_type": "gemma",
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": num_layers or 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27 if num_layers is None else max(1, num_layers * 27 // 18),
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": processor.image_token_id,
        "projection_dim": 2048,
        "hidden_size": 2048,
    }
    settings = ColPaliConfig(vlm_config=vlm, embedding_dim=128)
    _save(folder, ColPaliForRetrieval, settings, processor)


def _colqwen2(folder: Path, num_layers: int | None) -> None:
    """Writes a model with the shape of ColQwen2: Qwen2-VL 2B with at most 768 merged patches."""
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, ColQwen2Processor
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    names = {"vision_start": "vision_start", "vision_end": "vision_end"}
    names |= {"image": "image_pad", "video": "video_pad"}
    special = [f"<|{name}|>" for name in ("im_start", "im_end", *names.values())]
    words = _words(folder, *special, pad="<|endoftext|>", eos="<|end|>")
    ids = {f"{n}_token_id": words.convert_tokens_to_ids(f"<|{t}|>") for n, t in names.items()}
    size = {"shortest_edge": 56 * 56, "longest_edge": 768 * 28 * 28}
    processor = ColQwen2Processor(Qwen2VLImageProcessorPil(size=size), words)
    text = {
        "vocab_size": len(words),
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": num_layers or 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
    }
    depth = 32 if num_layers is None else max(1, num_layers * 32 // 28)
    vision = {"depth": depth, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16}
    vlm = {"model_type": "qwen2_vl", "text_config": text, "vision_config": vision, **ids}
    settings = ColQwen2Config(vlm_config=vlm, embedding_dim=128)
    _save(folder, ColQwen2ForRetrieval, settings, processor)


SHAPES: dict[str, Callable[[Path, int | None], None]] = {
    "colpali": _colpali,
    "colqwen2": _colqwen2,
}
ENCODERS: dict[str, type[Retrieval[Any]]] = {"colpali": ColPali, "colqwen2": ColQwen2}


def _pages(folder: Path) -> pa.Table:
    files = sorted((folder / "pages").glob("*.jpg"))
    return pa.table(
        {"item_id": [file.name for file in files], "image": [file.read_bytes() for file in files]}
    )


# -- measuring -------------------------------------------------------------------------------------


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    _wait()
    start = time.perf_counter()
    yield
    _wait()
    seconds.append(time.perf_counter() - start)


def _peak(do: Callable[[], object]) -> float | None:
    """Measures the peak GPU memory that a call allocates, in GiB."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    do()
    _wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def taps(bench: Bench, family: str, given: dict[str, Any], folder: Path, args: Any) -> None:
    """Compares a fused forward pass with and without SAP's column sums to eager attention."""
    encoder = _built(given)
    items = _read(encoder, _pages(folder).slice(0, args.batch))
    num_layers = encoder.attention(encoder.spec).num_layers
    wanted = single_layer_taps([Tap("column_sums", layers=MIDDLE)], num_layers)
    eager = _built({**given, "attention": "eager"})

    forward = functools.partial(eager.model.forward, output_attentions=True)

    def eagerly() -> None:
        with mock.patch.object(eager.model, "forward", forward):
            list(eager.encode(items))

    sides: dict[str, Callable[[], object]] = {
        "fused": lambda: list(encoder.encode(items)),
        f"with column sums of {len(wanted)} layers": lambda: list(encoder.encode(items, wanted)),
        "eager, all probabilities returned": eagerly,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for _ in range(args.repeats):
        for name, side in sides.items():
            with _timed(seconds[name]):
                side()
    num_tokens = sum(int(batch.mask.sum()) for _, batch in encoder.encode(items))
    found = {name: Repeats(tuple(each)) for name, each in seconds.items()}
    bare, rows = found["fused"], []
    for name, side in sides.items():
        peak = _peak(side)
        times = Repeats(tuple(1e3 * s for s in found[name].values))
        rows.append([name, times, found[name].over(bare), "-" if peak is None else f"{peak:.2f}"])
    what = f"{args.batch} pages, {num_tokens:,} tokens, {num_layers} layers, {given['dtype']}"
    text = table(["pass", "ms", "x fused", "peak, GiB"], rows)
    bench.add(f"taps {family}", f"{family}: {what}", {"seconds": found}, text)


def appended(bench: Bench, family: str, given: dict[str, Any], folder: Path, args: Any) -> None:
    """Compares passes without appended tokens, with them, and with AGC's saliency."""
    plain, extended = _built(given), _built(given)
    extended.append_tokens(AppendedTokens.create(NUM_APPENDED, extended.embedding))
    items = _read(plain, _pages(folder).slice(0, args.batch))
    num_layers = plain.attention(plain.spec).num_layers
    saliency = single_layer_taps([Tap("appended_rows")], num_layers)
    sides: dict[str, Callable[[], object]] = {
        "without appended tokens": lambda: list(plain.encode(items)),
        f"with {NUM_APPENDED} appended tokens": lambda: list(extended.encode(items)),
        "with their saliency": lambda: list(extended.encode(items, saliency)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for repeat in range(args.repeats):
        for name in sorted(sides, reverse=bool(repeat % 2)):
            with _timed(seconds[name]):
                sides[name]()
    num_tokens = sum(int(batch.mask.sum()) for _, batch in plain.encode(items))
    found = {name: Repeats(tuple(each)) for name, each in seconds.items()}
    before, rows = None, []
    for name, each in found.items():
        times = Repeats(tuple(1e3 * s for s in each.values))
        rows.append([name, times, "-" if before is None else each.over(before)])
        before = each
    what = f"{args.batch} pages, {num_tokens:,} tokens, {num_layers} layers, {given['dtype']}"
    text = table(["pass", "ms", "x the row above"], rows)
    bench.add(f"appended {family}", f"{family}: {what}", {"seconds": found}, text)

    settings = plain.attention_module().config
    heads, groups = settings.num_attention_heads, settings.num_key_value_heads
    memory = {
        number: _saved_megabytes(number, heads, groups, settings.hidden_size // heads)
        for number in (512, 1024, 2048, 4096)
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


def pipeline(bench: Bench, family: str, given: dict[str, Any], folder: Path, args: Any) -> None:
    """Compares all stages from JPEG files to vectors with the model alone on prepared inputs."""
    encoder = _built(given)
    pages = _pages(folder)
    ready = _read(encoder, pages)
    tokens = sum(int(batch.mask.sum()) for _, batch in encoder.encode(ready))
    seconds: dict[str, list[float]] = {"read": [], "encode": [], "bare": []}
    inputs = _bare_inputs(encoder, ready)
    for _ in range(args.repeats):
        with _timed(seconds["read"]):
            ready = _read(encoder, pages)
        with _timed(seconds["encode"]):
            for _rows, batch in encoder.encode(ready):
                batch.vectors.cpu()
        with _timed(seconds["bare"]), torch.inference_mode():
            for batch_inputs in inputs:
                encoder.forward(dict(batch_inputs), batch_inputs["attention_mask"].bool())[0].cpu()
    rates = {name: Repeats(tuple(tokens / s for s in each)) for name, each in seconds.items()}
    bare = rates["bare"]
    labels = {
        "read": "decoding and preprocessing, one process",
        "encode": "encoding preprocessed pages",
        "bare": "the model on preprocessed tensors",
    }
    rows = [[labels[name], rate, rate.over(bare)] for name, rate in rates.items()]
    what = f"{pages.num_rows} pages of {PAGE[0]} x {PAGE[1]}, {tokens:,} tokens"
    text = table(["stage", "tokens/s", "x the model"], rows)
    bench.add(f"pipeline {family}", f"{family}: {what}", {"rates": rates}, text)


def actors(bench: Bench, family: str, given: dict[str, Any], folder: Path, args: Any) -> None:
    """Compares the index job with one encoder actor and with two."""
    from pipeline.index import job
    from pipeline.index.spec import IndexResources, IndexSpec

    rows, figures = [], {}
    with jobs.cluster():
        for name, number in (("one actor", 1), ("two actors", 2)):
            rates = []
            for repeat in range(args.repeats):
                with tempfile.TemporaryDirectory() as index:
                    spec = parse(
                        IndexSpec,
                        {
                            "index": f"{index}/index",
                            "source": {"name": "images", "path": str(folder / "pages")},
                            "encoder": given,
                            "representations": [{"compressor": "none"}],
                            "unit_items": max(1, args.items // 4),
                        },
                    )
                    share = 1.0 / number if args.device == "cuda" else 0
                    pool = {"num_cpus": 0.5, "num_gpus": share, "num_threads": 1}
                    pool |= {"min_actors": number, "max_actors": number}
                    profile = parse(IndexResources, {"encode": pool, "prepare": {"num_cpus": 0.5}})
                    progress = job.run(spec, profile, job=str(repeat), report=lambda line: None)
                    rates.append(progress.new / progress.phases["stream"])
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
            with _timed(wall[system, dtype]):
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
    """Returns the text of each window, as input for an encoder that does not support windows."""
    encoded = encoder.tokenizer(
        text,
        truncation=True,
        max_length=encoder.spec.window,
        stride=encoder.spec.overlap_tokens,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    return [text[offsets[1][0] : offsets[-2][1]] for offsets in encoded["offset_mapping"]]


def _built(fields: dict[str, Any]) -> Retrieval[Any]:
    encoder_class = ENCODERS[fields["name"]]
    return encoder_class(parse(encoder_class.Spec, fields))


def _read(encoder: Retrieval[Any], pages: pa.Table) -> pa.Table:
    return encoder.preprocessor(encoder.spec)(pages)


def _bare_inputs(encoder: Retrieval[Any], ready: pa.Table) -> list[dict[str, torch.Tensor]]:
    """Returns the model inputs of each batch that the encoder forms, on its device."""
    recorded: list[dict[str, torch.Tensor]] = []
    forward = encoder.forward

    def record(inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        recorded.append(dict(inputs))
        return forward(inputs, mask)

    with mock.patch.object(encoder, "forward", record):
        list(encoder.encode(ready))
    return recorded


FIGURES = {"taps": taps, "appended": appended, "pipeline": pipeline, "actors": actors}
