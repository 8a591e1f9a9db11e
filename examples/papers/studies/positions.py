"""Use of the stored vectors of trained models, by position (AGC paper, figure 3)."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from examples.papers.studies.study import Run, StudySpec
from pipeline.config import SpecError
from pipeline.eval.diagnostics import (
    inter_token_similarity,
    matching_strength,
    strength_profile,
)
from pipeline.registry import LEARNERS
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.text import Table
from pipeline.tokens import TokenBatch
from pipeline.train.checkpoints import Checkpoints
from pipeline.train.compressors import compressor_label
from pipeline.train.contrastive import Contrastive
from pipeline.train.data.base import Batch, TrainingData
from pipeline.train.data.quality import relevant_matches
from pipeline.train.learner import Embedded
from pipeline.train.loop import check


class Positions(NamedTuple):
    """Use of the stored vectors of a row of a study, by position.

    Attributes:
        strengths: (N,) matching strength of each position, averaged over query positions.
        similarity: (R, R) mean cosine between positions, or between runs of adjacent positions.
        mean_similarity: Mean cosine between two vectors of a document, or None with one vector.
    """

    strengths: np.ndarray
    similarity: np.ndarray
    mean_similarity: float | None

    @property
    def largest_share(self) -> float:
        """Share of the strongest tenth of the positions, at least one, in the total strength."""
        strengths = np.sort(np.clip(self.strengths, 0, None))[::-1]
        count = max(1, len(strengths) // 10)
        return float(strengths[:count].sum() / max(strengths.sum(), np.finfo(float).tiny))


def report(spec: StudySpec, runs: Sequence[Run], names: Sequence[str] = ()) -> str:
    """Writes `positions.csv` and `positions.png` to the output folder and returns the table.

    The first run of a row represents it. `names` are those of rows; empty for all of them.
    """
    from pipeline.eval.report.plot import to_png  # matplotlib is an extra
    from pipeline.eval.report.utilisation import Profile, utilisation_figure

    found = positions_of(runs, names)
    profiles = [
        Profile(name, len(row.strengths), strength_profile(row.strengths[:, None]), row.similarity)
        for name, row in found.items()
    ]
    header = ["run", "positions", "strongest tenth", "mean cosine"]
    cells = [
        [name, len(row.strengths), row.largest_share, row.mean_similarity]
        for name, row in found.items()
    ]
    write_atomic(posixpath.join(spec.output, "positions.csv"), Table([header, *cells]).csv())
    write_atomic(posixpath.join(spec.output, "positions.png"), to_png(utilisation_figure(profiles)))
    shown = [
        [str(name), str(count), *("-" if v is None else f"{v:.3f}" for v in values)]
        for name, count, *values in cells
    ]
    return Table([header, *shown]).text()


def positions_of(runs: Sequence[Run], names: Sequence[str] = ()) -> dict[str, Positions]:
    """Returns the use of the vectors by row. See `report`."""
    first_runs: dict[str, Run] = {}
    for run in runs:
        first_runs.setdefault(run.row, run)
    rows = {name: _labels(run) for name, run in first_runs.items()}
    valid = [name for labels in rows.values() for name in labels]
    for name in names:
        if name not in valid:
            raise SpecError.unknown_name("--row", name, valid, "is not a row of the study")
    wanted = names or valid
    found: dict[str, Positions] = {}
    for row, run in first_runs.items():
        if selected := {name: label for name, label in rows[row].items() if name in wanted}:
            by_label, batch, data = _embedded(run)
            for name, label in selected.items():
                found[name] = positions(by_label[label], batch, data)
    return {name: found[name] for name in wanted}


def positions(embedded: Embedded, batch: Batch, data: TrainingData) -> Positions:
    """Computes the use of the vectors of the documents of a batch."""
    queries, documents = (
        TokenBatch(embedded[f"{name}_vectors"], embedded[f"{name}_mask"], True)
        for name in ("query", "document")
    )
    relevant_QB = data.relevant(batch.query_labels, batch.document_labels)
    matches, packed = relevant_matches(queries, documents, relevant_QB)
    relevant_rows = relevant_QB.cpu().any(dim=0)
    longest = int((packed.lengths * relevant_rows).max())
    strength_NQ = matching_strength(matches, longest)
    similarity = inter_token_similarity(packed, np.arange(len(packed)))
    return Positions(strength_NQ.mean(axis=1), similarity.map, similarity.mean)


def _labels(run: Run) -> dict[str, str]:
    """Returns the labels of the compressors of a run by the name of their row."""
    others = getattr(run.spec.learner, "validation_compressors", ())
    labels = map(compressor_label, others)
    return {run.row: "", **{f"{run.row} > {label}": label for label in labels}}


@torch.no_grad()
def _embedded(run: Run) -> tuple[dict[str, Embedded], Batch, TrainingData]:
    """Returns the embeddings of the validation data by the trained model, batch and data."""
    spec = run.spec
    data = check(spec)
    learner = LEARNERS.build(spec.learner)
    if not isinstance(learner, Contrastive) or learner.spec.score == "single_vector":
        rule = "contrastive with a MaxSim score, for the use of token vectors"
        raise SpecError("learner.name", spec.learner.name, rule)
    checkpoints = Checkpoints(spec)
    if not checkpoints.restore_weights(learner):
        rule = "the output folder of a trained run"
        raise SpecError("output", spec.output, rule, "has no checkpoint")
    batch = data.validation()
    if batch is None:
        raise SpecError("data.validation", None, "a share or files, for the use of vectors")
    learner.prepare(data)
    learner.eval()
    inputs = dataclasses.replace(learner.read(batch), boxes=None)  # as in the evaluation
    return learner.embedded(inputs), batch, data
