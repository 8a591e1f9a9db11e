"""Search over an index in parts, each in a Ray actor: on several machines or several GPUs."""

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
from pipeline.index.reader import Index
from pipeline.search.options import Score, SearchOptions
from pipeline.search.query import Queries
from pipeline.search.score import Ranking, Scorer
from pipeline.search.searcher import Searcher
from pipeline.search.selection import Items
from pipeline.search.shards import merge_rankings


class ShardedSearcher(Searcher):
    """Exact search with the interface and the results of `Searcher`, in `num_shards` Ray actors.

    Queries are encoded here, once, and the rankings of the actors are merged here. An actor that
    dies is restarted, and its call is repeated. As a context manager it ends its actors.

    Args:
        uri: URI of an index that every machine of the cluster can read.
        version: Lance version, the same for all shards; default the newest.
        num_shards: Number of parts of about as many items, in whole Lance fragments; empty parts
            are left out.
        num_cpus: CPUs per actor.
        num_gpus: GPUs per actor; default 1 unless `device` is "cpu".
        cache, device: As in `open_index`; the files are on the machines of the actors.
        max_restarts: Maximum number of restarts per actor.
        start_seconds: Maximum time until all actors run.

    Raises:
        SpecError: The index is missing, corrupted or newer than this version of the software, or
            `num_shards` is not positive.
        JobError: The actors do not start.
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
        start_seconds: float = 300,
    ):
        if num_shards < 1:
            raise SpecError("num_shards", num_shards, "an integer >= 1")
        super().__init__(Index(uri, version), cache=cache)
        num_gpus = float(device != "cpu") if num_gpus is None else num_gpus
        shards = [(i, num_shards) for i in range(num_shards)]
        sizes = [sum(f.count_rows() for f in self.index.fragments(shard)) for shard in shards]
        # An index without items keeps one shard, which reports invalid searches.
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
            self.scorer.ask(lambda actor: actor.is_open.remote(), start_seconds)
        except GetTimeoutError:
            self.close()
            needed = f"{len(filled)} actors with {num_cpus:g} CPUs and {num_gpus:g} GPUs each"
            raise JobError(
                f"the shards of {uri} did not start in {start_seconds:g} s; they are {needed}"
            ) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardedSearcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the actors."""
        self.scorer.close()


class _Shard:
    """The scorer of one shard, in an actor."""

    def __init__(self, uri: str, version: int, shard: tuple[int, int], cache: bool, device: str):
        self._scorer = Scorer(Items(Index(uri, version), shard), cache=cache, device=device)

    def is_open(self) -> bool:
        return True

    def load(self, representation: str, score: Score) -> None:
        self._scorer.load(representation, score)

    def rank(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> list[Ranking]:
        return self._scorer.rank(queries, options, rows)

    def item_vectors(self, representation: str, rows: np.ndarray) -> list[np.ndarray]:
        return [vectors.numpy() for vectors in self._scorer.item_vectors(representation, rows)]


class ShardedScorer(Scorer):
    """Scores items in actors; each actor holds the vectors of a shard.

    Args:
        items: All items of the index.
        actors: Handles of the actors, in the order of the shards.
        sizes: Number of items per shard.
    """

    def __init__(self, items: Items, actors: list[Any], sizes: list[int], *, cache: bool):
        super().__init__(items, cache=cache)
        self._uri, self._actors = items.index.uri, actors
        self._firsts = np.cumsum([0, *sizes[:-1]])  # position of the first item of each shard

    def load(self, representation: str, score: Score = "late") -> None:
        """Opens the vectors that a score needs in every actor."""
        self.ask(lambda actor: actor.load.remote(representation, score))

    def rank(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> list[Ranking]:
        """Ranks as `Scorer.rank` does, in all actors at once."""
        # Checked here too: Ray prints the errors of actors that nobody waits for.
        options.check_vectors(queries, self._info(options.column).pooled_column)
        shared = ray.put(queries)
        scoring = options.without_selection()  # `rows` replaces it
        calls = [
            actor.rank.remote(shared, scoring, shard_rows)
            for actor, shard_rows in zip(self._open_actors(), self._split(rows), strict=True)
        ]
        counted = [
            [replace(ranking, rows=ranking.rows + first) for ranking in rankings]
            for rankings, first in zip(self._results(calls), self._firsts, strict=True)
        ]
        return [
            merge_rankings(each, options.k, options.group_by) for each in zip(*counted, strict=True)
        ]

    def _split(self, rows: np.ndarray | None) -> list[np.ndarray | None]:
        """Returns ascending positions by shard, relative to its first item; None for all."""
        if rows is None:
            return [None] * len(self._firsts)
        parts = np.split(rows, np.searchsorted(rows, self._firsts[1:]))
        return [part - first for part, first in zip(parts, self._firsts, strict=True)]

    def item_vectors(self, representation: str, rows: np.ndarray) -> list[torch.Tensor]:
        """Returns the vectors (N, D) float32 of items, read by the actors that hold them."""
        shard_of_row = np.searchsorted(self._firsts, rows, side="right") - 1
        places = {i: np.flatnonzero(shard_of_row == i) for i in set(shard_of_row.tolist())}
        actors = self._open_actors()
        calls = [
            actors[i].item_vectors.remote(representation, rows[own] - self._firsts[i])
            for i, own in places.items()
        ]
        vectors: dict[int, np.ndarray] = {}
        for own, found in zip(places.values(), self._results(calls), strict=True):
            vectors |= zip(own.tolist(), found, strict=True)
        return [torch.tensor(vectors[place]) for place in range(len(rows))]

    def ask(self, call: Callable[[Any], ray.ObjectRef], timeout: float | None = None) -> list[Any]:
        """Calls every actor and returns the results in the order of the shards."""
        return self._results([call(actor) for actor in self._open_actors()], timeout)

    def close(self) -> None:
        """Ends the actors."""
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
            raise error.cause from None  # as the scorer of the actor raised it
        except RayError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise JobError(f"a shard of {self._uri} failed permanently: {reason}") from None


class Shares(TypedDict, total=False):
    """CPUs and GPUs per actor."""

    num_cpus: float
    num_gpus: float


def machine_shares(num_actors: int, device: str) -> Shares:
    """Returns the CPUs and GPUs per actor.

    The actors of a cluster that was started here share this machine. On a cluster that
    `RAY_ADDRESS` names each takes the default, one CPU and GPU, and may have to wait for them.

    Raises:
        SpecError: The device needs a GPU, and the machine has none.
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
    # Ray rounds to four digits; rounded up, the shares would exceed the machine.
    return min(1.0, math.floor(number / num_actors * 1e4) / 1e4)
