"""Candidate generator with inverted lists of the items whose vectors are near a centroid.

Shapes: T vectors, D dimensions, A coarse and C fine centroids.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from pipeline import config, extras
from pipeline.compression.codecs import Codec, Parts
from pipeline.compression.codecs.kmeans import kmeans
from pipeline.compression.codecs.residual import is_normalised, nearest
from pipeline.config import SpecError

#: Default number of vectors of the index per centroid (128 in TACHIOM, arXiv 2604.28142), and
#: minimum number of vectors of the sample. With 4 instead of 64, three times as many candidates are
#: necessary.
VECTORS_PER_CENTROID, MIN_SAMPLE = 64, 16
#: Number of iterations of k-means.
ITERATIONS = 6
#: Number of neighbours of a centroid in the graph, and of those compared when it is built.
NEIGHBOURS, CONSTRUCTION = 16, 80


class CentroidNumbers(Codec["CentroidNumbers.Spec"]):
    """Stores the part `lists` (T, 1) int32, the numbers of the nearest centroids.

    The nearest centroid is searched among those of the nearest coarse centroid. The codec is too
    coarse for representations and therefore not registered.

    Args:
        spec: Options of the codec.
        artefact: That of `Ivf`.
    """

    class Spec(config.ComponentSpec):
        """Options of `CentroidNumbers`. There are none apart from the name."""

        name: Literal["centroid_numbers"] = "centroid_numbers"

    needs_fit = True

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the part `lists`."""
        return {"lists": (torch.int32, 1)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Finds the nearest centroid of each vector. Ties resolve to the lowest number."""
        coarse_AD, firsts = torch.from_numpy(self.fitted["coarse"]), self.fitted["firsts"].tolist()
        coarse_T = nearest(vectors_TD, coarse_AD)
        list_T1 = torch.empty(len(vectors_TD), 1, dtype=torch.int32)
        order_T = coarse_T.argsort(stable=True)
        sizes = coarse_T.bincount(minlength=len(coarse_AD)).tolist()
        for number, rows in enumerate(order_T.split(sizes)):
            if len(rows):
                fine = self.centroids[firsts[number] : firsts[number + 1]]
                list_T1[rows, 0] = (nearest(vectors_TD[rows], fine) + firsts[number]).int()
        return {"lists": list_T1}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Returns the centroids."""
        return self.centroids[parts["lists"].squeeze(1)]

    @functools.cached_property
    def centroids(self) -> torch.Tensor:
        """Fine centroids (C, D) float32, sorted by their coarse centroid."""
        return torch.from_numpy(self.graph.reconstruct_n(0, self.graph.ntotal))

    @functools.cached_property
    def graph(self) -> Any:
        """Graph of faiss for the search of the centroids with the largest inner products."""
        extras.require("faiss")
        import faiss

        return faiss.deserialize_index(self.fitted["graph"])


class Ivf:
    """Finds items in the inverted lists of the centroids that are nearest to the query tokens.

    The code of an item has the number of the nearest centroid of each of its vectors. A search
    probes some of the nearest centroids of each query token, which a graph (HNSW) finds. The
    approximate score of an item is the sum over the query tokens of the largest similarity of a
    probed centroid of the item. Where it has none, it is less than that of the last probed one.
    Only items in probed lists are read, so that the time hardly depends on the number of items.

    There are many centroids, about one for 64 vectors of the index: few centroids are shared by
    the vectors of an item, and by most items. They result from k-means in two levels.

    If the sample consists of unit vectors, k-means is spherical: centroids are normalised.
    """

    class Spec(config.ComponentSpec):
        """Options of `Ivf`."""

        name: Literal["ivf"] = "ivf"
        num_centroids: int | None = Field(None, ge=1, le=1 << 24)
        """Number of centroids C. The default is the power of two nearest to a 64th of the number
        of vectors of the index, but at most a 16th of those of the sample."""
        seed: int = Field(0, ge=0)
        """Random seed of k-means."""

    # The interface that jobs use, as in `Bm25`: the attribute of `RepresentationInfo` with the
    # column that the codes describe, and the number of rows whose codes are computed together.
    source = "column"
    batch_rows = 8192  # so that a coarse centroid has many vectors

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray]):
        self.spec, self.artefact = spec, artefact
        self.codec = CentroidNumbers(CentroidNumbers.Spec(), artefact)

    @classmethod
    def fit(cls, spec: Spec, vectors_TD: np.ndarray, share: float = 1) -> dict[str, np.ndarray]:
        """Fits the centroids by k-means. The result is deterministic.

        Args:
            vectors_TD: Sample of the vectors of the index, float32.
            share: Share of the vectors of the index that the sample contains.

        Returns:
            The coarse centroids `coarse` (A, D) float32, the first fine centroid of each and their
            number, `firsts` (A + 1,) int64, and the `graph`, which contains the fine centroids in
            float16.

        Raises:
            SpecError: The sample has fewer vectors than centroids.
        """
        num_centroids = spec.num_centroids or _num_centroids(len(vectors_TD), share)
        if len(vectors_TD) < num_centroids:
            rule = f"at most {len(vectors_TD)}, the number of vectors in the sample to fit on"
            raise SpecError("num_centroids", num_centroids, rule)
        cluster = functools.partial(
            kmeans, seed=spec.seed, spherical=is_normalised(vectors_TD), iterations=ITERATIONS
        )
        coarse_AD = cluster(vectors_TD, 1 << round(np.log2(num_centroids) / 2))
        nearest_T = nearest(torch.from_numpy(vectors_TD), torch.from_numpy(coarse_AD)).numpy()
        order_T = np.argsort(nearest_T, kind="stable")
        bounds = np.searchsorted(nearest_T[order_T], np.arange(1, len(coarse_AD)))
        fine = []
        for centre_D, rows in zip(coarse_AD, np.split(order_T, bounds), strict=True):
            members = vectors_TD[rows]
            share = len(members) * num_centroids // len(vectors_TD)
            if share > 1:
                fine.append(cluster(members, share))
            else:
                fine.append(centre_D[None])
        firsts = np.cumsum([0, *map(len, fine)])
        return {"coarse": coarse_AD, "firsts": firsts, "graph": _build_graph(np.concatenate(fine))}

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return self.artefact["coarse"].shape[1]

    @property
    def column_type(self) -> pa.DataType:
        """Arrow type of the column of codes."""
        return self.codec.column_type(self.dim)

    def codes(
        self,
        column: pa.ChunkedArray,
        decode: Callable[[pa.ChunkedArray], tuple[np.ndarray, np.ndarray]],
    ) -> pa.Array:
        """Returns the codes of the items of a column of vectors."""
        vectors_TD, lengths_B = decode(column)
        with torch.no_grad():
            return self.codec.encode_rows(torch.from_numpy(vectors_TD).float(), lengths_B)


def _num_centroids(num_sampled: int, share: float) -> int:
    total = num_sampled / share
    wanted = 1 << max(round(np.log2(max(total / VECTORS_PER_CENTROID, 1))), 0)
    return min(wanted, max(num_sampled // MIN_SAMPLE, 1))


def _build_graph(centroids_CD: np.ndarray) -> np.ndarray:
    import faiss

    kind: Any = faiss.ScalarQuantizer.QT_fp16  # half the memory of float32, and faster
    graph = faiss.IndexHNSWSQ(centroids_CD.shape[1], kind, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = CONSTRUCTION
    with one_thread():  # the graph depends on the order of the centroids
        graph.add(centroids_CD)
    return faiss.serialize_index(graph)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Makes faiss use only the calling thread."""
    import faiss

    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)
