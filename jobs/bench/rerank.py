"""Reranking by the joint encoder beside a plain Hugging Face loop: pairs a second, and latency.

    python -m jobs.bench rerank
    python -m jobs.bench rerank --latency
    python -m jobs.bench rerank --model bundled --out figures.json
    python -m jobs.bench rerank --device cuda                # on a GPU; needs no Ray, no Lance
    python -m jobs.bench rerank --study jobs/specs/training/studies/edje_tokens.yaml --tokens 196

The model has the shape of MiniLM-L12-H384 and random weights, unless `--model` names another; what
pairs read is random too. `paths`, of a CPU: `JointEncoder.scores` by each path, with the deviation
of its scores from the loop's in float64. `passes`, of a GPU: a pass in bfloat16, of 64 tokens an
item and of the local variant's 576, eager, compiled and as a CUDA graph. `latency`: one query,
its text read too. The plain loop repeats a query's text for each pair and pads. `--study`: of EDJEs
that were trained, quality, bytes and latency by their tokens (the paper's Figure 4 and Table 2).
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
from jobs.bench import maxsim, maxsim_gpu
from jobs.bench.harness import Bench, Repeats, parse_on_device, table
from jobs.bench.rerank_run import median_p95, milliseconds, random_candidates, scores_on_cpu
from pipeline.config import SpecError, parse
from pipeline.rerank.joint import JointEncoder, Texts, _Layers

WORDS = 30522
#: Wider than BERT begins with, so that scores differ as those of a trained model do.
SPREAD = 0.05
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: How `scores` is computed on a CPU: what changes in the spec.
PATHS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantise": "int8"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and takes the figures."""
    on_gpu = torch.cuda.is_available()
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="default: by the device")
    parser.add_argument("--latency", action="store_true", help="the same as --only latency")
    parser.add_argument("--study", metavar="SPEC", help="of EDJEs that jobs.train has trained")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="of `--study`")
    parser.add_argument("--model", help="as the spec's `model`; default: the shape, at random")
    parser.add_argument("--layers", type=jobs.positive, default=12, help="of the shape")
    parser.add_argument(
        "--tokens", type=jobs.positive, nargs="+", help="of an item; of a study's local EDJEs"
    )
    parser.add_argument("--text-tokens", type=jobs.positive, default=16)
    parser.add_argument("--queries", type=jobs.positive, default=4, help="of `paths`")
    parser.add_argument("--rerank-depth", type=jobs.positive, nargs="+", default=[10, 64])
    parser.add_argument("--batch-tokens", type=jobs.positive, default=1 << 17, help="of `passes`")
    parser.add_argument("--calls", type=jobs.positive, default=30, help="of `latency`")
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
        from jobs.bench.rerank_study import study  # it needs what training needs

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
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    named = {f"{name.strip('[]').lower()}_token": name for name in special}
    PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained(folder)
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
    """The joint encoder of a path, with a head that is the same for all."""
    joint = JointEncoder(parse(JointEncoder.Spec, {"model": args.model, **changes}), 1).eval()
    torch.manual_seed(1)
    match = torch.nn.Linear(joint.match.in_features, 1)
    joint.match.load_state_dict(match.state_dict())
    return joint.requires_grad_(False)


