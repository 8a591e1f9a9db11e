"""Inputs and timing shared by the benchmarks of reranking."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from pipeline.encoders.edje.joint import JointEncoder
from tests.bench import maxsim


def random_candidates(
    joint: JointEncoder, num_tokens: int, num_text: int, num_queries: int, depth: int
) -> tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns texts, cached tokens (B, V, dim) in float16, their mask, and all pairs of both."""
    torch.manual_seed(2)
    words = joint.language.config.vocab_size
    rare = min(1000, words // 4)  # rare words at both ends of the vocabulary
    ids = torch.randint(rare, words - rare, (num_queries, num_text - 2))
    texts = [" ".join(joint.tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist()]
    num_items = num_queries * depth
    tokens = torch.randn(num_items, num_tokens, joint.dim) * joint._words.weight.float().std().cpu()
    mask = torch.ones(num_items, num_tokens, dtype=torch.bool)
    rows = torch.arange(num_items)
    return texts, tokens.half(), mask, torch.stack([rows // depth, rows], dim=1)


def scores_on_cpu(
    joint: JointEncoder,
    texts: Sequence[str],
    tokens: torch.Tensor,
    mask: torch.Tensor,
    pairs: torch.Tensor,
) -> torch.Tensor:
    """Computes scores of pairs (P,) and copies them to the CPU, which waits for the GPU to finish.

    Args:
        tokens: Cached tokens of the items, (B, V, dim).
        mask: Real tokens of the items, (B, V).
        pairs: Rows of the text and of the item of each pair, (P, 2).
    """
    return joint.scores(texts, tokens, mask, pairs).cpu()


def milliseconds(sides: Mapping[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
    """Measures the milliseconds per call of each side in turn, after two warm-up calls."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(calls + 2):
        for name, side in sides.items():
            seconds = maxsim.seconds_of(side)
            if number >= 2:
                taken[name].append(1e3 * seconds)
    return taken


def median_p95(times: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the 95th percentile of some times."""
    return statistics.median(times), sorted(times)[max(-(-95 * len(times) // 100) - 1, 0)]
