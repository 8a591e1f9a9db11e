"""A search from its request to its answer: asks the stages in turn, and copes when one fails.

It knows which version of each index is served. A request is about one version from its beginning to
its end; a new one is opened by the stages first, and requests go there when it is ready.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar, get_args

import numpy as np
from PIL import Image
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponse

from pipeline.config import SpecError
from pipeline.encoders import QUERY_KINDS, not_read
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Edition, Index
from pipeline.schema import Composed, Reranked
from pipeline.schema import Hit as Found
from pipeline.search.maps import SimilarityMap
from pipeline.search.queries import Unencoded, bad_query
from pipeline.search.searcher import Ranking, Searcher, check_texts
from pipeline.search.shards import merge_rankings
from pipeline.serve import wire
from pipeline.serve.errors import ApiError, of_spec_error
from pipeline.serve.settings import ServedIndex, ServeSpec
from pipeline.serve.stages import Encoded, JointOptions, Options, answer
from pipeline.serve.turns import Caller, all_of

log = logging.getLogger("ray.serve")
T = TypeVar("T")

#: Seconds before a stage is asked again whose replica died.
ASK_AGAIN = 0.2
#: Seconds in which a stage says that it is there.
READY_SECONDS = 5.0
#: Rows of shard i are counted from i times this on, where rankings of shards are merged.
SHARD_ROWS = 1 << 40
#: What the second stage is called in metrics and in `milliseconds`.
STAGE_OF = {"vectors": "rerank", "edje": "edje"}


class Handle(Protocol):
    """What Ray gives to call a deployment: `handle.method.remote(...)` is awaited."""

    def __getattr__(self, method: str) -> Any: ...


@dataclass(frozen=True)
class Stages:
    """Handles of what the engine asks.

    Attributes:
        searchers: of each index its shards, in order.
        rerankers: of each index.
        edjes: of each index that is served with one.
    """

    encoder: Handle
    searchers: Mapping[str, Sequence[Handle]]
    rerankers: Mapping[str, Handle]
    edjes: Mapping[str, Handle]
    library: Handle


class Timer:
    """Milliseconds by stage of one request."""

    def __init__(self, observe: Callable[[str, float], None]):
        self.start = time.perf_counter()
        self.milliseconds: dict[str, float] = {}
        self._observe = observe

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts what is done in it as a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._observe(name, seconds)
            self.milliseconds[name] = round(self.milliseconds.get(name, 0.0) + 1e3 * seconds, 3)

    def all(self) -> dict[str, float]:
        """The stages, and the whole."""
        total = round(1e3 * (time.perf_counter() - self.start), 3)
        return {**self.milliseconds, "total": total}


@dataclass(frozen=True)
class Served:
    """A version of an index as the engine knows it: what it holds, not its vectors."""

    name: str
    spec: ServedIndex
    searcher: Searcher

    edition: Edition

    @property
    def version(self) -> int:
        """The Lance version."""
        return self.edition.version

    def representation(self, name: str | None) -> tuple[str, RepresentationInfo]:
        """The name and metadata of a representation that can be searched.

        Raises:
            ApiError: there is none.
        """
        try:
            return self.searcher.representation(name)
        except SpecError as error:
            if error.field == "index":
                message = f"index {self.name} has no representation yet"
                raise ApiError("unavailable", message) from None
            raise of_spec_error(error) from None


@dataclass
class _Outcome:
    """What a search found before it is described."""

    ranking: Ranking
    options: Options
    encoded: Encoded
    stood: dict[str, Reranked] = field(default_factory=dict)  # by item, where it was reranked


class Engine:
    """Answers requests by asking the stages.

    Args:
        settings: of the server.
        stages: where they are asked.
        observe: told the seconds of each stage of each request.
        count: told what happened besides: "retry", "degraded", by stage.
    """

    def __init__(
        self,
        settings: ServeSpec,
        stages: Stages,
        observe: Callable[[str, float], None] = lambda stage, seconds: None,
        count: Callable[[str, str], None] = lambda what, stage: None,
    ):
        self.settings, self._stages = settings, stages
        self._observe, self._count = observe, count
        self._served: dict[str, Served] = {}
        self._refreshing: asyncio.Task | None = None
        self._checking: asyncio.Task | None = None

    # -- indexes -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens what each index is served with, and goes on looking for new versions.

        Raises:
            SpecError: an index is not there.
        """
        for name in self.settings.indexes:
            await self._refresh(name)
        self._refreshing = asyncio.create_task(self._keep_fresh())

    async def stop(self) -> None:
        """Looks for new versions no longer."""
        if self._refreshing:
            self._refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refreshing

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self.settings.seconds.reload)
            for name in self.settings.indexes:
                try:
                    await self._refresh(name)
                except Exception as error:  # the version that is there goes on being served
                    self._count("reload_failed", "gateway")
                    log.warning("index %s: no new version is served: %s", name, error)

    async def _refresh(self, name: str) -> None:
        """Serves the newest version of an index, once every shard has it open."""
        spec = self.settings.indexes[name]
        now = self._served.get(name)
        served = await asyncio.to_thread(_newest, name, spec, now)
        if served is None:
            return
        there = served.searcher.index.representations()
        wanted = [n for n in spec.load if n in there]
        if there and not spec.load:
            wanted = [served.representation(None)[0]]
        shards = self._stages.searchers[name]
        opened = await asyncio.gather(*(s.prepare.remote(served.edition, wanted) for s in shards))
        for each in opened:
            answer(each)
        self._served[name] = served
        if now is not None:
            log.info("index %s: version %d is served now", name, served.version)

    def served(self, name: str) -> Served:
        """The index of that name, in the version that is served now."""
        return self._served[name]

    @property
    def names(self) -> list[str]:
        """Of the indexes."""
        return list(self._served)

    # -- requests ----------------------------------------------------------------------------------

    async def search(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        asked: wire.SearchOptions,
        timer: Timer,
        key: str,
    ) -> tuple[str, bool, list[list[wire.Hit]], list[str]]:
        """Searches for each query.

        Args:
            key: name of the access key, here and below: the stages share their time among keys.

        Returns:
            The representation, whether hits were reranked, those of each query, and warnings.
        """
        name, info = served.representation(asked.representation)
        options = _options(served, name, asked)
        depth = max(asked.rerank.pool, asked.k) if asked.rerank else asked.k
        again = self._again(served, queries, asked, key) if asked.rerank else None
        with timer.stage("encode"):
            encoded = await self.encode(queries, name, info, key)
        if again is None and len(self._stages.searchers[served.name]) == 1:
            with timer.stage("search"):
                hits = await self._search(served, encoded, options, asked, key)
            return name, False, hits, []
        with timer.stage("search"):
            rankings = await self._rank(served, encoded, replace(options, k=depth), key)
        outcomes = [
            _Outcome(ranking, options, e) for ranking, e in zip(rankings, encoded, strict=True)
        ]
        reranked, warnings = False, []
        if again is not None:
            stage = STAGE_OF[asked.rerank.by]
            try:
                with timer.stage(stage):
                    outcomes = await again(outcomes)
                reranked = True
            except ApiError as error:
                if not asked.rerank.optional or error.code not in ("unavailable", "timeout"):
                    raise
                self._count("degraded", stage)
                warnings.append(f"not reranked: {error.message}")
                outcomes = [
                    replace(o, ranking=o.ranking.taken(range(min(asked.k, len(o.ranking.rows)))))
                    for o in outcomes
                ]
        with timer.stage("describe"):
            hits = await self._describe(served, outcomes, asked, key)
        if asked.rerank and asked.rerank.by == "edje":
            cut = [max((h.edje.num_cut for h in own if h.edje), default=0) for own in hits]
            warnings += _too_long(queries, cut)
        return name, reranked, hits, warnings

    def _again(
        self, served: Served, queries: Sequence[wire.Query], asked: wire.SearchOptions, key: str
    ) -> Callable[[Sequence[_Outcome]], Awaitable[list[_Outcome]]]:
        """What reranks, after a look at whether it can.

        Raises:
            ApiError: it cannot.
        """
        if asked.rerank.by == "edje":
            self._check_edje(served, queries, "rerank.by")
            return lambda outcomes: self._rerank_jointly(served, queries, outcomes, asked, key)
        second = self._second(served, asked.rerank)
        return lambda outcomes: self._rerank(served, queries, outcomes, second, asked, key)

    def _check_edje(self, served: Served, queries: Sequence[wire.Query], field: str) -> None:
        if served.name not in self._stages.edjes:
            legal = f"vectors; edje where the server has a folder in indexes.{served.name}.edje"
            message = f"{field}: 'edje' is not there for {served.name}; legal: {legal}"
            raise ApiError("invalid_argument", message, field)
        for place, query in enumerate(queries):
            if isinstance(query, wire.Vectors | wire.Composed):
                kind = wire.kind_of(query)
                legal = "a text or a picture, which alone edje reads"
                error = bad_query(QUERY_KINDS.get(kind, kind), legal, place, len(queries))
                raise of_spec_error(error)

    def _second(self, served: Served, asked: wire.Rerank) -> tuple[str, RepresentationInfo]:
        try:
            return served.representation(asked.representation)
        except ApiError as error:
            raise ApiError(error.code, f"rerank.{error.message}", "rerank.representation") from None

    async def encode(
        self, queries: Sequence[wire.Query], name: str, info: RepresentationInfo, key: str
    ) -> list[Encoded]:
        """Queries as vectors for a representation.

        Raises:
            ApiError: one is none, or the encoder does not take it.
        """
        try:
            read = [await asyncio.to_thread(self._read, q, name, info) for q in queries]
        except SpecError as error:
            raise of_spec_error(error) from None
        ready = {place: each for place, each in enumerate(read) if isinstance(each, Encoded)}
        for kind in get_args(Unencoded):  # which an encoder reads apart
            places = [place for place, each in enumerate(read) if isinstance(each, kind)]
            if places:
                some = [read[place] for place in places]
                found = await self._encode(some, name, info, key)
                ready |= zip(places, found, strict=True)
        return [ready[place] for place in range(len(queries))]

    async def _encode(
        self, queries: Sequence[Unencoded], name: str, info: RepresentationInfo, key: str
    ) -> list[Encoded]:
        call = self._stages.encoder.encode.remote
        return await self.ask(
            "encode",
            lambda caller: call(name, info.encoder, queries, caller),
            Caller(key, self.settings.seconds.encode),
        )

    def _read(self, query: wire.Query, name: str, info: RepresentationInfo) -> Encoded | Unencoded:
        """A query as vectors; or what an encoder reads, after a look at whether it is that.

        Raises:
            SpecError: it is no query, or none for the encoder.
        """
        if isinstance(query, wire.Vectors):
            return Encoded.of_vectors(query.vectors)
        written = self._written(query)
        kind = {bytes: "image", Composed: "composed"}.get(type(written))
        if kind and kind not in (kinds := info.encoder.query_kinds):
            raise not_read(kind, kinds, f"the encoder of {name}")
        return written

    def _written(self, query: str | wire.Image) -> Unencoded:
        """A query that is no vectors, after a look at whether it is one.

        Raises:
            SpecError: it is none.
        """
        limits = self.settings.limits
        text = wire.text_of(query)
        if text is not None:
            if len(text) > limits.query_chars:
                legal = f"{limits.query_chars:,} at most"
                raise SpecError("query", f"{len(text):,} characters", legal, "are too many")
            check_texts([text])
        if not isinstance(query, wire.Image):
            return text
        picture = _image_of(query, limits.image_pixels)
        return picture if text is None else Composed(text, picture)

    async def check(self) -> None:
        """Asks every stage whether it is there, once for all who want to know at the moment.

        Raises:
            ApiError: one is not.
        """
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        caller = Caller("", READY_SECONDS)
        handles = {"encode": [self._stages.encoder], "library": [self._stages.library]}
        handles |= {f"edje {name}": [stage] for name, stage in self._stages.edjes.items()}
        for name, shards in self._stages.searchers.items():
            handles[f"search {name}"] = list(shards)
            handles[f"rerank {name}"] = [self._stages.rerankers[name]]
        await all_of(
            self.ask(stage, lambda _, handle=handle: handle.is_there.remote(), caller)
            for stage, several in handles.items()
            for handle in several
        )

    async def _search(
        self,
        served: Served,
        encoded: Sequence[Encoded],
        options: Options,
        asked: wire.SearchOptions,
        key: str,
    ) -> list[list[wire.Hit]]:
        """The hits of the only shard, ranked and described in one call."""
        seconds = self.settings.seconds.search + self.settings.seconds.describe
        (shard,) = self._stages.searchers[served.name]
        described = await self.ask(
            "search",
            lambda caller: shard.search.remote(encoded, options, asked.explain, caller),
            Caller(key, seconds),
        )
        return [
            [
                _hit(hit, rank, None, drawn, asked)
                for rank, (hit, drawn) in enumerate(zip(own.hits, own.maps, strict=True), start=1)
            ]
            for own in described
        ]

    async def _rank(
        self, served: Served, encoded: Sequence[Encoded], options: Options, key: str
    ) -> list[Ranking]:
        """The best items of all shards for each query."""
        caller = Caller(key, self.settings.seconds.search)
        by_shard = await all_of(
            self.ask("search", lambda own, s=shard: s.rank.remote(encoded, options, own), caller)
            for shard in self._stages.searchers[served.name]
        )
        if len(by_shard) == 1:
            return by_shard[0]
        counted = [
            [replace(ranking, rows=ranking.rows + i * SHARD_ROWS) for ranking in rankings]
            for i, rankings in enumerate(by_shard)
        ]
        merged = zip(*counted, strict=True)
        return [merge_rankings(each, options.k, options.group_by) for each in merged]

    async def _rerank(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        outcomes: Sequence[_Outcome],
        second: tuple[str, RepresentationInfo],
        asked: wire.SearchOptions,
        key: str,
    ) -> list[_Outcome]:
        """Scores the hits again; those of which the second stage has no vectors are left out."""
        _, info = served.representation(outcomes[0].options.representation)
        encoded: Sequence[Encoded] | None = [outcome.encoded for outcome in outcomes]
        again = second[1].encoder
        if (info.encoder.spec, info.encoder.fingerprint) != (again.spec, again.fingerprint):
            encoded = None
        found = [outcome.ranking.item_ids for outcome in outcomes]
        scores = await self.score_again(served, queries, encoded, second, found, key)
        return [
            _in_order(outcome, own, asked.k) for outcome, own in zip(outcomes, scores, strict=True)
        ]

    async def _rerank_jointly(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        outcomes: Sequence[_Outcome],
        asked: wire.SearchOptions,
        key: str,
    ) -> list[_Outcome]:
        """Puts the pools into the order of EDJE's joint encoder, texts and pictures apart."""
        second, caller = asked.rerank, Caller(key, self.settings.seconds.rerank)
        options = JointOptions(served.edition, asked.k, second.pool, second.add_first_stage)
        rerank = self._stages.edjes[served.name].rerank.remote
        written = [await asyncio.to_thread(self._written, query) for query in queries]
        places = [[i for i, one in enumerate(written) if isinstance(one, k)] for k in (str, bytes)]
        given = [
            ([written[i] for i in own], [outcomes[i].ranking for i in own]) for own in places if own
        ]
        parts = await all_of(
            self.ask("edje", lambda caller, own=own: rerank(*own, options, caller), caller)
            for own in given
        )
        found = dict(zip(itertools.chain(*places), itertools.chain(*parts), strict=True))
        return [
            replace(
                outcome,
                ranking=found[i],
                stood=dict(zip(found[i].item_ids, found[i].reranked, strict=True)),
            )
            for i, outcome in enumerate(outcomes)
        ]

    async def read_jointly(
        self, served: Served, query: wire.Query, item_ids: Sequence[str], key: str
    ) -> tuple[dict[str, float], list[str]]:
        """EDJE's logits of some items, best first, but for those that it cannot read; warnings.

        Raises:
            ApiError: the index is served without one, or the query is no text or picture.
        """
        self._check_edje(served, [query], "by")
        try:
            written = await asyncio.to_thread(self._written, query)
        except SpecError as error:
            raise of_spec_error(error) from None
        unique = list(dict.fromkeys(item_ids))
        read = self._stages.edjes[served.name].read.remote
        found = await self.ask(
            "edje",
            lambda caller: read(served.edition, written, unique, caller),
            Caller(key, self.settings.seconds.rerank),
        )
        best = sorted(found, key=lambda item_id: (-found[item_id][0], item_id))
        cut = max((num_cut for _, num_cut in found.values()), default=0)
        return {item_id: found[item_id][0] for item_id in best}, _too_long([query], [cut])

    async def score_again(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        encoded: Sequence[Encoded] | None,
        second: tuple[str, RepresentationInfo],
        item_ids: Sequence[Sequence[str]],
        key: str,
    ) -> list[dict[str, float]]:
        """Exact late scores of some items of each query; those without vectors are left out.

        Args:
            encoded: the queries as the first stage had them, where both have one encoder.
            second: the representation by which they are scored.
        """
        name, info = second
        if encoded is None:
            encoded = await self.encode(queries, name, info, key)
        unique = [tuple(dict.fromkeys(own)) for own in item_ids]
        options = [Options(served.edition, name, k=max(len(own), 1), ids=own) for own in unique]
        rank = self._stages.rerankers[served.name].rank_each.remote
        rankings = await self.ask(
            "rerank",
            lambda caller: rank(encoded, options, caller),
            Caller(key, self.settings.seconds.rerank),
        )
        return [ranking.scores_by_item() for ranking in rankings]

    async def _describe(
        self, served: Served, outcomes: Sequence[_Outcome], asked: wire.SearchOptions, key: str
    ) -> list[list[wire.Hit]]:
        """The hits of each query, each described by the shard it lies in."""
        shards = self._stages.searchers[served.name]
        encoded, options = [o.encoded for o in outcomes], outcomes[0].options
        # Of each shard its places in the ranking of each query.
        places = [
            [np.flatnonzero(o.ranking.rows // SHARD_ROWS == i).tolist() for o in outcomes]
            for i in range(len(shards))
        ]
        holding = [i for i, own in enumerate(places) if any(own)]
        parts = await all_of(
            self.ask(
                "describe",
                lambda caller, i=i: shards[i].describe.remote(
                    encoded,
                    options,
                    [_of_shard(o.ranking, p) for o, p in zip(outcomes, places[i], strict=True)],
                    asked.explain,
                    caller,
                ),
                Caller(key, self.settings.seconds.describe),
            )
            for i in holding
        )
        hits: list[dict[int, wire.Hit]] = [{} for _ in outcomes]
        for i, described in zip(holding, parts, strict=True):
            for query, (own, places_of) in enumerate(zip(described, places[i], strict=True)):
                for place, hit, drawn in zip(places_of, own.hits, own.maps, strict=True):
                    stood = outcomes[query].stood.get(hit.item_id)
                    hits[query][place] = _hit(hit, place + 1, stood, drawn, asked)
        return [[found[place] for place in sorted(found)] for found in hits]

    async def item(self, served: Served, item_id: str, key: str) -> dict[str, Any] | None:
        """What is stored of an item; None if it is not in the index."""
        look_up = self._stages.library.item.remote
        return await self.ask(
            "item",
            lambda caller: look_up(served.name, served.edition, item_id, caller),
            Caller(key, self.settings.seconds.describe),
        )

    async def preview(
        self, served: Served, item_id: str, what: str, seconds: float | None, key: str
    ) -> tuple[bytes, str]:
        """What an item looks or sounds like.

        Raises:
            ApiError: it has none, or its file is not there any more.
        """
        where = served.name, served.edition, item_id, what, seconds
        try:
            return await self.ask(
                "preview",
                lambda caller: self._stages.library.preview.remote(*where, caller),
                Caller(key, self.settings.seconds.preview),
            )
        except ApiError as error:
            if error.field == "item_id":  # there is no such item, or it has none
                raise ApiError("not_found", error.message, error.field) from None
            raise

    async def ask(
        self, stage: str, call: Callable[[Caller], DeploymentResponse], caller: Caller
    ) -> Any:
        """What a stage answers; it is asked once more if its replica died.

        Args:
            call: Calls the stage, on behalf of the caller with the time that is left.

        Raises:
            ApiError: what the stage says of the request; or it is overloaded, gone, or too slow.
        """
        end = time.monotonic() + caller.seconds
        for attempt in (1, 2):
            left = end - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    return answer(await _cancelling(call(caller._replace(seconds=left))))
            except BackPressureError:
                raise ApiError("unavailable", f"{stage} has too much to do") from None
            except RayTaskError:
                raise
            except TimeoutError as error:
                message = str(error) or f"{stage} took longer than {caller.seconds:g} s"
                raise ApiError("timeout", message) from None
            except SpecError as error:
                raise of_spec_error(error) from None
            except (RayError, DeploymentUnavailableError) as error:
                if attempt == 2:
                    message = f"{stage} is not there at the moment"
                    raise ApiError("unavailable", message) from error
                self._count("retry", stage)
                await asyncio.sleep(ASK_AGAIN)
        raise AssertionError


async def _cancelling(response: DeploymentResponse) -> Any:
    """The answer of a stage, whose work is cancelled with the waiting."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


def _newest(name: str, spec: ServedIndex, now: Served | None) -> Served | None:
    """The newest version of an index; None if it is the one that is served."""
    index = Index(spec.uri)
    edition = index.edition
    if now is not None and edition == now.edition:
        return None
    return Served(name, spec, Searcher(index), edition)


def _options(served: Served, name: str, asked: wire.SearchOptions) -> Options:
    return Options(
        edition=served.edition,
        representation=name,
        k=asked.k,
        score=asked.score,
        weights=tuple(asked.weights),
        group_by=asked.group_by,
        where=asked.filter,
        ids=None if asked.ids is None else tuple(asked.ids),
        parents=None if asked.parents is None else tuple(asked.parents),
    )


def _in_order(outcome: _Outcome, scores: Mapping[str, float], k: int) -> _Outcome:
    """The k best of a query's hits by the scores of the second stage."""
    first = outcome.ranking
    scored = [i for i, item_id in enumerate(first.item_ids) if item_id in scores]
    order = sorted(scored, key=lambda i: (-scores[first.item_ids[i]], first.item_ids[i]))
    again = first.taken(order[:k])
    again = replace(again, scores=[scores[item_id] for item_id in again.item_ids])
    stood = {
        item_id: Reranked(i + 1, score)
        for i, (item_id, score) in enumerate(zip(first.item_ids, first.scores, strict=True))
    }
    return replace(outcome, ranking=again, stood=stood)


def _of_shard(ranking: Ranking, places: Sequence[int]) -> Ranking:
    """Some items of a ranking, all of one shard, as that shard counts them."""
    chosen = ranking.taken(places)
    return replace(chosen, rows=chosen.rows % SHARD_ROWS)


def _hit(
    hit: Found,
    rank: int,
    stood: Reranked | None,
    drawn: SimilarityMap | None,
    asked: wire.SearchOptions,
) -> wire.Hit:
    """A hit as it travels."""
    first = joint = None
    if stood is not None:
        first = wire.FirstStage(rank=stood.first_rank, score=stood.first_score)
        if asked.rerank.by == "edje":
            joint = wire.Joint(
                logit=stood.joint, num_cut=stood.num_cut, problem=stood.problem or None
            )
    matches = [wire.Match.model_validate(asdict(match)) for match in hit.matches]
    passages = [wire.Passage.model_validate(asdict(passage)) for passage in hit.passages]
    return wire.Hit(
        rank=rank,
        score=hit.score,
        item_id=hit.item_id,
        parent_id=hit.parent_id,
        title=hit.title,
        text=hit.text,
        span=hit.span,
        parts=wire.Parts.model_validate(asdict(hit.parts)),
        first_stage=first,
        edje=joint,
        matches=matches if asked.explain else None,
        passages=passages if asked.explain else None,
        map=wire.Map.model_validate_json(drawn.to_json()) if drawn else None,
    )


def _too_long(queries: Sequence[wire.Query], cuts: Sequence[int]) -> list[str]:
    """Warns where EDJE did not read a text to its end: a query, or for a picture a hit's.

    >>> _too_long(["a", "b", wire.Image(image="AA")], [0, 4, 0])
    ['queries are up to 4 tokens longer than what EDJE reads: these are cut']
    """
    warnings = []
    for what, are_texts in (("queries", True), ("texts of hits", False)):
        own = [n for q, n in zip(queries, cuts, strict=True) if isinstance(q, str) is are_texts]
        if most := max(own, default=0):
            said = f"{what} are up to {most} tokens longer than what EDJE reads: these are cut"
            warnings.append(said)
    return warnings


def _image_of(query: wire.Image, most_pixels: int) -> bytes:
    """The file of a query's image.

    Raises:
        SpecError: it is none, or larger than it may be.
    """
    legal = f"a PNG, JPEG or WebP file in base64, of {most_pixels:,} pixels at most"
    try:
        data = base64.b64decode(query.image, validate=True)
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
            width, height = image.size
    except (binascii.Error, ValueError, OSError, Image.DecompressionBombError):
        raise SpecError("query.image", "the image", legal, "cannot be read") from None
    if width * height > most_pixels:
        raise SpecError("query.image", f"{width} x {height} pixels", legal)
    return data
