"""Interface of training data, which yield batches of queries and documents with labels.

The relevance of a document to a query is derived from integer labels of both. It is therefore known
for all pairs of a batch, including those on different workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import numpy as np

from pipeline.config import ComponentSpec, ComponentSpecT

if TYPE_CHECKING:  # imported lazily, because the sources of published collections need no torch
    import torch

    from pipeline.train.data.quality import Quality

#: Label of padding documents and queries.
NO_LABEL = -1


@dataclass(frozen=True)
class Phrases:
    """Phrases with boxes, to measure grounding (SaMer, appendix C).

    Attributes:
        texts: Phrases (P).
        documents: Row of each phrase's document in its batch (P).
        boxes: Boxes (M, 4) of each phrase, x0 y0 x1 y1 relative to the image size (P).
    """

    texts: Sequence[str]
    documents: Sequence[int]
    boxes: Sequence[np.ndarray]


@dataclass(frozen=True)
class Batch:
    """Queries and documents that one worker processes in one step.

    Attributes:
        queries: Query texts (Q).
        documents: Documents (B) as encoder inputs. See `schema.PAYLOAD`.
        document_keys: Key of each document (B), unique within the data.
        query_labels: Relevance labels of the queries (Q, F) int64.
        document_labels: Relevance labels of the documents (B, G) int64.
        boxes: Boxes (M, 4) of the annotated objects of each document, x0 y0 x1 y1 relative to the
            image size, or None.
        teacher: Scores of a teacher model for the documents of all workers in rank order,
            (Q, workers * B) float32, NaN where unknown, or None.
        phrases: Phrases to measure grounding, or None.
    """

    queries: Sequence[str]
    documents: Sequence[Mapping[str, Any]]
    document_keys: Sequence[str]
    query_labels: torch.Tensor
    document_labels: torch.Tensor
    boxes: Sequence[np.ndarray] | None = None
    teacher: torch.Tensor | None = None
    phrases: Phrases | None = None


class TrainingData(ABC, Generic[ComponentSpecT]):
    """Base class of training data. Subclasses have a nested `Spec`.

    The batches of an epoch depend only on the spec, the seed and the number of the epoch. A run
    that resumes from a checkpoint therefore gets the same batches as an uninterrupted run.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT

    #: Keys of documents whose content is not needed, and therefore not read.
    cached_keys: Container[str] = frozenset()
    #: Whether `cached_keys` contains all documents that can be read.
    is_fully_cached = False

    def __init__(self, spec: ComponentSpecT, *, batch_size: int, seed: int):
        self.spec, self.batch_size, self.seed = spec, batch_size, seed

    @property
    def repeats(self) -> bool:
        """True if all epochs consist of the same queries and documents, in any order."""
        return True

    @property
    def payload_kinds(self) -> frozenset[str]:
        """Modalities of the documents, see `schema.PAYLOAD`. Empty if they are unknown."""
        return frozenset()

    @property
    def has_teacher(self) -> bool:
        """True if batches have scores of a teacher model."""
        return False

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Number of batches per epoch."""

    @abstractmethod
    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields one worker's part of the batches of an epoch, beginning with `first`, from 0.

        All workers yield the same number of batches, and `batch_size` is the total over workers.
        """

    def full_pass(self, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields the part of one worker of all queries and documents, if epochs repeat them.

        By default, these are the batches of the first epoch. Data whose epochs omit different rows
        yield all rows.
        """
        return self.batches(0, 0, worker, num_workers)

    def validation(self) -> Batch | None:
        """Returns the validation data as one batch, or None."""
        return None

    @staticmethod
    def relevant(query_labels: torch.Tensor, document_labels: torch.Tensor) -> torch.Tensor:
        """Computes which documents are relevant to which queries, (Q, B) bool.

        By default, the labels of a query are the numbers of its positives, padded with `NO_LABEL`,
        and the label of a document is its number.

        >>> import torch
        >>> TrainingData.relevant(torch.tensor([[7, -1], [8, 7]]), torch.tensor([[7], [9], [-1]]))
        tensor([[ True, False, False],
                [ True, False, False]])
        """
        same_QBF = query_labels.unsqueeze(1) == document_labels.unsqueeze(0)
        return (same_QBF & (document_labels != NO_LABEL)).any(dim=2)

    def quality(self, scores_QB: torch.Tensor, validation: Batch) -> Quality:
        """Computes metrics on the validation data. The first metric determines the best model.

        The default metrics are R@1, R@5, R@10 and nDCG@10, where all validation documents are
        ranked.
        """
        from pipeline.train.data.quality import ranking

        device = scores_QB.device
        labels = validation.query_labels.to(device), validation.document_labels.to(device)
        return ranking(scores_QB, self.relevant(*labels))


def worker_slice(count: int, worker: int, num_workers: int) -> slice:
    """Selects the rows of a worker from the rows of a batch.

    >>> worker_slice(8, 1, 2)
    slice(4, 8, None)
    """
    size = count // num_workers
    return slice(worker * size, (worker + 1) * size)
