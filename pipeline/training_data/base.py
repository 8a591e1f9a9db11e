"""What contrastive objectives are trained on: queries and documents, and which are relevant.

Relevance is worked out of `facts`, whole numbers about each query and document, so that it is known
for all pairs of a batch, also between those of different workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
import torch

from pipeline.config import ComponentSpec, ComponentSpecT
from pipeline.training_data.quality import Quality, ranking

#: Facts of nothing: documents and queries that only fill up a batch.
NOTHING = -1


@dataclass(frozen=True)
class Phrases:
    """Phrases with the boxes of what they mean, to measure grounding by (SaMer, appendix C).

    Attributes:
        texts: P phrases.
        documents: the row of each phrase's document in its batch.
        boxes: for each phrase (M, 4) boxes x0 y0 x1 y1 as shares of the picture.
    """

    texts: Sequence[str]
    documents: Sequence[int]
    boxes: Sequence[np.ndarray]


@dataclass(frozen=True)
class Batch:
    """One worker's queries and documents of a step.

    Attributes:
        queries: texts.
        documents: items as an encoder reads them, see `schema.PAYLOAD`.
        document_keys: of each document a name of its own among all documents of the data.
        query_facts: (Q, F) int64.
        document_facts: (B, G) int64.
        boxes: for each document the boxes (M, 4) of its annotated objects, x0 y0 x1 y1 as shares of
            the picture. Or None.
        teacher: (Q, B) float32 scores of another model, NaN where there is none. Or None.
        phrases: to measure grounding by. Or None.
    """

    queries: Sequence[str]
    documents: Sequence[Mapping[str, Any]]
    document_keys: Sequence[str]
    query_facts: torch.Tensor
    document_facts: torch.Tensor
    boxes: Sequence[np.ndarray] | None = None
    teacher: torch.Tensor | None = None
    phrases: Phrases | None = None


class TrainingData(ABC, Generic[ComponentSpecT]):
    """Where batches come from. Subclasses carry a nested `Spec`.

    The batches of an epoch depend on the spec, the seed and the epoch alone, so that a run that
    goes on from a checkpoint sees what the unbroken one would have seen.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT

    #: Keys of documents of which nothing but the key is needed: what costs much is not read again.
    known: Container[str] = frozenset()
    #: Whether those are all that can be read.
    knows_all = False

    def __init__(self, spec: ComponentSpecT, *, batch_size: int, seed: int):
        self.spec, self.batch_size, self.seed = spec, batch_size, seed

    @property
    def repeats(self) -> bool:
        """Whether all epochs have the same queries and documents, in whatever order."""
        return True

    @property
    def gives(self) -> frozenset[str]:
        """What documents are, kinds of `schema.PAYLOAD`; nothing: that is not known."""
        return frozenset()

    @property
    def has_teacher(self) -> bool:
        """Whether batches have scores of another model."""
        return False

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Batches of an epoch."""

    @abstractmethod
    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """One worker's share of the batches of an epoch, from number `first` on.

        All workers have equally many batches; `batch_size` counts over all of them.
        """

    def everything(self, worker: int, num_workers: int) -> Iterator[Batch]:
        """One worker's share of all queries and documents that epochs have, if they repeat.

        Here those of the first epoch: data that leave out others in each have more.
        """
        return self.batches(0, 0, worker, num_workers)

    def validation(self) -> Batch | None:
        """Returns the validation data as one batch, or None."""
        return None

    @staticmethod
    def relevant(query_facts: torch.Tensor, document_facts: torch.Tensor) -> torch.Tensor:
        """(Q, B) bool: which documents are relevant to which queries.

        By default a query's facts are the numbers of its positives, `NOTHING` where it has fewer
        than others, and a document has its number as its only fact.

        >>> TrainingData.relevant(torch.tensor([[7, -1], [8, 7]]), torch.tensor([[7], [9], [-1]]))
        tensor([[ True, False, False],
                [ True, False, False]])
        """
        same_QBF = query_facts.unsqueeze(1) == document_facts.unsqueeze(0)
        return (same_QBF & (document_facts != NOTHING)).any(dim=2)

    def quality(self, scores_QB: torch.Tensor, validation: Batch) -> Quality:
        """Computes metrics on the validation data; the first one selects the best model.

        By default R@1, R@5, R@10 and nDCG@10 among all validation documents.

        Args:
            scores_QB: Scores of all validation queries and documents.
            validation: The validation data.
        """
        device = scores_QB.device
        facts = validation.query_facts.to(device), validation.document_facts.to(device)
        return ranking(scores_QB, self.relevant(*facts))


def own_share(count: int, worker: int, num_workers: int) -> slice:
    """The part of `count` rows that is a worker's, in order.

    >>> own_share(8, 1, 2)
    slice(4, 8, None)
    """
    each = count // num_workers
    return slice(worker * each, (worker + 1) * each)
