"""Search over an index in parts, each in a Ray actor: on several machines or several GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from pipeline.config import JobError, SpecError, absolute
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index
from pipeline.search.queries import Queries
from pipeline.search.searcher import Ranking, Score, Searcher, Weights, check_options
from pipeline.search.shards import merge_rankings


class _Shard(Searcher):
    """What runs in an actor: it opens its shard, and is asked with queries that are ready."""

    def __init__(self, uri: str, version: int, shard: tuple[int, int], cache: bool, device: str):
        super().__init__(Index(uri, version), shard=shard, cache=cache, device=device)

    def is_open(self) -> bool:
        return True

    def rank_ready(self, queries: Queries, name: str, *options: Any) -> list[Ranking]:
        return self._rank(queries, name, self.index.representation(name), *options)

    def items(self, name: str, rows: np.ndarray) -> list[np.ndarray]:
        return [vectors.numpy() for vectors in self._items(name, rows)]


class ShardedSearcher(Searcher):
    """Exact search with the interface and the results of `Searcher`, in `num_shards` Ray actors.

    Queries are encoded here, once, and what the actors find is merged here. An actor that dies is
    started again, and what it was asked is asked again. As a context manager it ends its actors.

    Args:
        uri: an index that every machine of the cluster can read.
        version: the Lance version, the same for all shards; default the newest.
        num_shards: parts of about as many items, in whole Lance fragments; those that would be
            empty are left out.
        num_cpus: of each actor.
        num_gpus: of each actor; default: one where `device` is not "cpu".
        cache, device: as in `open_index`; the files lie on the actors' machines.
        max_restarts: how often an actor is started again that died.
        start_seconds: how long to wait until all actors run.

    Raises:
        SpecError: no index there, or a damaged or newer one; no legal number of shards.
        JobError: the actors do not start.
    """

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
        # An index without items keeps one shard, which says what is not legal of a search.
        kept = [(s, n) for s, n in zip(shards, sizes, strict=True) if n] or [(shards[0], 0)]
        #: The first item of each shard among all items.
        self._firsts = np.cumsum([0, *(size for _, size in kept[:-1])])
        actor = ray.remote(_Shard).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=max_restarts,
            max_task_retries=max_restarts,
        )
        where = absolute(uri), self.index.version
        self._actors = [actor.remote(*where, shard, cache, device) for shard, _ in kept]
        try:
            self._ask(lambda actor: actor.is_open.remote(), start_seconds)
        except GetTimeoutError:
            self.close()
            needed = f"{len(kept)} actors with {num_cpus:g} CPUs and {num_gpus:g} GPUs each"
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
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def load(self, representation: str | None = None, score: Score = "late") -> None:
        """Opens in every actor what a search with this score needs of the items."""
        name, _ = self.representation(representation)
        self._ask(lambda actor: actor.load.remote(name, score))

    def _rank(
        self,
        queries: Queries,
        name: str,
        info: RepresentationInfo,
        k: int,
        score: str,
        weights: Weights,
        group_by: str | None,
        rows: np.ndarray | None,
    ) -> list[Ranking]:
        # Here and not by the actors alone: Ray prints errors of those that are not waited for.
        check_options(queries, info, k, score, weights, group_by)
        shared = ray.put(queries)
        options = name, k, score, weights, group_by
        asked = [
            actor.rank_ready.remote(shared, *options, own)
            for actor, own in zip(self._open_actors(), self._rows_of_shards(rows), strict=True)
        ]
        found = self._get(asked)
        counted = [
            [replace(ranking, rows=ranking.rows + first) for ranking in rankings]
            for rankings, first in zip(found, self._firsts, strict=True)
        ]
        return [merge_rankings(each, k, group_by) for each in zip(*counted, strict=True)]

    def _rows_of_shards(self, rows: np.ndarray | None) -> list[np.ndarray | None]:
        """What of ascending items each shard has, counted in it; None: all."""
        if rows is None:
            return [None] * len(self._firsts)
        parts = np.split(rows, np.searchsorted(rows, self._firsts[1:]))
        return [part - first for part, first in zip(parts, self._firsts, strict=True)]

    def _items(self, name: str, rows: np.ndarray) -> list[torch.Tensor]:
        shard_of = np.searchsorted(self._firsts, rows, side="right") - 1
        wanted = {shard: np.flatnonzero(shard_of == shard) for shard in set(shard_of.tolist())}
        asked = [
            self._actors[shard].items.remote(name, rows[places] - self._firsts[shard])
            for shard, places in wanted.items()
        ]
        items = {}
        for places, vectors in zip(wanted.values(), self._get(asked), strict=True):
            items |= dict(zip(places.tolist(), vectors, strict=True))
        return [torch.tensor(items[i]) for i in range(len(rows))]

    def _ask(
        self, question: Callable[[Any], ray.ObjectRef], timeout: float | None = None
    ) -> list[Any]:
        """What every actor answers, in the order of the shards."""
        return self._get([question(actor) for actor in self._open_actors()], timeout)

    def _open_actors(self) -> list[Any]:
        if not self._actors:
            raise JobError(f"the shards of {self.index.uri} are closed")
        return self._actors

    def _get(self, asked: list[ray.ObjectRef], timeout: float | None = None) -> list[Any]:
        try:
            return ray.get(asked, timeout=timeout)
        except GetTimeoutError:
            raise
        except RayTaskError as error:
            raise error.cause from None  # as the searcher there raised it
        except RayError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise JobError(f"a shard of {self.index.uri} ended for good: {reason}") from None