def plain(
    joint: JointEncoder, dtype: torch.dtype, device: str
) -> Callable[[Texts, torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """Returns a scoring loop as one writes it with transformers: the model and a linear layer.

    Args:
        joint: Joint encoder whose weights the loop copies.
        dtype: Data type of weights and activations.
        device: Device of the model.
    """
    language = copy.deepcopy(joint.language).eval().to(device, dtype)
    model, embedding = language.base_model, language.get_input_embeddings()
    head = torch.nn.Linear(joint.match.in_features, 1, dtype=dtype, device=device)
    head.load_state_dict(joint.match.state_dict())

    @torch.inference_mode()
    def scores(
        texts: Texts, tokens: torch.Tensor, pairs: torch.Tensor, at_once: int
    ) -> torch.Tensor:
        found, num_vision = [], tokens.shape[1]
        for text_P, item_P in (part.unbind(1) for part in pairs.split(at_once)):
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
    """Of a pair of so many tokens in all, multiplications and additions, as `scores` needs them."""
    own = joint.language.config
    wide, inner, layers = own.hidden_size, own.intermediate_size, own.num_hidden_layers
    qkv = 2 * 3 * wide**2 * num_tokens
    of_place = 2 * (wide**2 + 2 * wide * inner) + 4 * wide * num_tokens  # the last layer has one
    return layers * qkv + ((layers - 1) * num_tokens + 1) * of_place


def ranks_agree(scores: torch.Tensor, reference: torch.Tensor, depth: int) -> float:
    """Spearman's correlation of the orders of a query's candidates, the mean over queries."""
    both = [one.double().view(-1, depth).argsort(1).argsort(1) for one in (scores, reference)]
    found = [torch.corrcoef(torch.stack(pair).double())[0, 1] for pair in zip(*both, strict=True)]
    return torch.stack(found).mean().item()


# -- figures -----------------------------------------------------------------------------------


def paths(bench: Bench, args: Any) -> None:
    """Pairs a second on a CPU by each path, beside the plain loop, and how far scores are off."""
    num_tokens = (args.tokens or [64])[0]
    depth = args.rerank_depth[0] if len(args.rerank_depth) == 1 else 16
    joints = {name: joint_encoder(args, **PATHS[name]) for name in _there()}
    first = joints["float32"]
    size = num_tokens + args.text_tokens
    texts, tokens, mask, pairs = random_candidates(
        first, num_tokens, args.text_tokens, args.queries, depth
    )
    read = first.read(texts)
    wide = tokens.float()
    loops = {name: plain(first, TYPES[name], "cpu") for name in TYPES if name in joints}
    exact = plain(first, torch.float64, "cpu")(read, tokens.double(), pairs, len(pairs))
    few = max(2048 // size, 1)  # as many tokens as a pass of ours
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
    """Pairs a second of one pass in bfloat16, and the share of the machine's matrix rate."""
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
        read = joint.read(texts).to(joint.device)
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
    """Milliseconds from a query's text and its candidates' cached tokens to scores, in turn."""
    device, num_tokens = args.device, (args.tokens or [64])[0]
    names = _there() if device == "cpu" else ["float32", "bfloat16"]
    joints = {name: joint_encoder(args, **PATHS[name]) for name in names}
    first = joints["float32"]
    loop = plain(first, torch.float32, device)
    rows, figures = [], {}
    for depth in args.rerank_depth:
        given = random_candidates(first, num_tokens, args.text_tokens, 1, depth)
        texts, tokens, mask, pairs = given

        def by_loop(texts=texts, tokens=tokens, pairs=pairs) -> torch.Tensor:
            read = first.read(texts).to(first.device)
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


def _there() -> list[str]:
    """The paths that this CPU has."""
    has = {"bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    return [name for name in PATHS if has.get(name, True)]


def _runs(
    joint: JointEncoder, read: Texts, tokens: torch.Tensor, mask: torch.Tensor, pairs: torch.Tensor
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """A pass over all pairs: eager, compiled, and as a CUDA graph where there is CUDA."""
    with torch.backends.mkldnn.flags(enabled=False):  # as on a GPU: packed weights do not compile
        layers = _Layers(joint.language.base_model, in_int8=False)
    words = joint.words(read.ids)
    tokens = tokens.to(words.dtype)

    def once() -> torch.Tensor:
        return joint._fast(layers, False, read, tokens, mask, pairs, words)

    yield "eager", once
    yield "compiled", torch.compile(once)
    if tokens.is_cuda:
        with torch.inference_mode():
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):  # as capturing asks: what is made at first is there
                for _ in range(3):
                    once()
            torch.cuda.current_stream().wait_stream(beside)
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
