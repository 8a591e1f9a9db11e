"""SMART's benchmark of local evidence as training data, and its reports as items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from pipeline import config
from pipeline.synthetic.binding import PANELS, SIDE, SMALLEST_SIDE, Pair, Report, pair_of
from pipeline.synthetic.shapes_data import HELD_OUT, png
from pipeline.training_data.base import Batch, TrainingData, own_share
from pipeline.training_data.quality import Quality, pairwise

Form = Literal["text", "rendered"]
#: Pairs of the benchmark (SMART, section 4.1).
NUM_PAIRS = 40


class Binding(TrainingData["Binding.Spec"]):
    """An endless series of pairs of reports, of which an epoch is a part.

    A pair is two documents of a batch, the report and behind it its hard negative, to which no
    query is relevant. Its report has the fact 2 n and its hard negative 2 n + 1, with n the pair's
    number; a query has the fact of its report.
    """

    class Spec(config.ComponentSpec):
        """Which reports, and how many queries.

        Attributes:
            form: `text`, a sentence a panel; or `rendered`, a picture.
            side: pixels of a picture, in width and height.
            num_pairs: of an epoch; two documents each.
            fresh: whether each epoch has pairs of its own; else all have the same ones with the
                same queries, in another order.
            queries: of each report in a batch, of the 25 that there are.
            series: of the pairs; null: the run's seed.
            held_out: pairs on which quality is measured, with all of their queries: the first of
                the benchmark's.
        """

        name: Literal["binding"] = "binding"
        form: Form = "text"
        side: int = Field(SIDE, ge=SMALLEST_SIDE)
        num_pairs: int = Field(1600, ge=1)
        fresh: bool = True
        queries: int = Field(4, ge=1, le=PANELS)
        series: int | None = Field(None, ge=0, lt=HELD_OUT)
        held_out: int = Field(NUM_PAIRS, ge=1)

    @property
    def gives(self) -> frozenset[str]:
        """Texts or pictures."""
        return frozenset({"text" if self.spec.form == "text" else "image"})

    @property
    def repeats(self) -> bool:
        """Unless the pairs are fresh."""
        return not self.spec.fresh

    @property
    def num_batches(self) -> int:
        """Batches of an epoch; pairs that fill none are left out."""
        return self.spec.num_pairs // (self.batch_size // 2)

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Pairs with some of their queries; a pair is never spread over workers."""
        spec, pairs_a_batch = self.spec, self.batch_size // 2
        series = self.seed if spec.series is None else spec.series
        pair_N = np.arange(spec.num_pairs)
        if spec.fresh:
            pair_N += epoch * spec.num_pairs
        else:
            pair_N = pair_N[: self.num_batches * pairs_a_batch]  # in all epochs the same ones
            np.random.default_rng([self.seed, epoch]).shuffle(pair_N)
        own = own_share(pairs_a_batch, worker, num_workers)
        for batch in range(first, self.num_batches):
            start = batch * pairs_a_batch
            numbers = pair_N[start : start + pairs_a_batch][own].tolist()
            # By pair, so that neither the number of workers nor the order changes them.
            panels = [
                np.random.default_rng([self.seed, number])
                .permutation(PANELS)[: spec.queries]
                .tolist()
                for number in numbers
            ]
            pairs = [pair_of(series, number) for number in numbers]
            yield batch_of(pairs, panels, spec.form, spec.side)

    def held_out(self) -> Batch:
        """The benchmark's pairs with all of their queries."""
        pairs = evaluation_pairs(self.spec.held_out)
        return batch_of(pairs, [range(PANELS)] * len(pairs), self.spec.form, self.spec.side)

    def quality(self, scores_QB: torch.Tensor, held_out: Batch) -> Quality:
        """Pairwise accuracy: each query ranks its report and the hard negative alone."""
        facts_B = held_out.document_facts[:, 0]
        column = {fact: place for place, fact in enumerate(facts_B.tolist())}
        facts_Q = held_out.query_facts[:, 0].tolist()
        rows = torch.arange(len(facts_Q))
        positive_Q, negative_Q = (
            scores_QB[rows, [column[fact + behind] for fact in facts_Q]] for behind in (0, 1)
        )
        return {"pairwise_accuracy": pairwise(positive_Q, negative_Q)}


def evaluation_pairs(count: int = NUM_PAIRS, seed: int = 0) -> list[Pair]:
    """The pairs of the benchmark, on which nothing is trained."""
    return [pair_of(HELD_OUT + seed, number) for number in range(count)]


def payload(report: Report, form: Form, side: int = SIDE) -> dict[str, Any]:
    """What an encoder reads of a report, see `schema.PAYLOAD`."""
    if form == "text":
        return {"text": report.text}
    return {"image": png(report.picture(side))}


def batch_of(
    pairs: Sequence[Pair], panels: Sequence[Sequence[int]], form: Form, side: int = SIDE
) -> Batch:
    """Returns pairs as a batch of training data.

    Args:
        pairs: Pairs of a report and its hard negative.
        panels: For each pair the numbers of the panels with a query.
        form: Form in which the encoder reads the reports.
        side: Width and height of a rendered report, in pixels.
    """
    reports = [report for pair in pairs for report in (pair.positive, pair.negative)]
    numbers = np.array([pair.positive.layout[1] for pair in pairs])
    how = form if form == "text" else f"{form} {side}"
    keys = [
        f"binding {how}/{series}/{number}/{which}"
        for series, number in (pair.positive.layout for pair in pairs)
        for which in ("positive", "negative")
    ]
    return Batch(
        [pair.positive.queries[p] for pair, own in zip(pairs, panels, strict=True) for p in own],
        [payload(report, form, side) for report in reports],
        keys,
        torch.from_numpy(np.repeat(2 * numbers, [len(own) for own in panels])[:, None]),
        torch.from_numpy((2 * numbers[:, None] + [0, 1]).reshape(-1, 1)),
    )
