"""Searches the shards of an index in Ray actors, on several machines or GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from pipeline.config import JobError, SpecError, absolute
from pipeline.index.reader import IndexReader
from pipeline.search.candidates import EXACT
from pipeline.search.options import SearchOptions, check_count
from pipeline.search.query import Queries
from pipeline.search.score import Ranking, Scorer
from pipeline.search.scores import Score
from pipeline.search.searcher import Searcher
from pipeline.search.selection import Items
from pipeline.search.shards import merge_rankings


class ShardedSearcher(Searcher):
    """Search in Ray actors, with the interface and the results of `Searcher`.

    Queries are encoded and rankings are merged in the calling process. Actors that die are
    restarted, and their calls are repeated. The context manager terminates the actors on exit.

    Args:
        num_shards: Number of shards of about equal size, at least 1. Shards consist of whole Lance
            fragments. Empty shards have no actor.
        num_cpus: Number of CPUs per actor.
        num_gpus: Number of GPUs per actor. Defaults to 0 if `device` is "cpu", otherwise 1.
        max_restarts: Maximum number of restarts per actor.
        start_timeout_s: Maximum time until all actors are ready, in seconds.

    Raises:
        SpecError: The index is missing, corrupted or of another format, or `num_shards` is invalid.
        JobError: The actors do not start in time.
    """

    scorer: ShardedScorer

    def __init__(
        self,
        uri: str,
        version: int | None = None,
        *,
        num_shards: int,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        cache: bool = True,
        device: str = "cpu",
        max_restarts: int = 3,
        start_timeout_s: float = 300,
    ):
        check_count("num_shards", num_shards)
        super().__init__(IndexReader(uri, version), cache=cache)
        self.device = device  # of the actors
        num_gpus = float(device != "cpu") if num_gpus is None else num_gpus
        shards = [(i, num_shards) for i in range(num_shards)]
        sizes = [sum(f.count_rows() for f in self.index.fragments(shard)) for shard in shards]
        # An empty index keeps one shard, which validates searches.
        filled = [(s, n) for s, n in zip(shards, sizes, strict=True) if n] or [(shards[0], 0)]
        actor = ray.remote(_Shard).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=max_restarts,
            max_task_retries=max_restarts,
        )
        location = absolute(uri), self.index.version
        actors = [actor.remote(*location, shard, cache, device) for shard, _ in filled]
        self.scorer = ShardedScorer(self.items, actors, [size for _, size in filled], cache=cache)
        try:
            self.scorer.call(lambda actor: actor.is_open.remote(), start_timeout_s)
        except GetTimeoutError:
            self.close()
            resources = f"{len(filled)} actors with {num_cpus:g} CPUs and {num_gpus:g} GPUs each"
            problem = f"did not start in {start_timeout_s:g} s; they require {resources}"
            raise JobError(f"the shards of {uri} {problem}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardedSearcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Terminates the actors."""
        self.scorer.close()


