"""Benchmark of EDJE reranking against a plain Hugging Face loop: throughput and latency.

    python -m tests.bench rerank
    python -m tests.bench rerank --latency
    python -m tests.bench rerank --model bundled --out figures.json
    python -m tests.bench rerank --device cuda                # on a GPU; needs no Ray, no Lance
    python -m tests.bench rerank --study edje_tokens.yaml --tokens 196

The model has the shape of MiniLM-L12-H384 with random weights, unless `--model` is set, and random
inputs. `paths` (CPU) runs each implementation of `JointEncoder.scores` and reports the deviation of
its scores from the plain loop in float64. `passes` (GPU) runs a bfloat16 forward pass with 64
tokens per item and with the 576 of the local variant: eager, compiled and as a CUDA graph.
`latency` measures single queries including tokenization. The plain loop repeats the query's text
for each pair and pads. `--study` reports quality, bytes and latency of trained EDJEs by their
number of tokens (the paper's Figure 4 and Table 2).
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import jobs
from pipeline.config import SpecError, parse
from pipeline.encoders.edje.joint import JointEncoder, Texts
from tests.bench import maxsim, maxsim_gpu
from tests.bench.harness import Bench, Repeats, parse_on_device, table
from tests.bench.rerank_run import median_p95, milliseconds, random_candidates, scores_on_cpu

WORDS = 30522
#: Wider than BERT's initialisation, so that scores vary as in a trained model.
SPREAD = 0.05
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Implementations of `scores` on a CPU, as changes to the spec.
PATHS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantise": "int8"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    on_gpu = torch.cuda.is_available()
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=FIGURES, help="parts to run (default: depends on the device)"
    )
    parser.add_argument("--latency", action="store_true", help="same as --only latency")
    parser.add_argument("--study", metavar="SPEC", help="study of EDJEs trained by jobs.train")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot of the study")
    parser.add_argument("--model", help="model of the joint encoder (default: random weights)")
    parser.add_argument(
        "--layers", type=jobs.positive, default=12, help="layers of the random model"
    )
    parser.add_argument(
        "--tokens",
        type=jobs.positive,
        nargs="+",
        help="tokens per item; in a study, those of local EDJEs",
    )
    parser.add_argument("--text-tokens", type=jobs.positive, default=16)
    parser.add_argument("--queries", type=jobs.positive, default=4, help="queries of `paths`")
    parser.add_argument("--rerank-depth", type=jobs.positive, nargs="+", default=[10, 64])
    parser.add_argument(
        "--batch-tokens", type=jobs.positive, default=1 << 17, help="tokens per batch of `passes`"
    )
    parser.add_argument("--calls", type=jobs.positive, default=30, help="calls of `latency`")
    arguments = list(arguments or [])
    args = parse_on_device(parser, arguments, repeats=5)
    if args.device == "cpu" and on_gpu:
        raise SpecError("device", "cpu", "cuda, unless CUDA_VISIBLE_DEVICES is empty")
    by_device = ["passes", "latency"] if on_gpu else ["paths"]
    if args.plot and not args.study:
        raise SpecError("plot", str(args.plot), "used with --study")
    only = ["latency"] if args.latency else args.only or by_device
    bench = Bench("rerank", arguments, args.out)
    print(f"threads   {torch.get_num_threads()}")
    if args.study:
        from tests.bench.rerank_study import study  # requires the packages for training

        return study(bench, args)
    with tempfile.TemporaryDirectory(prefix="rerank-") as folder:
        if args.model is None:
            write(Path(folder), args.layers)
        args.model = args.model or folder
        for name in only:
            FIGURES[name](bench, args)


# -- the model ----------------------------------------------------------------


def write(folder: Path, num_layers: int) -> None:
    """Writes a checkpoint of random weights with a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    names = [*special, *(f"w{number}" for number in range(WORDS - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    named = {f"{name.strip('[]').lower()}_token": name for name in special}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    torch.manual_seed(0)
    settings = BertConfig(  # the shape of MiniLM-L12-H384, except for the number of layers
        vocab_size=WORDS,
        hidden_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        intermediate_size=1536,
        initializer_range=SPREAD,
    )
    BertForMaskedLM(settings).save_pretrained(folder)


def joint_encoder(args: Any, **changes: Any) -> JointEncoder:
    """Returns a copy of the joint encoder with other settings, which shares the scoring head."""
    joint = JointEncoder(parse(JointEncoder.Spec, {"model": args.model, **changes}), 1).eval()
    torch.manual_seed(1)
    match = torch.nn.Linear(joint.match.in_features, 1)
    joint.match.load_state_dict(match.state_dict())
    return joint.requires_grad_(False)


def plain(
    joint: JointEncoder, dtype: torch.dtype, device: str
) -> Callable[[Texts, torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """Returns a typical scoring loop with transformers: a linear layer after the model."""
    language = copy.deepcopy(joint.language).eval().to(device, dtype)
    model, embedding = language.base_model, language.get_input_embeddings()
    head = torch.nn.Linear(joint.match.in_features, 1, dtype=dtype, device=device)
    head.load_state_dict(joint.match.state_dict())

    @torch.inference_mode()
    def scores(
        texts: Texts, tokens: torch.Tensor, pairs: torch.Tensor, at_once: int
    ) -> torch.Tensor:
        found, num_vision = [], tokens.shape[1]
        for text_P, item_P in (chunk.unbind(1) for chunk in pairs.split(at_once)):
            words = embedding(texts.ids[text_P])
            embedded = torch.cat([tokens[item_P].to(dtype), words], dim=1)
            mask = torch.cat([embedded.new_ones(len(words), num_vision), texts.mask[text_P]], 1)
            places = torch.arange(embedded.shape[1], device=device) - num_vision
            states = model(
                inputs_embeds=embedded,
                attention_mask=mask.long(),
                position_ids=places.clamp_min(0).unsqueeze(0),
                token_type_ids=(places < 0).long().expand(mask.shape),
            ).last_hidden_state
            found.append(head(states[:, num_vision]).squeeze(1))
        return torch.cat(found)

    return scores


def operations(joint: JointEncoder, num_tokens: int) -> int:
    """Returns the number of arithmetic operations for scoring a pair of `num_tokens` tokens."""
    settings = joint.language.config
    wide, inner = settings.hidden_size, settings.intermediate_size
    layers = settings.num_hidden_layers
    qkv = 2 * 3 * wide**2 * num_tokens
    per_output = (
        2 * (wide**2 + 2 * wide * inner) + 4 * wide * num_tokens
    )  # the last layer has one output
    return layers * qkv + ((layers - 1) * num_tokens + 1) * per_output


def ranks_agree(scores: torch.Tensor, reference: torch.Tensor, depth: int) -> float:
    """Computes Spearman's rank correlation of the candidates, averaged over queries."""
    both = [one.double().view(-1, depth).argsort(1).argsort(1) for one in (scores, reference)]
    found = [torch.corrcoef(torch.stack(pair).double())[0, 1] for pair in zip(*both, strict=True)]
    return torch.stack(found).mean().item()


# -- figures -----------------------------------------------------------------------------------


def paths(bench: Bench, args: Any) -> None:
    """Compares each implementation on a CPU with the plain loop in throughput and deviation."""
    num_tokens = (args.tokens or [64])[0]
    depth = args.rerank_depth[0] if len(args.rerank_depth) == 1 else 16
    joints = {name: joint_encoder(args, **PATHS[name]) for name in _supported_paths()}
    first = joints["float32"]
    size = num_tokens + args.text_tokens
    texts, tokens, mask, pairs = random_candidates(
        first, num_tokens, args.text_tokens, args.queries, depth
    )
    read = first.tokenise(texts)
    wide = tokens.float()
    loops = {name: plain(first, TYPES[name], "cpu") for name in TYPES if name in joints}
    exact = plain(first, torch.float64, "cpu")(read, tokens.double(), pairs, len(pairs))
    few = max(2048 // size, 1)  # as many tokens as one pass of `scores`
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "plain loop, float32": lambda: loops["float32"](read, wide, pairs, len(pairs)),
        f"plain loop, float32, {few} at once": lambda: loops["float32"](read, wide, pairs, few),
    }
    if "bfloat16" in loops:
        sides["plain loop, bfloat16"] = lambda: loops["bfloat16"](read, wide, pairs, len(pairs))
    for name, joint in joints.items():
        sides[f"scores, {name}"] = functools.partial(joint.scores, read, tokens, mask, pairs)
    with torch.inference_mode():
        found = {name: side().double() for name, side in sides.items()}
        times, _, say = maxsim.with_steady_peaks(lambda: maxsim.in_turns(sides, args.repeats))
    base, figures, rows = times["plain loop, float32"], {}, []
    for name, taken in times.items():
        off = (found[name] - exact).abs()
        same = times.get(name.replace("scores", "plain loop"), taken)
        rate = Repeats(tuple(len(pairs) / value for value in taken.values))
        over_plain = base.over(taken)
        over_same_type = same.over(taken) if same is not taken else None
        max_off, mean_off = off.max().item(), off.mean().item()
        ranks = ranks_agree(found[name], exact, depth)
        figures[name] = {
            "pairs_a_second": rate,
            "over_plain": over_plain,
            "over_same_type": over_same_type,
            "max_off": max_off,
            "mean_off": mean_off,
            "ranks": ranks,
        }
        errors = f"{max_off:.1e}", f"{mean_off:.1e}"
        rows.append([name, rate, over_plain, over_same_type or "", *errors, f"{ranks:.4f}"])
    spread = exact.view(-1, depth).std(dim=1).mean().item()
    title = (
        f"{len(pairs)} pairs of {num_tokens} + {args.text_tokens} tokens, rerank depth {depth};"
        f" scores of a query spread by {spread:.2f} (standard deviation). {say}"
    )
    header = ["path", "pairs/s", "x plain float32", "x plain, same type"]
    header += ["off at most", "off, mean", "rank correlation"]
    bench.add("paths", title, {"paths": figures, "spread": spread}, table(header, rows))


def passes(bench: Bench, args: Any) -> None:
    """Measures one pass in bfloat16, and its fraction of the peak rate of matrix products."""
    device = args.device
    joint = joint_encoder(args, dtype="bfloat16", max_batch_tokens=args.batch_tokens)
    clock = maxsim_gpu if device == "cuda" else maxsim
    peaks = (lambda: maxsim_gpu.peaks(args.repeats)) if device == "cuda" else maxsim.peaks
    before = peaks()
    rows: list[tuple[str, str, Repeats, int, float]] = []
    figures: dict[str, Any] = {}
    for num_tokens in args.tokens or [64, 576]:
        size = num_tokens + args.text_tokens
        depth = max(args.rerank_depth)
        num_queries = max(args.batch_tokens // size // depth, 1)
        texts, *given = random_candidates(joint, num_tokens, args.text_tokens, num_queries, depth)
        tokens, mask, pairs = (one.to(device) for one in given)
        read = joint.tokenise(texts).to(joint.device)
        loop = plain(joint, torch.bfloat16, device)
        sides: dict[str, Callable[[], torch.Tensor]] = {
            "plain loop": functools.partial(loop, read, tokens, pairs, len(pairs)),
            "scores": functools.partial(joint.scores, read, tokens, mask, pairs),
            **{f"a pass, {name}": run for name, run in _runs(joint, read, tokens, mask, pairs)},
        }
        with torch.inference_mode():
            expected = sides["scores"]().float()
            off = {name: (side().float() - expected).abs().max() for name, side in sides.items()}
            if device == "cuda":
                times = {name: clock.seconds(side, args.repeats) for name, side in sides.items()}
            else:
                times = clock.in_turns(sides, args.repeats)
        for name, taken in times.items():
            rate = Repeats(tuple(len(pairs) / value for value in taken.values))
            count = operations(joint, size)
            figures[f"{num_tokens} {name}"] = {"pairs_a_second": rate, "operations": count}
            rows.append((f"{num_tokens} + {args.text_tokens}", name, rate, count, off[name].item()))
    after = peaks()
    peak = (before["bfloat16"] + after["bfloat16"]) / 2
    shown = [
        [sizes, name, str(rate), f"{rate.median * count / peak:.0%}", f"{off:.1e}"]
        for sizes, name, rate, count, off in rows
    ]
    moved = abs(after["bfloat16"] / before["bfloat16"] - 1)
    title = (
        f"Passes of at most {args.batch_tokens:,} tokens, bfloat16, {device}; the matrix rate is"
        f" {peak / 1e12:.3g} TFLOP/s and moved by {moved:.0%}"
        + (" (**unsteady**)" if moved > maxsim.STEADY else "")
    )
    header = ["tokens", "side", "pairs/s", "of the matrix rate", "off `scores` at most"]
    figures["peaks"] = {"before": before, "after": after}
    bench.add("passes", title, figures, table(header, shown))


def latency(bench: Bench, args: Any) -> None:
    """Measures the latency from a query text and cached tokens to scores, alternating the sides."""
    device, num_tokens = args.device, (args.tokens or [64])[0]
    names = _supported_paths() if device == "cpu" else ["float32", "bfloat16"]
    joints = {name: joint_encoder(args, **PATHS[name]) for name in names}
    first = joints["float32"]
    loop = plain(first, torch.float32, device)
    rows, figures = [], {}
    for depth in args.rerank_depth:
        given = random_candidates(first, num_tokens, args.text_tokens, 1, depth)
        texts, tokens, mask, pairs = given

        def by_loop(texts=texts, tokens=tokens, pairs=pairs) -> torch.Tensor:
            read = first.tokenise(texts).to(first.device)
            return loop(read, tokens.to(device), pairs.to(device), len(pairs)).cpu()

        sides: dict[str, Callable[[], torch.Tensor]] = {"plain loop, float32": by_loop}
        for name, joint in joints.items():
            sides[f"scores, {name}"] = functools.partial(
                scores_on_cpu, joint, texts, tokens, mask, pairs
            )
        with torch.inference_mode():
            taken = milliseconds(sides, args.calls)
        for name, times in taken.items():
            median, p95 = median_p95(times)
            figures[f"{depth} {name}"] = {"milliseconds": times, "median": median, "p95": p95}
            rows.append([str(depth), name, median, p95])
    title = f"One query, {num_tokens} + {args.text_tokens} tokens, {args.calls} calls each"
    columns = ["rerank depth", "path", "median, ms", "p95, ms"]
    bench.add("latency", title, figures, table(columns, rows))


def _supported_paths() -> list[str]:
    """Returns the names of the implementations that this CPU supports."""
    has = {"bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    return [name for name in PATHS if has.get(name, True)]


def _runs(
    joint: JointEncoder, read: Texts, tokens: torch.Tensor, mask: torch.Tensor, pairs: torch.Tensor
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yields functions that score all pairs: eager, compiled and, on a GPU, as a CUDA graph."""
    with torch.backends.mkldnn.flags(enabled=False):  # packed weights do not compile
        layers = joint._layers()
    assert layers is not None
    words = joint.words(read.ids)
    tokens = tokens.to(words.dtype)

    def once() -> torch.Tensor:
        return joint._optimised_logits(layers, False, read, tokens, mask, pairs, words)

    yield "eager", once
    yield "compiled", torch.compile(once)
    if tokens.is_cuda:
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # warm-up before capturing
                for _ in range(3):
                    once()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                scores = once()

        def replay() -> torch.Tensor:
            graph.replay()
            return scores

        yield "CUDA graph", replay


FIGURES: dict[str, Callable[[Bench, Any], None]] = {
    "paths": paths,
    "passes": passes,
    "latency": latency,
}


if __name__ == "__main__":
    jobs.run(main)
