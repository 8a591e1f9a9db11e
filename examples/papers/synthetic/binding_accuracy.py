"""Accuracy of encoders on pairs of reports and hard negatives, by score (SMART, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.figure import Figure

from examples.papers.synthetic.binding import PANELS, SIDE, Pair
from examples.papers.synthetic.binding_data import Form, payload
from pipeline.config import SpecError
from pipeline.encoders import Encoder
from pipeline.encoders.batching import concatenate
from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style, to_png
from pipeline.eval.significance import bootstrap_interval
from pipeline.registry import ENCODERS
from pipeline.runtime.text import Table
from pipeline.schema import ITEM, Item, payload_schema
from pipeline.search.scores import Score
from pipeline.tokens import TokenBatch, unit_vectors
from pipeline.train.data.quality import pairwise
from pipeline.train.losses import late_scores

#: Scores in the order of the table.
SCORES: tuple[Score, ...] = ("single_vector", "maxsim", "hybrid")
#: Kinds of `schema.PAYLOAD` that represent each form.
PAYLOAD_KINDS = {"text": ("text",), "rendered": ("image", "scan")}
#: Number of pairs whose tokens are in memory at a time.
PAIRS_PER_BLOCK = 4


@dataclass(frozen=True)
class Accuracy:
    """Row of the table.

    Attributes:
        score: One of `SCORES`.
        accuracy: Fraction of queries whose report scores higher than the hard negative.
        low: Lower bound of the 95 % bootstrap confidence interval over pairs.
        high: Upper bound of the interval.
        ties: Fraction of queries with equal scores, which count as incorrect.
    """

    form: Form
    score: str
    accuracy: float
    low: float
    high: float
    ties: float
    num_pairs: int
    num_queries: int


def check_form(spec: Any, form: Form, field: str = "--form") -> None:
    """Raises `SpecError` for `field` if an encoder does not support a form."""
    wants = set(ENCODERS.load(spec.name).supported_inputs(spec))
    if not wants & set(PAYLOAD_KINDS[form]):
        names = [name for name, kinds in PAYLOAD_KINDS.items() if wants & set(kinds)]
        problem = f"is not supported by the encoder {spec.name}"
        raise SpecError.unknown_name(field, form, names, problem)


def measure(
    encoder: Encoder, pairs: Sequence[Pair], form: Form, side: int = SIDE
) -> list[Accuracy]:
    """Measures the pairwise accuracy under all scores that the encoder supports."""
    by_score = pair_scores(encoder, pairs, form, side)
    return [summarise(scores_PQ2, form, score) for score, scores_PQ2 in by_score.items()]


def summarise(scores_PQ2: torch.Tensor, form: Form, score: str) -> Accuracy:
    """Returns the row of a score from the scores with report and hard negative, (P, Q, 2)."""
    positive_PQ, negative_PQ = scores_PQ2.unbind(dim=2)
    # Queries of a pair are correlated, so the bootstrap resamples pairs.
    pair_means = [pairwise(*scores).mean() for scores in zip(positive_PQ, negative_PQ, strict=True)]
    low, high = bootstrap_interval(np.array(pair_means))
    ties = (positive_PQ == negative_PQ).double().mean().item()
    mean = float(pairwise(positive_PQ, negative_PQ).mean())
    num_pairs, num_queries = positive_PQ.shape
    return Accuracy(form, score, mean, low, high, ties, num_pairs, num_pairs * num_queries)


def pair_scores(
    encoder: Encoder, pairs: Sequence[Pair], form: Form, side: int = SIDE
) -> dict[str, torch.Tensor]:
    """Computes the scores of the queries of each pair with its report and hard negative.

        single_vector = <q, d> of the pooled vectors                                (SMART, eq. 2)
        maxsim        = mean over query tokens of the maximum over document tokens  (eq. 4)
        hybrid        = single_vector + maxsim                                      (eq. 5)

    Encoders without pooled vectors have only the score "maxsim". Encoders without token vectors of
    queries have only "single_vector".

    Returns:
        Scores (P, 25, 2) float32 by name.
    """
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in SCORES}
    for start in range(0, len(pairs), PAIRS_PER_BLOCK):
        block = pairs[start : start + PAIRS_PER_BLOCK]
        texts = [text for pair in block for text in pair.positive.queries]
        queries = encoder.encode_queries(texts).tokens
        documents = _documents(encoder, block, form, side)
        for number in range(len(block)):
            pair_queries = queries.take(slice(number * PANELS, (number + 1) * PANELS))
            pair_documents = concatenate(documents[2 * number : 2 * number + 2])
            for name, scores_Q2 in compute_scores(pair_queries, pair_documents).items():
                parts[name].append(scores_Q2.cpu())
    return {name: torch.stack(blocks) for name, blocks in parts.items() if blocks}


def compute_scores(queries: TokenBatch, documents: TokenBatch) -> dict[str, torch.Tensor]:
    """Computes the scores (Q, B) by name, for the vectors that are available."""
    scores = {}
    if queries.pooled is not None and documents.pooled is not None:
        scores["single_vector"] = queries.pooled.float() @ documents.pooled.float().T
    if queries.mask.any():
        vectors = unit_vectors(documents)
        scores["maxsim"] = late_scores(unit_vectors(queries), queries.mask, vectors, documents.mask)
    if len(scores) == 2:
        scores["hybrid"] = scores["single_vector"] + scores["maxsim"]
    return scores


def _documents(encoder: Encoder, pairs: Sequence[Pair], form: Form, side: int) -> list[TokenBatch]:
    items = []
    for number, pair in enumerate(pairs):
        for role, report in (("positive", pair.positive), ("negative", pair.negative)):
            columns = payload(report, form, side)
            text = columns.pop("text", None)
            if "image" in columns:  # encoders with OCR read scans
                columns["scan"] = columns["image"]
            name = f"{number}/{role}"
            item = Item(name, name, "binding", form, "", text=text, payload=columns)
            items.append(item.row())
    kinds = set(PAYLOAD_KINDS[form]) - {"text"}
    schema = pa.schema(
        [*ITEM, *payload_schema(sorted(kinds), encoder.supported_inputs(encoder.spec))]
    )
    table = encoder.preprocessor(encoder.spec)(pa.Table.from_pylist(items, schema=schema))
    documents: dict[int, TokenBatch] = {}
    for rows, batch in encoder.encode(table):
        for position, row in enumerate(rows.tolist()):
            documents[row] = batch.take(slice(position, position + 1))
    return [documents[row] for row in range(len(items))]


def table(rows: Sequence[Accuracy]) -> Table:
    """Formats the rows."""
    header = ["form", "score", "accuracy", "low", "high", "ties", "pairs", "queries"]
    cells = [
        [
            row.form,
            row.score,
            *(f"{value:.4f}" for value in (row.accuracy, row.low, row.high, row.ties)),
            str(row.num_pairs),
            str(row.num_queries),
        ]
        for row in rows
    ]
    return Table([header, *cells])


def bars(rows: Sequence[Accuracy]) -> bytes:
    """Plots the accuracies with confidence intervals and the chance level as a PNG."""
    figure = Figure(figsize=(1.6 + 0.8 * len(rows), 3.2), layout="constrained")
    panel = figure.subplots()
    positions = range(len(rows))
    accuracy = np.array([row.accuracy for row in rows])
    errors = [accuracy - [row.low for row in rows], [row.high for row in rows] - accuracy]
    colors = [COLORS[SCORES.index(row.score)] for row in rows]
    panel.bar(positions, accuracy, 0.65, yerr=errors, color=colors, ecolor=REFERENCE, capsize=4)
    panel.axhline(0.5, color=REFERENCE, linewidth=1, linestyle="dashed")
    panel.set_xticks(positions, [row.score for row in rows])
    panel.set_ylim(0, 1)
    panel.set_ylabel("pairwise accuracy")
    panel.set_title(f"{rows[0].num_queries:,} queries, {rows[0].form} reports", fontsize=10)
    apply_style(panel)
    return to_png(figure)
