"""How often an encoder tells a report from its hard negative, by each score (SMART, sec. 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.figure import Figure

from pipeline.config import SpecError
from pipeline.encoders import Encoder
from pipeline.encoders.batching import join
from pipeline.eval.significance import bootstrap_interval
from pipeline.registry import ENCODERS
from pipeline.report.plot import COLORS, REFERENCE, plain, to_png
from pipeline.schema import ITEM, Item, payload_schema
from pipeline.synthetic.binding import PANELS, SIDE, Pair
from pipeline.synthetic.binding_data import Form, payload
from pipeline.tokens import TokenBatch, unit_vectors
from pipeline.train.losses import late_scores
from pipeline.training_data.quality import pairwise

SCORES = ("single", "late", "hybrid")
#: By form, the kinds of `schema.PAYLOAD` that it can be read as.
READ_AS = {"text": ("text",), "rendered": ("image", "scan")}
#: Pairs whose tokens are held at once.
PAIRS_AT_ONCE = 4


@dataclass(frozen=True)
class Accuracy:
    """One row of the table.

    Attributes:
        score: one of `SCORES`.
        accuracy: the share of queries whose report scores higher than its hard negative.
        low, high: 95 % of the means of as many pairs drawn anew lie between these.
        ties: the share of queries that score both alike; they count as wrong.
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
    """Raises `SpecError`, for a field, if an encoder reads no reports of a form."""
    wants = set(ENCODERS.load(spec.name).wants(spec))
    if not wants & set(READ_AS[form]):
        names = [name for name, kinds in READ_AS.items() if wants & set(kinds)]
        problem = f"is not supported by the encoder {spec.name}"
        raise SpecError.unknown_name(field, form, names, problem)


def measure(
    encoder: Encoder, pairs: Sequence[Pair], form: Form, side: int = SIDE
) -> list[Accuracy]:
    """Pairwise accuracy by each score that the encoder has."""
    by_score = pair_scores(encoder, pairs, form, side)
    return [accuracy_of(scores_PQ2, form, score) for score, scores_PQ2 in by_score.items()]


def accuracy_of(scores_PQ2: torch.Tensor, form: Form, score: str) -> Accuracy:
    """Returns the row of the table for one score.

    Args:
        scores_PQ2: Scores of each pair's queries with its report and its hard negative, (P, Q, 2).
        form: Form in which the encoder reads the reports.
        score: Name of the score.
    """
    positive_PQ, negative_PQ = scores_PQ2.unbind(dim=2)
    # The queries of a pair hang together: whole pairs are what is drawn.
    of_pairs = [pairwise(*own).mean() for own in zip(positive_PQ, negative_PQ, strict=True)]
    low, high = bootstrap_interval(np.array(of_pairs))
    ties = (positive_PQ == negative_PQ).double().mean().item()
    mean = float(pairwise(positive_PQ, negative_PQ).mean())
    num_pairs, num_queries = positive_PQ.shape
    return Accuracy(form, score, mean, low, high, ties, num_pairs, num_pairs * num_queries)


def pair_scores(
    encoder: Encoder, pairs: Sequence[Pair], form: Form, side: int = SIDE
) -> dict[str, torch.Tensor]:
    """By score, (P, 25, 2) float32: each pair's queries with its report and its hard negative.

        single = <q, d> of the pooled vectors                                  (SMART, eq. 2)
        late   = the mean over query tokens of the best document token         (eq. 4)
        hybrid = single + late                                                 (eq. 5)

    An encoder without pooled vectors has the late score alone, one without token vectors of
    queries the single score alone.
    """
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in SCORES}
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        own = pairs[start : start + PAIRS_AT_ONCE]
        texts = [text for pair in own for text in pair.positive.queries]
        queries = encoder.encode_queries(texts).tokens
        documents = _documents(encoder, own, form, side)
        for number in range(len(own)):
            of_pair = queries.take(slice(number * PANELS, (number + 1) * PANELS))
            both = join(documents[2 * number : 2 * number + 2])
            for name, scores_Q2 in scores_of(of_pair, both).items():
                parts[name].append(scores_Q2.cpu())
    return {name: torch.stack(own) for name, own in parts.items() if own}


def scores_of(queries: TokenBatch, documents: TokenBatch) -> dict[str, torch.Tensor]:
    """By score, (Q, B) of queries with documents; those that there are vectors for."""
    scores = {}
    if queries.pooled is not None and documents.pooled is not None:
        scores["single"] = queries.pooled.float() @ documents.pooled.float().T
    if queries.mask.any():
        vectors = unit_vectors(documents)
        scores["late"] = late_scores(unit_vectors(queries), queries.mask, vectors, documents.mask)
    if len(scores) == 2:
        scores["hybrid"] = scores["single"] + scores["late"]
    return scores


def _documents(encoder: Encoder, pairs: Sequence[Pair], form: Form, side: int) -> list[TokenBatch]:
    """Returns the tokens of each pair's report and hard negative, in order."""
    items = []
    for number, pair in enumerate(pairs):
        for which, report in (("positive", pair.positive), ("negative", pair.negative)):
            read = payload(report, form, side)
            text = read.pop("text", None)
            if "image" in read:  # pages whose words are to be found are read as scans
                read["scan"] = read["image"]
            name = f"{number}/{which}"
            item = Item(name, name, "binding", form, "", text=text, payload=read)
            items.append(item.row())
    pictures = set(READ_AS[form]) - {"text"}
    schema = pa.schema([*ITEM, *payload_schema(sorted(pictures), encoder.wants(encoder.spec))])
    table = encoder.preparer(encoder.spec)(pa.Table.from_pylist(items, schema=schema))
    documents: dict[int, TokenBatch] = {}
    for rows, batch in encoder.encode(table):
        for place, row in enumerate(rows.tolist()):
            documents[row] = batch.take(slice(place, place + 1))
    return [documents[row] for row in range(len(items))]


def table(rows: Sequence[Accuracy]) -> list[list[str]]:
    """The rows as cells, the header first."""
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
    return [header, *cells]


def bars(rows: Sequence[Accuracy]) -> bytes:
    """The accuracies as bars with their intervals, and the line of guessing; a PNG."""
    figure = Figure(figsize=(1.6 + 0.8 * len(rows), 3.2), layout="constrained")
    panel = figure.subplots()
    places = range(len(rows))
    accuracy = np.array([row.accuracy for row in rows])
    off = [accuracy - [row.low for row in rows], [row.high for row in rows] - accuracy]
    colors = [COLORS[SCORES.index(row.score)] for row in rows]
    panel.bar(places, accuracy, 0.65, yerr=off, color=colors, ecolor=REFERENCE, capsize=4)
    panel.axhline(0.5, color=REFERENCE, linewidth=1, linestyle="dashed")
    panel.set_xticks(places, [row.score for row in rows])
    panel.set_ylim(0, 1)
    panel.set_ylabel("pairwise accuracy")
    panel.set_title(f"{rows[0].num_queries:,} queries, {rows[0].form} reports", fontsize=10)
    plain(panel)
    return to_png(figure)
