"""What runs behind the gateway: the stages of a search, as classes that know nothing of HTTP.

`pipeline.serve.app` makes deployments of them. A stage gets what it needs in the call, holds what
is dear to load, and answers each request by itself, so that any replica can be asked, or asked
again.

Every call names its caller: the access key, and for how long the answer is waited for. Stages share
their time fairly among keys, compute in slices of a fraction of a second, and drop what nobody
waits for any more (`pipeline.serve.turns`). Calls alike that wait at the same time are computed
together: queries are encoded in one batch, and vectors are read once for all queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import itertools
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import soundfile
import torch

from pipeline.config import SpecError, digest
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import Edition, open_edition
from pipeline.schema import ITEM, Hit
from pipeline.search.maps import Previews, SimilarityMap, similarity_map
from pipeline.search.queries import Queries, Unencoded, encoded_by
from pipeline.search.searcher import (
    SLICE_PAIRS,
    Ranking,
    Searcher,
    check_fingerprint,
    query_encoder,
)
from pipeline.serve.filters import Filters
from pipeline.serve.metrics import batch_sizes
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.settings import Scale, ServedIndex
from pipeline.serve.turns import Caller, Turns, all_of

if TYPE_CHECKING:  # it needs transformers, and the gateway does not
    from pipeline.search.rerank import Reading

log = logging.getLogger("ray.serve")
T = TypeVar("T")

#: Versions of an index that a stage keeps open: the newest, and one whose requests are under way.
OPEN_VERSIONS = 2
#: Characters of queries that are encoded together: about a second's work of two cores.
PORTION_CHARS = 2_000
#: Pairs of a query and an item that the joint encoder reads together.
PORTION_PAIRS = 100
#: Hits that are described together.
PORTION_HITS = 200
#: Threads in which items are looked up, and previews made.
LIBRARY_THREADS = 4


@dataclass(frozen=True)
class Failed:
    """An error as a stage returns it; raised, Ray would log it as a fault of the stage."""

    error: Exception


def answer(outcome: Any) -> Any:
    """Returns the answer of a stage, or raises its error."""
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome


def tells(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T | Failed]]:
    """A method of a stage that answers what is wrong with a request, or that it is too late.

    Raised, it would be an error of the stage in Ray's logs, with all that led to it.
    """

    @functools.wraps(method)
    async def told(*args: Any, **kwargs: Any) -> T | Failed:
        try:
            return await method(*args, **kwargs)
        except (SpecError, TimeoutError) as error:
            return Failed(error)

    return told


@contextlib.contextmanager
def logged(stage: str, **about: Any) -> Iterator[None]:
    """Logs what a stage did for a request and how long it took; Ray adds the request's id."""
    start = time.perf_counter()
    done = "failed"
    try:
        yield
        done = "ok"
    finally:
        milliseconds = round(1e3 * (time.perf_counter() - start), 1)
        said = {"event": "stage", "stage": stage, "done": done, "milliseconds": milliseconds}
        log.info(json.dumps({**said, **about}))


def limit_threads(scale: Scale) -> None:
    """Lets torch use what the settings give it; Ray would give it the actor's share of CPUs."""
    torch.set_num_threads(scale.threads or os.cpu_count() or 1)


@dataclass(frozen=True)
class Encoded:
    """A query as vectors: unit token vectors, the pooled one, and the tokens' texts."""

    tokens_MD: np.ndarray
    pooled_P: np.ndarray | None
    token_texts: list[str]

    @classmethod
    def of_vectors(cls, vectors: Any) -> Encoded:
        """Vectors that came with the request.

        Raises:
            SpecError: they are no query.
        """
        try:
            array = np.asarray(vectors, np.float32)
        except (ValueError, OverflowError):
            legal = "a list of vectors of equally many numbers"
            raise SpecError("query", "vectors", legal, "are not of one length") from None
        ready = Queries.of_vectors([array])
        return cls(ready.tokens[0].numpy(), None, ready.token_texts[0])


def _joined(encoded: Sequence[Encoded]) -> Queries:
    """What a searcher takes, before the representation's own transformation.

    The queries have pooled vectors if all do.
    """
    pooled = [each.pooled_P for each in encoded]
    return Queries(
        [torch.from_numpy(each.tokens_MD) for each in encoded],
        None if any(p is None for p in pooled) else torch.from_numpy(np.stack(pooled)),
        [each.token_texts for each in encoded],
    )


