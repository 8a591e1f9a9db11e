"""What runs behind the gateway: the stages of a search, as classes that know nothing of HTTP.

`pipeline.serve.app` makes deployments of them. A stage gets what it needs in the call, holds what
is dear to load, and answers each request by itself, so that any replica can be asked, or asked
again.

Calls of a stage that come while it is at work are answered together: queries are encoded in one
batch, and vectors are read once for all the queries that ask for them.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import soundfile
import torch
from ray import serve

from pipeline.config import SpecError, digest
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.index.reader import Edition, Index
from pipeline.schema import ITEM, Hit
from pipeline.search.maps import Previews, SimilarityMap, similarity_map
from pipeline.search.queries import Queries, Unencoded, encoded_by
from pipeline.search.searcher import Ranking, Searcher, check_fingerprint, query_encoder
from pipeline.serve.metrics import batch_sizes
from pipeline.serve.settings import Scale, ServedIndex

if TYPE_CHECKING:  # it needs transformers, and the gateway does not
    from pipeline.search.rerank import Reading

log = logging.getLogger("ray.serve")
T = TypeVar("T")

#: Versions of an index that a stage keeps open: the newest, and one whose requests are under way.
OPEN_VERSIONS = 2
#: Calls that are answered together, at most.
MAX_BATCH = 32
#: Characters of queries that are encoded at once: some seconds' work, after which others may come.
PORTION_CHARS = 8_000
#: Pairs of a query and an item that the joint encoder reads at once.
PORTION_PAIRS = 500


@dataclass(frozen=True)
class Failed:
    """What a request of a batch gets in place of an answer: the others have theirs."""

    error: Exception


def answer(outcome: Any) -> Any:
    """The answer of one request of a batch; raises what went wrong with it."""
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome


def tells(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T | Failed]]:
    """A method of a stage that answers what is wrong with a request.

    Raised, it would be an error of the stage in Ray's logs, with all that led to it.
    """

    @functools.wraps(method)
    async def told(*args: Any, **kwargs: Any) -> T | Failed:
        try:
            return await method(*args, **kwargs)
        except SpecError as error:
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


@dataclass(frozen=True)
class Asked:
    """Queries of one request.

    Attributes:
        name: of the representation that they are for.
        about: what that needs of an encoder.
        queries: all of one kind.
        end: when nobody waits for the answer any more, on this process's clock.
    """

    name: str
    about: Mapping[str, Any]
    queries: Sequence[Unencoded]
    end: float


class QueryEncoder:
    """Encodes queries with the encoders of the representations, each loaded once."""

    def __init__(self, scale: Scale, preload: Sequence[Mapping[str, Any]] = ()):
        limit_threads(scale)
        self._sizes = batch_sizes("encode")
        self._encoders: dict[str, Encoder] = {}
        self._lock = threading.Lock()
        for about in preload:
            self._encoder(about)

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    @tells
    async def encode(
        self,
        name: str,
        about: Mapping[str, Any],
        queries: Sequence[Unencoded],
        seconds: float,
    ) -> list[Encoded]:
        """Queries' vectors for a representation.

        Args:
            about: the encoder and the fingerprint of the representation.
            queries: texts, files of pictures, or both together.
            seconds: for which the answer is waited for; nothing is begun after them.

        Raises:
            SpecError: the encoder is not the one that made the representation, or not here.
        """
        with logged("encode", queries=len(queries)):
            end = time.monotonic() + seconds
            return answer(await self._encode(Asked(name, about, queries, end)))

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0, max_concurrent_batches=1)
    async def _encode(self, asked: list[Asked]) -> list[Any]:
        self._sizes.observe(len(asked))
        keys = [(digest(one.about), type(one.queries[0])) for one in asked]
        return await asyncio.to_thread(together, asked, keys, self._encode_all)

    def _encode_all(self, asked: Sequence[Asked]) -> list[list[Encoded] | Failed]:
        encoder = self._encoder(asked[0].about)
        check_fingerprint(encoder, asked[0].name, asked[0].about)
        are_texts = isinstance(asked[0].queries[0], str)
        return in_time(
            [(one.end, one.queries) for one in asked],
            lambda query: len(query) if are_texts else PORTION_CHARS,
            PORTION_CHARS,
            lambda queries: _each(encoded_by(encoder, queries)),
        )

    def _encoder(self, about: Mapping[str, Any]) -> Encoder:
        key = digest(about["encoder"])
        with self._lock:
            if key not in self._encoders:
                self._encoders[key] = query_encoder(about)
            return self._encoders[key]


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


def together(
    asked: Sequence[T], keys: Sequence[Any], do: Callable[[Sequence[T]], Sequence[Any]]
) -> list[Any]:
    """Answers requests of equal keys together; if that fails each alone, so that one spoils none.

    >>> together(["a", "b", "c"], [1, 2, 1], lambda some: [len(some)] * len(some))
    [2, 1, 2]
    """
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    answers: list[Any] = [None] * len(asked)
    for alike in places.values():
        try:
            outcomes = do([asked[i] for i in alike])
        except Exception as error:
            outcomes = [Failed(error)]
            if len(alike) > 1:
                outcomes = [together([asked[i]], [None], do)[0] for i in alike]
        for place, outcome in zip(alike, outcomes, strict=True):
            answers[place] = outcome
    return answers


def in_time(
    asked: Sequence[tuple[float, Sequence[T]]],
    size: Callable[[T], int],
    most: int,
    do: Callable[[list[T]], Sequence[Any]],
) -> list[list[Any] | Failed]:
    """Does what each request asks for while somebody waits for it, in portions.

    Args:
        asked: of each request its end, on this process's clock, and its values.
        size: of a value; those of a portion are not more than `most` in all.
        do: what is done with a portion, a result for each value.
    """
    done: list[list[Any]] = [[] for _ in asked]
    every = [(i, value) for i, (_, values) in enumerate(asked) for value in values]
    for some in portions(every, lambda pair: size(pair[1]), most):
        # Whoever gave up is not to hold up those behind.
        wanted = [(i, value) for i, value in some if time.monotonic() < asked[i][0]]
        if wanted:
            results = do([value for _, value in wanted])
            for (i, _), result in zip(wanted, results, strict=True):
                done[i].append(result)
    too_late = Failed(TimeoutError("it was not done in time"))
    return [
        own if len(own) == len(values) else too_late
        for own, (_, values) in zip(done, asked, strict=True)
    ]


def portions(values: Sequence[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Values in order, so many together as are not larger than `most`, or one."""
    some: list[T] = []
    total = 0
    for value in values:
        if some and total + size(value) > most:
            yield some
            some, total = [], 0
        some.append(value)
        total += size(value)
    if some:
        yield some