class _Shard:
    def __init__(self, uri: str, version: int, shard: tuple[int, int], cache: bool, device: str):
        self._scorer = Scorer(Items(IndexReader(uri, version), shard), cache=cache, device=device)

    def is_open(self) -> bool:
        return True

    def load(self, representation: str, score: Score, candidates: str) -> None:
        self._scorer.load(representation, score, candidates)

    def rank(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> list[Ranking]:
        return self._scorer.rank_part(queries, options, rows)

    def item_vectors(self, representation: str, rows: np.ndarray) -> list[np.ndarray]:
        return [vectors.numpy() for vectors in self._scorer.item_vectors(representation, rows)]


class ShardedScorer(Scorer):
    """Scorer that distributes the items over actors. Each actor holds one shard.

    Args:
        sizes: Number of items per shard.
    """

    def __init__(self, items: Items, actors: list[Any], sizes: list[int], *, cache: bool):
        super().__init__(items, cache=cache)
        self._uri, self._actors = items.index.uri, actors
        self._firsts = np.cumsum([0, *sizes[:-1]])  # index of the first item of each shard

    def load(self, representation: str, score: Score = "maxsim", candidates: str = EXACT) -> None:
        """Opens the vectors that a score and a candidate generator need in all actors."""
        self.call(lambda actor: actor.load.remote(representation, score, candidates))

    def rank(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> list[Ranking]:
        """Finds the k best items for each query. All actors work in parallel."""
        # Also checked here, because Ray prints errors of actors whose results are not awaited.
        options.check_vectors(queries, self._index.representation(options.column).pooled_column)
        options.check_candidates(queries)
        queries_ref = ray.put(queries)
        scoring = options.without_selection()  # replaced by `rows`
        calls = [
            actor.rank.remote(queries_ref, scoring, shard_rows)
            for actor, shard_rows in zip(self._open_actors(), self._split(rows), strict=True)
        ]
        rankings_by_shard = [
            [replace(ranking, rows=ranking.rows + first) for ranking in rankings]
            for rankings, first in zip(self._results(calls), self._firsts, strict=True)
        ]
        return [
            merge_rankings(rankings, options) for rankings in zip(*rankings_by_shard, strict=True)
        ]

    def _split(self, rows: np.ndarray | None) -> list[np.ndarray | None]:
        """Splits indices by shard, relative to its first item. None means all items."""
        if rows is None:
            return [None] * len(self._firsts)
        parts = np.split(rows, np.searchsorted(rows, self._firsts[1:]))
        return [part - first for part, first in zip(parts, self._firsts, strict=True)]

    def item_vectors(self, representation: str, rows: np.ndarray) -> list[torch.Tensor]:
        """Returns the decoded vectors (N, D) float32 of each item."""
        shard_of_row = np.searchsorted(self._firsts, rows, side="right") - 1
        indices = {i: np.flatnonzero(shard_of_row == i) for i in set(shard_of_row.tolist())}
        actors = self._open_actors()
        calls = [
            actors[i].item_vectors.remote(representation, rows[index] - self._firsts[i])
            for i, index in indices.items()
        ]
        vectors: dict[int, np.ndarray] = {}
        for index, shard_vectors in zip(indices.values(), self._results(calls), strict=True):
            vectors |= zip(index.tolist(), shard_vectors, strict=True)
        return [torch.tensor(vectors[i]) for i in range(len(rows))]

    def call(self, call: Callable[[Any], ray.ObjectRef], timeout: float | None = None) -> list[Any]:
        """Calls all actors in parallel and returns their results in the order of the shards."""
        return self._results([call(actor) for actor in self._open_actors()], timeout)

    def close(self) -> None:
        """Terminates the actors."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _open_actors(self) -> list[Any]:
        if not self._actors:
            raise JobError(f"the shards of {self._uri} are closed")
        return self._actors

    def _results(self, calls: list[ray.ObjectRef], timeout: float | None = None) -> list[Any]:
        try:
            return ray.get(calls, timeout=timeout)
        except GetTimeoutError:
            raise
        except RayTaskError as error:
            raise error.cause from None  # the original error of the scorer
        except RayError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise JobError(f"a shard of {self._uri} failed permanently: {reason}") from None


class ActorResources(TypedDict, total=False):
    """Number of CPUs and GPUs per actor."""

    num_cpus: float
    num_gpus: float


def actor_resources(num_actors: int, device: str) -> ActorResources:
    """Returns the resources per actor.

    On a local cluster the actors share the resources of the machine. On a cluster given by
    `RAY_ADDRESS` each actor requires one CPU and GPU, the default, and waits for them.
    """
    if os.environ.get("RAY_ADDRESS"):
        return {}
    resources = ray.cluster_resources()
    if device != "cpu" and not resources.get("GPU"):
        raise SpecError("device", device, "cpu", "is not available")
    num_gpus = resources["GPU"] if device != "cpu" else 0
    return {
        "num_cpus": _share(resources["CPU"], num_actors),
        "num_gpus": _share(num_gpus, num_actors),
    }


def _share(number: float, num_actors: int) -> float:
    # Ray rounds to four decimals. Rounding up would exceed the resources of the machine.
    return min(1.0, math.floor(number / num_actors * 1e4) / 1e4)