class QueryEncoder:
    """Encodes queries with the encoders of the representations, each loaded once."""

    def __init__(self, scale: Scale, preload: Sequence[EncoderInfo] = ()):
        bind_to_loopback()
        limit_threads(scale)
        self._encoders: dict[str, Encoder] = {}
        self._lock = threading.Lock()
        self._needs: dict[tuple[str, str], tuple[str, EncoderInfo]] = {}
        size = batch_sizes("encode").observe
        self._turns = Turns(self._encode, _chars, PORTION_CHARS, observe=size)
        for info in preload:
            self._encoder(info)

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    @tells
    async def encode(
        self,
        name: str,
        info: EncoderInfo,
        queries: Sequence[Unencoded],
        caller: Caller,
    ) -> list[Encoded]:
        """Queries' vectors for a representation.

        Args:
            info: Encoder of the representation.
            queries: texts, files of pictures, or both together; all of one kind.

        Raises:
            SpecError: the encoder is not the one that made the representation, or not here.
            TimeoutError: it is not done in time.
        """
        with logged("encode", queries=len(queries)):
            group = digest([info.spec, info.fingerprint]), type(queries[0]).__name__
            self._needs[group] = name, info
            return await self._turns.ask(caller, group, queries)

    def _encode(
        self, group: tuple[str, str], queries: list[Unencoded]
    ) -> Generator[None, None, list[Encoded]]:
        name, info = self._needs[group]
        encoder = self._encoder(info)
        yield  # loading it may have taken long
        check_fingerprint(encoder, name, info)
        return _each(encoded_by(encoder, queries))

    def _encoder(self, info: EncoderInfo) -> Encoder:
        key = digest(info.spec)
        with self._lock:
            if key not in self._encoders:
                self._encoders[key] = query_encoder(info)
            return self._encoders[key]


def _chars(query: Unencoded) -> int:
    return len(query) if isinstance(query, str) else PORTION_CHARS


def _each(encoded: EncodedQueries) -> list[Encoded]:
    ready = Queries.of_encoded(encoded)
    return [
        Encoded(
            tokens.numpy(),
            None if ready.pooled is None else ready.pooled[i].numpy(),
            ready.token_texts[i],
        )
        for i, tokens in enumerate(ready.tokens)
    ]