def split(values: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Cuts a list into parts.

    >>> split([1, 2, 3], [1, 0, 2])
    [[1], [], [2, 3]]
    """
    rest = iter(values)
    return [list(itertools.islice(rest, size)) for size in sizes]


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
        """What `Searcher.rank` takes."""
        names = "representation", "k", "score", "weights", "group_by", "where", "ids", "parents"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Described:
    """The hits of a query, and their maps where these are asked for."""

    hits: list[Hit]
    maps: list[SimilarityMap | None]


class Ranker:
    """Ranks the items of an index, or of a shard of it, and says what it found.

    As the first stage it searches its shard; as the second it scores the first one's hits again, by
    another representation of all items.
    """

    def __init__(self, served: ServedIndex, scale: Scale, shard: tuple[int, int] | None = None):
        limit_threads(scale)
        self._sizes = batch_sizes("rank")
        self._served, self._shard = served, shard
        self._versions = Versions(self._open)

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    def _open(self, edition: Edition) -> Searcher:
        index = opened(self._served.uri, edition)
        how = {"cache": self._served.cache, "device": self._served.device}
        searcher = Searcher(index, shard=self._shard, **how)
        return searcher

    @tells
    async def prepare(self, edition: Edition, representations: Sequence[str]) -> None:
        """Opens a version and the vectors of some representations, if they are not open."""
        await asyncio.to_thread(self._prepare, edition, representations)

    def _prepare(self, edition: Edition, representations: Sequence[str]) -> None:
        searcher = self._versions.of(edition)
        for name in representations:
            searcher.load(name)

    @tells
    async def rank(self, encoded: Sequence[Encoded], options: Options) -> list[Ranking]:
        """The best items of the shard for each query; `rows` are counted in the shard.

        Raises:
            SpecError: an option is not legal.
        """
        with logged("rank", representation=options.representation, version=options.edition.version):
            return answer(await self._rank((encoded, options)))

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0, max_concurrent_batches=1)
    async def _rank(self, asked: list[tuple[Sequence[Encoded], Options]]) -> list[Any]:
        self._sizes.observe(len(asked))
        keys = [
            (options, any(each.pooled_P is None for each in encoded)) for encoded, options in asked
        ]
        return await asyncio.to_thread(together, asked, keys, self._rank_all)

    def _rank_all(self, asked: Sequence[tuple[Sequence[Encoded], Options]]) -> list[list[Ranking]]:
        options = asked[0][1]
        searcher = self._versions.of(options.edition)
        queries = _joined([each for encoded, _ in asked for each in encoded])
        ready = searcher.transformed(queries, options.representation)
        rankings = searcher.rank(ready, **options.arguments())
        return split(rankings, [len(encoded) for encoded, _ in asked])

    @tells
    async def search(
        self, encoded: Sequence[Encoded], options: Options, explain: str | None
    ) -> list[Described]:
        """`rank` and `describe` in one call, for an index of one shard."""
        about = {"representation": options.representation, "version": options.edition.version}
        with logged("search", queries=len(encoded), **about):
            rankings = answer(await self._rank((encoded, options)))
            return await asyncio.to_thread(self._describe, encoded, options, rankings, explain)

    @tells
    async def describe(
        self,
        encoded: Sequence[Encoded],
        options: Options,
        rankings: Sequence[Ranking],
        explain: str | None,
    ) -> list[Described]:
        """What is stored about ranked items of this shard, and how they match their query."""
        with logged("describe", queries=len(encoded)):
            return await asyncio.to_thread(self._describe, encoded, options, rankings, explain)

    def _describe(
        self,
        encoded: Sequence[Encoded],
        options: Options,
        rankings: Sequence[Ranking],
        explain: str | None,
    ) -> list[Described]:
        searcher = self._versions.of(options.edition)
        name = options.representation
        queries = searcher.transformed(_joined(encoded), name)
        hits = searcher.hits(rankings, queries, name, explain=explain is not None)
        if explain != "map":
            return [Described(own, [None] * len(own)) for own in hits]
        described = []
        for each, own in zip(encoded, hits, strict=True):
            query = searcher.transformed(_joined([each]), name)
            maps = [_map(searcher, query, hit.item_id, name) for hit in own]
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


@dataclass(frozen=True)
class Pooled:
    """Queries of one request, with the items that are read with each.

    Attributes:
        queries: all texts, or all pictures.
        pools: the ids of the items.
        end: when nobody waits for the answer any more, on this process's clock.
    """

    edition: Edition
    queries: Sequence[str] | Sequence[bytes]
    pools: Sequence[list[str]]
    end: float


class JointRanker:
    """Puts the best of the first stage into the order of EDJE's joint encoder, loaded once.

    Raises:
        SpecError: the settings' folder is no EDJE's.
    """

    def __init__(self, served: ServedIndex, scale: Scale):
        from pipeline.search.rerank import Reranker

        limit_threads(scale)
        self._sizes = batch_sizes("edje")
        self._reranker = Reranker(served.edje, precision=served.edje_precision)
        self._versions = Versions(lambda edition: Searcher(opened(served.uri, edition)))

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    @tells
    async def rerank(
        self,
        queries: Sequence[str] | Sequence[bytes],
        rankings: Sequence[Ranking],
        options: JointOptions,
        seconds: float,
    ) -> list[Ranking]:
        """The k best of each query's ranking of the first stage, which say where they stood.

        Args:
            queries: all texts, or all pictures.
            seconds: for which the answer is waited for; nothing is begun after them.

        Raises:
            SpecError: a picture cannot be read; for `edje`: the index has no tokens of this EDJE.
        """
        from pipeline.search.rerank import reordered

        pools = [ranking.item_ids[: options.pool] for ranking in rankings]
        read = await self._read_in_time(options.edition, queries, pools, seconds)
        how = options.pool, options.add_first_stage, options.k
        return [reordered(*each, *how) for each in zip(queries, rankings, read, strict=True)]

    @tells
    async def read(
        self, edition: Edition, query: str | bytes, item_ids: list[str], seconds: float
    ) -> dict[str, Reading]:
        """What the joint encoder says of items, but of those that it cannot read; see `rerank`."""
        (found,) = await self._read_in_time(edition, [query], [item_ids], seconds)
        return found

    async def _read_in_time(
        self, edition: Edition, queries: Any, pools: Sequence[list[str]], seconds: float
    ) -> list[dict[str, Reading]]:
        with logged("edje", queries=len(queries), version=edition.version):
            end = time.monotonic() + seconds
            try:
                return answer(await self._read(Pooled(edition, queries, pools, end)))
            except SpecError as error:
                if error.field in ("query", "index"):
                    raise
                # Of the EDJE, its encoder or its tokens: the caller can do nothing about it.
                log.error("edje: %s", error)
                raise SpecError("edje", error.value, error.legal, error.problem) from None

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0, max_concurrent_batches=1)
    async def _read(self, asked: list[Pooled]) -> list[Any]:
        self._sizes.observe(len(asked))
        keys = [(one.edition, type(one.queries[0])) for one in asked]
        return await asyncio.to_thread(together, asked, keys, self._read_all)

    def _read_all(self, asked: Sequence[Pooled]) -> list[list[dict[str, Reading]] | Failed]:
        searcher = self._versions.of(asked[0].edition)
        self._reranker.check(searcher.index, asked[0].queries)
        return in_time(
            [(one.end, list(zip(one.queries, one.pools, strict=True))) for one in asked],
            lambda pair: len(pair[1]),
            PORTION_PAIRS,
            lambda pairs: self._reranker.read(searcher, *map(list, zip(*pairs, strict=True))),
        )


class Library:
    """What is stored of single items, and what they look and sound like."""

    def __init__(self, indexes: Mapping[str, ServedIndex]):
        self._indexes = indexes
        self._versions = {
            name: Versions(functools.partial(_previews, served)) for name, served in indexes.items()
        }

    async def is_there(self) -> bool:
        """Whether it answers."""
        return True

    @tells
    async def item(self, index: str, edition: Edition, item_id: str) -> dict[str, Any] | None:
        """What is stored of an item, but for its vectors; None if it is not in the index."""
        return await asyncio.to_thread(self._item, index, edition, item_id)

    def _item(self, index: str, edition: Edition, item_id: str) -> dict[str, Any] | None:
        previews = self._versions[index].of(edition)
        table = previews.index.items([item_id], ITEM.names)
        (row,) = table.to_pylist() or [None]
        if row is not None:
            row["metadata"] = json.loads(row["metadata"] or "{}")
        return row

    @tells
    async def preview(
        self, index: str, edition: Edition, item_id: str, what: str, seconds: float | None
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
            return await asyncio.to_thread(self._preview, index, edition, item_id, what, seconds)

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


def opened(uri: str, edition: Edition) -> Index:
    """A version of an index.

    Raises:
        SpecError: it is not there any more; another index may be in its place.
    """
    index = Index(uri, edition.version)
    if index.edition != edition:
        raise SpecError("index", uri, "the index that is served", "is another one now")
    return index


def _previews(served: ServedIndex, edition: Edition) -> Previews:
    return Previews(opened(served.uri, edition), served.documents, only_indexed=True)


def _media_type(picture: bytes) -> str:
    """Of an encoded picture, by its first bytes.

    >>> _media_type(b"RIFF....WEBP")
    'image/webp'
    """
    if picture.startswith(b"\x89PNG"):
        return "image/png"
    return "image/webp" if picture[8:12] == b"WEBP" else "image/jpeg"
