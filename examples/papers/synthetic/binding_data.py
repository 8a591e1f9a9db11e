"""Training data of the local-evidence benchmark of SMART."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from examples.papers.synthetic import BINDING
from examples.papers.synthetic.binding import MIN_SIDE, PANELS, SIDE, Pair, Report, generate_pair
from examples.papers.synthetic.shapes_data import VALIDATION_SERIES, png
from pipeline import config
from pipeline.train.data.base import Batch, TrainingData, worker_slice
from pipeline.train.data.quality import Quality, pairwise

Form = Literal["text", "rendered"]
#: Number of pairs in the benchmark (SMART, section 4.1).
NUM_PAIRS = 40


class Binding(TrainingData["Binding.Spec"]):
    """Infinite series of pairs of reports. Each epoch uses a section of it.

    A pair contributes two documents to a batch: the report, and directly after it the hard
    negative, which is not relevant to any query. The report of pair n has the label 2 n, and its
    hard negative has the label 2 n + 1. Queries have the label of their report.
    """

    class Spec(config.ComponentSpec):
        """Options of `Binding`."""

        name: str = BINDING
        form: Form = "text"
        """Form of the reports: "text" has one sentence per panel. "rendered" is an image."""
        side: int = Field(SIDE, ge=MIN_SIDE)
        """Width and height of rendered reports, in pixels."""
        num_pairs: int = Field(1600, ge=1)
        """Number of pairs per epoch, with two documents each."""
        fresh: bool = True
        """Whether each epoch uses new pairs. Otherwise all epochs use the same pairs and queries in
        a different order."""
        queries: int = Field(4, ge=1, le=PANELS)
        """Number of queries per report in a batch, of 25."""
        series: int | None = Field(None, ge=0, lt=VALIDATION_SERIES)
        """Series of the pairs. Defaults to the seed of the run."""
        validation: int = Field(NUM_PAIRS, ge=1)
        """Number of validation pairs, the first pairs of the benchmark with all their queries."""

    @property
    def payload_kinds(self) -> frozenset[str]:
        """Kinds of payload: text or images."""
        return frozenset({"text" if self.spec.form == "text" else "image"})

    @property
    def repeats(self) -> bool:
        """True if all epochs have the same pairs."""
        return not self.spec.fresh

    @property
    def num_batches(self) -> int:
        """Number of complete batches per epoch."""
        return self.spec.num_pairs // (self.batch_size // 2)

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields pairs with a sample of their queries. A pair is never split between workers."""
        spec, pairs_per_batch = self.spec, self.batch_size // 2
        series = self.seed if spec.series is None else spec.series
        pair_N = np.arange(spec.num_pairs)
        if spec.fresh:
            pair_N += epoch * spec.num_pairs
        else:
            pair_N = pair_N[: self.num_batches * pairs_per_batch]  # same pairs in all epochs
            np.random.default_rng([self.seed, epoch]).shuffle(pair_N)
        worker_pairs = worker_slice(pairs_per_batch, worker, num_workers)
        for batch in range(first, self.num_batches):
            start = batch * pairs_per_batch
            numbers = pair_N[start : start + pairs_per_batch][worker_pairs].tolist()
            # Seeds per pair make queries independent of the number of workers and the order.
            panels = [
                np.random.default_rng([self.seed, number])
                .permutation(PANELS)[: spec.queries]
                .tolist()
                for number in numbers
            ]
            pairs = [generate_pair(series, number) for number in numbers]
            yield make_batch(pairs, panels, spec.form, spec.side)

    def validation(self) -> Batch:
        """Returns the pairs of the benchmark with all of their queries."""
        pairs = evaluation_pairs(self.spec.validation)
        return make_batch(pairs, [range(PANELS)] * len(pairs), self.spec.form, self.spec.side)

    def quality(self, scores_QB: torch.Tensor, validation: Batch) -> Quality:
        """Computes the pairwise accuracy of each query between its report and the hard negative."""
        facts_B = validation.document_labels[:, 0]
        column = {fact: index for index, fact in enumerate(facts_B.tolist())}
        facts_Q = validation.query_labels[:, 0].tolist()
        rows = torch.arange(len(facts_Q))
        positive_Q, negative_Q = (
            scores_QB[rows, [column[fact + offset] for fact in facts_Q]] for offset in (0, 1)
        )
        return {"pairwise_accuracy": pairwise(positive_Q, negative_Q)}


def evaluation_pairs(count: int = NUM_PAIRS, seed: int = 0) -> list[Pair]:
    """Returns the benchmark pairs, which are never used for training."""
    return [generate_pair(VALIDATION_SERIES + seed, number) for number in range(count)]


def payload(report: Report, form: Form, side: int = SIDE) -> dict[str, Any]:
    """Returns the payload columns of a report, see `schema.PAYLOAD`."""
    if form == "text":
        return {"text": report.text}
    return {"image": png(report.render(side))}


def make_batch(
    pairs: Sequence[Pair], panels: Sequence[Sequence[int]], form: Form, side: int = SIDE
) -> Batch:
    """Builds a batch of pairs; `panels` are the indices of those with a query, for each pair."""
    reports = [report for pair in pairs for report in (pair.positive, pair.negative)]
    numbers = np.array([pair.positive.layout[1] for pair in pairs])
    variant = form if form == "text" else f"{form} {side}"
    keys = [
        f"binding {variant}/{series}/{number}/{role}"
        for series, number in (pair.positive.layout for pair in pairs)
        for role in ("positive", "negative")
    ]
    return Batch(
        [
            pair.positive.queries[p]
            for pair, chosen in zip(pairs, panels, strict=True)
            for p in chosen
        ],
        [payload(report, form, side) for report in reports],
        keys,
        torch.from_numpy(np.repeat(2 * numbers, [len(chosen) for chosen in panels])[:, None]),
        torch.from_numpy((2 * numbers[:, None] + [0, 1]).reshape(-1, 1)),
    )