class Versions:
    """The versions of an index that are open in a process, the latest used last.

    Args:
        make: opens a version.
    """

    def __init__(self, make: Callable[[Edition], Any]):
        self._make = make
        self._open: OrderedDict[Edition, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._making: dict[Edition, threading.Lock] = {}

    def of(self, edition: Edition) -> Any:
        """A version, opened once; threads that want another do not wait for it."""
        with self._lock:
            if edition in self._open:
                self._open.move_to_end(edition)
                return self._open[edition]
            making = self._making.setdefault(edition, threading.Lock())
        with making:
            with self._lock:
                if edition in self._open:
                    return self._open[edition]
            made = self._make(edition)
            with self._lock:
                self._open[edition] = made
                self._making.pop(edition, None)
                while len(self._open) > OPEN_VERSIONS:
                    self._open.popitem(last=False)
            return made


@dataclass(frozen=True)
class Options:
    """How a stage ranks: what queries must have in common to be scored together."""

    edition: Edition
    representation: str
    k: int
    score: str = "late"
    weights: tuple[float, float] = (1.0, 1.0)
    group_by: str | None = None
    where: str | None = None
    ids: tuple[str, ...] | None = None
    parents: tuple[str, ...] | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns what `Searcher.rank_in_slices` takes besides queries and rows."""
        return {name: getattr(self, name) for name in ("k", "score", "weights", "group_by")}


@dataclass(frozen=True)
class Described:
    """The hits of a query, and their maps where these are asked for."""

    hits: list[Hit]
    maps: list[SimilarityMap | None]


class _Query(NamedTuple):
    """A query that is to be scored.

    Attributes:
        rows: Ascending positions of the items that the filter lets through; None for all.
        pairs: Number of pairs of a query token and a vector, if all items are scored.
    """

    encoded: Encoded
    rows: np.ndarray | None
    pairs: int


class Ranker:
    """Ranks the items of an index, or of a shard of it, and says what it found.

    As the first stage it searches its shard; as the second it scores the first one's hits again, by
    another representation of all items.
    """

    def __init__(
        self,
        served: ServedIndex,
        scale: Scale,
        filter_seconds: float,
        shard: tuple[int, int] | None = None,
    ):
        bind_to_loopback()
        limit_threads(scale)
        self._served, self._shard = served, shard
        self._versions = Versions(self._open)
        self._loading: dict[tuple[Edition, str, str], asyncio.Future] = {}
        self._filters = Filters(served.uri, shard, filter_seconds)
        size = batch_sizes("rank").observe
        self._ranking = Turns(self._rank, lambda query: query.pairs, SLICE_PAIRS, observe=size)
        self._describing = Turns(self._describe, lambda pair: len(pair[1].rows), PORTION_HITS)

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    def _open(self, edition: Edition) -> Searcher:
        index = open_edition(self._served.uri, edition)
        how = {"cache": self._served.cache, "device": self._served.device}
        return Searcher(index, shard=self._shard, **how)

    @tells
    async def prepare(self, edition: Edition, representations: Sequence[str]) -> None:
        """Opens a version and the vectors of some representations, if they are not open."""
        for name in representations:
            await self._loaded(edition, name)
        await asyncio.to_thread(self._versions.of, edition)

    async def _loaded(self, edition: Edition, name: str, score: str = "late") -> Searcher:
        """The version with the vectors of a representation open; who has them does not wait."""
        searcher = await asyncio.to_thread(self._versions.of, edition)
        if not searcher.has_loaded(name, score):
            what = edition, name, score
            if what not in self._loading:
                load = asyncio.ensure_future(asyncio.to_thread(searcher.load, name, score))
                self._loading[what] = load
                load.add_done_callback(lambda _: self._loading.pop(what))
            await asyncio.shield(self._loading[what])  # cancelled, it continues for others
        return searcher

    @tells
    async def rank(
        self, encoded: Sequence[Encoded], options: Options, caller: Caller
    ) -> list[Ranking]:
        """The best items of the shard for each query; `rows` are counted in the shard.

        Raises:
            SpecError: an option is not legal.
            TimeoutError: it is not done in time.
        """
        with logged("rank", representation=options.representation, version=options.edition.version):
            return await self._ranked(encoded, options, caller)

    @tells
    async def rank_each(
        self, encoded: Sequence[Encoded], options: Sequence[Options], caller: Caller
    ) -> list[Ranking]:
        """`rank` of queries that each have options of their own."""
        with logged("rank", queries=len(encoded)):
            asked = zip(encoded, options, strict=True)
            found = await all_of(self._ranked([one], own, caller) for one, own in asked)
            return [ranking for (ranking,) in found]

    async def _ranked(
        self, encoded: Sequence[Encoded], options: Options, caller: Caller
    ) -> list[Ranking]:
        async with asyncio.timeout(caller.seconds):
            name = options.representation
            searcher = await self._loaded(options.edition, name, options.score)
            rows = await self._filtered(searcher, options, caller)
            each = 1 if options.score == "single" else searcher.packed(name).num_vectors
            queries = [_Query(one, rows, len(one.tokens_MD) * each) for one in encoded]
            # Queries are scored together that have their options in common, and single vectors.
            group = options, all(one.pooled_P is not None for one in encoded)
            return await self._ranking.ask(caller, group, queries)

    async def _filtered(
        self, searcher: Searcher, options: Options, caller: Caller
    ) -> np.ndarray | None:
        """The positions of the items that the filter lets through; None without a filter."""
        where = options.where
        if where is None or (rows := searcher.filtered(where)) is not None:
            return None if where is None else rows
        item_ids = await self._filters.matching_ids(caller, options.edition, where)
        return await asyncio.to_thread(searcher.remember_filter, where, item_ids)

    def _rank(
        self, group: tuple[Options, bool], queries: list[_Query]
    ) -> Generator[None, None, list[Ranking]]:
        options, name = group[0], group[0].representation
        searcher = self._versions.of(options.edition)
        ready = searcher.transformed(_joined([query.encoded for query in queries]), name)
        rows = searcher.restricted(queries[0].rows, options.ids, options.parents)
        return (yield from searcher.rank_in_slices(ready, name, rows=rows, **options.arguments()))

    @tells
    async def search(
        self, encoded: Sequence[Encoded], options: Options, explain: str | None, caller: Caller
    ) -> list[Described]:
        """`rank` and `describe` in one call, for an index of one shard."""
        about = {"representation": options.representation, "version": options.edition.version}
        with logged("search", queries=len(encoded), **about):
            async with asyncio.timeout(caller.seconds):
                rankings = await self._ranked(encoded, options, caller)
                return await self._described(encoded, options, rankings, explain, caller)

    @tells
    async def describe(
        self,
        encoded: Sequence[Encoded],
        options: Options,
        rankings: Sequence[Ranking],
        explain: str | None,
        caller: Caller,
    ) -> list[Described]:
        """What is stored about ranked items of this shard, and how they match their query."""
        with logged("describe", queries=len(encoded)):
            return await self._described(encoded, options, rankings, explain, caller)

    async def _described(
        self,
        encoded: Sequence[Encoded],
        options: Options,
        rankings: Sequence[Ranking],
        explain: str | None,
        caller: Caller,
    ) -> list[Described]:
        group = options.edition, options.representation, explain
        pairs = list(zip(encoded, rankings, strict=True))
        return await self._describing.ask(caller, group, pairs)

    def _describe(
        self, group: tuple[Edition, str, str | None], pairs: list[tuple[Encoded, Ranking]]
    ) -> Generator[None, None, list[Described]]:
        edition, name, explain = group
        searcher = self._versions.of(edition)
        encoded, rankings = [one for one, _ in pairs], [ranking for _, ranking in pairs]
        queries = searcher.transformed(_joined(encoded), name)
        hits = yield from searcher.hits_in_slices(
            rankings, queries, name, explain=explain is not None
        )
        if explain != "map":
            return [Described(own, [None] * len(own)) for own in hits]
        described = []
        for each, own in zip(encoded, hits, strict=True):
            query = searcher.transformed(_joined([each]), name)
            maps = []
            for hit in own:
                yield
                maps.append(_map(searcher, query, hit.item_id, name))
            described.append(Described(own, maps))
        return described


def _map(
    searcher: Searcher, queries: Queries, item_id: str, representation: str
) -> SimilarityMap | None:
    """An item's map; None where it lacks what a map needs."""
    try:
        return similarity_map(searcher, queries, item_id, representation)
    except SpecError:
        return None


@dataclass(frozen=True)
class JointOptions:
    """How EDJE reranks: its `pool` of the first stage's best, of which with the others k are given.

    Attributes:
        edition: of the index, which the first stage searched too.
    """

    edition: Edition
    k: int
    pool: int
    add_first_stage: bool = False


class JointRanker:
    """Puts the best of the first stage into the order of EDJE's joint encoder, loaded once.

    Raises:
        SpecError: the settings' folder is no EDJE's.
    """

    def __init__(self, served: ServedIndex, scale: Scale):
        from pipeline.search.rerank import Reranker

        bind_to_loopback()
        limit_threads(scale)
        self._reranker = Reranker(served.edje, precision=served.edje_precision)
        self._versions = Versions(lambda edition: Searcher(open_edition(served.uri, edition)))
        size = batch_sizes("edje").observe
        self._turns = Turns(self._read_some, lambda pair: len(pair[1]), PORTION_PAIRS, observe=size)

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    @tells
    async def rerank(
        self,
        queries: Sequence[str] | Sequence[bytes],
        rankings: Sequence[Ranking],
        options: JointOptions,
        caller: Caller,
    ) -> list[Ranking]:
        """The k best of each query's ranking of the first stage, which say where they stood.

        Args:
            queries: all texts, or all pictures.

        Raises:
            SpecError: a picture cannot be read; for `edje`: the index has no tokens of this EDJE.
            TimeoutError: it is not done in time.
        """
        from pipeline.search.rerank import reordered

        pools = [ranking.item_ids[: options.pool] for ranking in rankings]
        read = await self._read(options.edition, queries, pools, caller)
        how = options.pool, options.add_first_stage, options.k
        return [reordered(*each, *how) for each in zip(queries, rankings, read, strict=True)]

    @tells
    async def read(
        self, edition: Edition, query: str | bytes, item_ids: list[str], caller: Caller
    ) -> dict[str, Reading]:
        """What the joint encoder says of items, but of those that it cannot read; see `rerank`."""
        (found,) = await self._read(edition, [query], [item_ids], caller)
        return found

    async def _read(
        self, edition: Edition, queries: Any, pools: Sequence[list[str]], caller: Caller
    ) -> list[dict[str, Reading]]:
        """Reads pools, in parts of `PORTION_PAIRS`."""
        parts = [
            [(query, pool[i : i + PORTION_PAIRS]) for i in range(0, len(pool) or 1, PORTION_PAIRS)]
            for query, pool in zip(queries, pools, strict=True)
        ]
        with logged("edje", queries=len(queries), version=edition.version):
            try:
                pairs = list(itertools.chain(*parts))
                read = iter(await self._turns.ask(caller, (edition, type(queries[0])), pairs))
            except SpecError as error:
                if error.field in ("query", "index"):
                    raise
                # Of the EDJE, its encoder or its tokens: the caller can do nothing about it.
                log.error("edje: %s", error)
                raise SpecError("edje", error.value, error.legal, error.problem) from None
        return [dict(itertools.chain(*(next(read).items() for _ in own))) for own in parts]

    def _read_some(
        self, group: tuple[Edition, type], pairs: list[tuple[str | bytes, list[str]]]
    ) -> Generator[None, None, list[dict[str, Reading]]]:
        searcher = self._versions.of(group[0])
        queries, pools = [query for query, _ in pairs], [pool for _, pool in pairs]
        self._reranker.check(searcher.index, queries)
        yield  # opening it may have taken long
        return self._reranker.read(searcher, queries, pools)


class Library:
    """What is stored of single items, and what they look and sound like."""

    def __init__(self, indexes: Mapping[str, ServedIndex]):
        bind_to_loopback()
        self._versions = {
            name: Versions(functools.partial(_previews, served)) for name, served in indexes.items()
        }
        self._items = Turns(_called, workers=LIBRARY_THREADS)
        self._shown = Turns(_called, workers=LIBRARY_THREADS)

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    @tells
    async def item(
        self, index: str, edition: Edition, item_id: str, caller: Caller
    ) -> dict[str, Any] | None:
        """What is stored of an item, but for its vectors; None if it is not in the index."""
        call = functools.partial(self._item, index, edition, item_id)
        (row,) = await self._items.ask(caller, None, [call])
        return row

    def _item(self, index: str, edition: Edition, item_id: str) -> dict[str, Any] | None:
        previews = self._versions[index].of(edition)
        table = previews.index.items([item_id], ITEM.names)
        (row,) = table.to_pylist() or [None]
        if row is not None:
            row["metadata"] = json.loads(row["metadata"] or "{}")
        return row

    @tells
    async def preview(
        self,
        index: str,
        edition: Edition,
        item_id: str,
        what: str,
        seconds: float | None,
        caller: Caller,
    ) -> tuple[bytes, str]:
        """What an item looks or sounds like: the bytes, and their media type.

        Args:
            what: picture or sound.
            seconds: of the parent, for a frame of what moves.

        Raises:
            SpecError: it has none; for `documents`: its file is gone, or is not the one any more
                that was indexed.
        """
        with logged("preview", what=what):
            call = functools.partial(self._preview, index, edition, item_id, what, seconds)
            (shown,) = await self._shown.ask(caller, None, [call])
            return shown

    def _preview(
        self, index: str, edition: Edition, item_id: str, what: str, seconds: float | None
    ) -> tuple[bytes, str]:
        previews = self._versions[index].of(edition)
        if what == "picture":
            picture = previews.picture(item_id, seconds)
            return picture, _media_type(picture)
        samples, rate, _ = previews.sound(item_id)
        wave = io.BytesIO()
        soundfile.write(wave, samples, rate, format="WAV", subtype="PCM_16")
        return wave.getvalue(), "audio/wav"


def _called(group: None, calls: list[Callable[[], Any]]) -> Generator[None, None, list[Any]]:
    """Work of one slice."""
    yield from ()
    return [call() for call in calls]


def _previews(served: ServedIndex, edition: Edition) -> Previews:
    return Previews(open_edition(served.uri, edition), served.documents, only_indexed=True)


def _media_type(picture: bytes) -> str:
    """Of an encoded picture, by its first bytes.

    >>> _media_type(b"RIFF....WEBP")
    'image/webp'
    """
    if picture.startswith(b"\x89PNG"):
        return "image/png"
    return "image/webp" if picture[8:12] == b"WEBP" else "image/jpeg"
