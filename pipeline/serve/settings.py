"""Settings of a server, which are the argument of `pipeline.serve.app:build`."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from pipeline.config import Spec, SpecError, absolute, within
from pipeline.paths import is_uri
from pipeline.registry import BenchmarkSpec, RerankerSpecs
from pipeline.search.federation import FederationSpec, Member
from pipeline.search.fusion import DEFAULT_FUSION, FusionSpec

#: Pattern of names used in URLs, metrics and the names of deployments.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Scale(Spec):
    """Replicas and resources of a deployment, named as in Ray Serve."""

    num_replicas: PositiveInt = 1
    """Number of replicas. The minimum if `max_replicas` is set."""
    max_replicas: PositiveInt | None = None
    """Maximum number of replicas under load. Null disables autoscaling."""
    target_ongoing_requests: PositiveFloat = 8
    """Target for the average number of requests in progress per replica."""
    target_queueing_delay_s: PositiveFloat | None = None
    """Target for the mean time that calls wait in a replica before their computation starts, in
    seconds. If set, it replaces `target_ongoing_requests`. Not available for the gateway."""
    upscale_delay_s: NonNegativeFloat = 30
    """Time for which the load must exceed the target before replicas are added, in seconds."""
    downscale_delay_s: NonNegativeFloat = 600
    """Time for which fewer replicas must suffice before replicas are removed, in seconds."""
    num_cpus: NonNegativeFloat = 0.1
    """CPUs that Ray reserves per replica. The default lets a laptop run all deployments."""
    num_gpus: NonNegativeFloat = 0
    """GPUs that Ray reserves per replica."""
    num_threads: PositiveInt | None = None
    """Number of PyTorch threads per replica. If null, the number of cores is used."""
    max_ongoing_requests: PositiveInt = 256
    """Maximum number of calls in progress per replica, which are scheduled fairly among keys."""
    max_queued_requests: PositiveInt = 64
    """Maximum number of calls that wait for a replica. Further calls are rejected (503)."""

    @model_validator(mode="after")
    def _check_autoscaling(self) -> Scale:
        maximum, delay = self.max_replicas, self.target_queueing_delay_s
        is_valid = maximum is None or maximum >= self.num_replicas
        self.require(is_valid, "max_replicas", f"at least num_replicas, {self.num_replicas}")
        is_valid = maximum is not None or delay is None
        self.require(is_valid, "target_queueing_delay_s", "null without max_replicas")
        return self

    @property
    def max_num_replicas(self) -> int:
        """Largest number of replicas, with or without autoscaling."""
        return self.max_replicas or self.num_replicas


class ServedCandidates(Spec):
    """Default candidate generator of a representation."""

    generator: str
    """Name of the generator, that `maxray add` built, `single` for the single vectors, or
    `exact`."""
    num_candidates: PositiveInt | None = None
    """Number of candidates per query and shard, or `k` of the request if that is more. Null: the
    default of a search."""


class ServedExample(Spec):
    """Example query for a representation."""

    query: str
    """Text of the query."""
    representation: str | None = None
    """Name of the representation that answers it, or null for the default one."""


class ServedIndex(Spec):
    """Served index."""

    uri: str
    """URI of the index. Every node of the cluster must be able to read it."""
    num_shards: PositiveInt = 1
    """Number of shards, each with a deployment of its own. A search queries all of them."""
    gang: bool = False
    """Schedules the shards together: their replicas form gangs of one replica per shard, which
    start and stop together. See docs/reference/operations.md for the consequences."""
    cache: bool = True
    """Packs the vectors into local files that are memory-mapped."""
    device: str = "cpu"
    """Device used for scoring: `cpu`, `cuda` or `cuda:N`."""
    preload: list[str] = Field(default_factory=list)
    """Representations that are loaded before the first request. If empty, the default one is
    loaded. Other representations are loaded at the first request that uses them."""
    candidates: dict[str, ServedCandidates] = Field(default_factory=dict)
    """Candidate generators of requests that do not set `candidates`, by representation. They also
    apply to prefixes of the representation. All items are scored while the served version of the
    index lacks the generator. Other representations have the default of a search."""
    documents: dict[str, str] = Field(default_factory=dict)
    """Current location of the files of each collection that has been moved, by collection name."""
    fusion: FusionSpec = DEFAULT_FUSION
    """Settings of the fused score for requests that set none: a mapping, or the path of a file that
    `jobs.evaluate --fit-fusion` wrote."""
    examples: list[ServedExample] = Field(default_factory=list)
    """Example queries that the search page offers: texts, or mappings with `query` and
    `representation`. If empty, short texts of some items are offered."""
    rerank: RerankerSpecs = Field(default_factory=list)
    """Rerankers that requests can name by their `label` or `name`: one or a list, see
    docs/tutorials/reranking.md."""

    @model_validator(mode="after")
    def _check_hardware(self) -> ServedIndex:
        is_device = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        self.require(is_device, "device", "cpu, cuda or cuda:N")
        titles = list(self.rerankers)
        is_unique = len(titles) == len(self.rerank) and "vectors" not in titles
        self.require(is_unique, "rerank", "rerankers with different labels other than vectors")
        is_valid = self.num_shards > 1 or not self.gang
        self.require(is_valid, "gang", "false for an index with one shard")
        return self

    @property
    def rerankers(self) -> dict[str, Any]:
        """Specs of the rerankers by their names in requests."""
        specs: list[Any] = self.rerank
        return {spec.title: spec for spec in specs}


#: Maximum length of the text of a query, in characters.
MAX_QUERY_CHARS = 4_000
#: Maximum size of a query image, in pixels.
MAX_IMAGE_PIXELS = 50_000_000
#: Maximum total number of hits per request.
MAX_BATCH_HITS = 20_000
#: Maximum number of queued evaluations per access key.
MAX_QUEUED_PER_KEY = 8


class Limits(Spec):
    """Limits per request and per access key."""

    max_body_bytes: PositiveInt = 8 << 20
    """Maximum size of a request body, in bytes."""
    max_batch_chars: PositiveInt = 40_000
    """Maximum total length of the query texts of a request, in characters."""
    max_k: PositiveInt = 1_000
    """Maximum number of hits per query."""
    max_batch_queries: PositiveInt = 128
    """Maximum number of queries per request."""
    max_rerank_pairs: PositiveInt = 2_000
    """Maximum number of (query, item) pairs per request that rerankers read."""
    max_in_flight_requests: PositiveInt = 128
    """Maximum number of requests in progress per gateway. Further requests are rejected (503).
    Access keys share these slots: a key gets another slot while it holds fewer than are free, so
    one key holds at most half of the slots, and two keys a third each."""
    max_pending_bodies: PositiveInt = 128
    """Maximum number of requests per gateway with incomplete bodies. Access keys share these
    slots in the same way."""
    requests_per_second: PositiveFloat | None = None
    """Rate limit per access key, which all gateways share. Null means unlimited. An access key can
    override it."""
    burst: PositiveInt = 20
    """Number of requests that a key can send in a burst before the rate limit applies. All gateways
    share it."""


class Timeouts(Spec):
    """Time limits for shutdown and for the stages of a request, including queueing."""

    encode_s: PositiveFloat = 10
    """Time limit for encoding the queries, in seconds."""
    media_s: PositiveFloat = 60
    """Time limit for decoding and encoding queries with images, audio or videos, in seconds. Speech
    recognition takes about 0.6 s per second of audio."""
    search_s: PositiveFloat = 20
    """Time limit for the search, in seconds."""
    filter_s: PositiveFloat = 5
    """Time limit for evaluating a filter, in seconds; part of `search_s`. The process that
    evaluates a filter is killed when the time limit has passed."""
    rerank_s: PositiveFloat = 20
    """Time limit of each reranking, by vectors or by a model, in seconds."""
    describe_s: PositiveFloat = 10
    """Time limit for reading the metadata and explanations of the hits, in seconds."""
    member_s: PositiveFloat = 10
    """Time limit for each member of a federation, and again for describing its hits, in seconds. A
    member that takes longer is left out."""
    preview_s: PositiveFloat = 30
    """Time limit for creating a preview, in seconds."""
    delete_s: PositiveFloat = 60
    """Time limit for a deletion, in seconds. A deletion that has started continues after it."""
    body_s: PositiveFloat = 30
    """Time limit for receiving the body of a request, in seconds."""
    drain_s: PositiveFloat = 30
    """Time limit for finishing the requests in progress when a replica shuts down, in seconds."""

    @property
    def request_s(self) -> float:
        """Sum of the time limits of a search, in seconds. Reranking may encode queries twice."""
        encode_s = max(self.encode_s, self.media_s)
        return 2 * encode_s + self.search_s + self.rerank_s + self.describe_s


class Evaluations(Spec):
    """Evaluations requested over HTTP."""

    folder: str = ""
    """Persistent folder of the evaluations. If empty, evaluations are disabled."""
    benchmarks: dict[Annotated[str, Field(pattern=NAME)], BenchmarkSpec] = Field(
        default_factory=dict
    )
    """Benchmarks by name."""
    max_queued: PositiveInt = 16
    """Maximum number of queued evaluations. Further evaluations are rejected (503)."""
    max_finished: PositiveInt = 1_000
    """Maximum number of finished evaluations to keep. The oldest are removed."""

    @model_validator(mode="after")
    def _check_folder(self) -> Evaluations:
        rule = "a local folder that the gateway and the evaluator share"
        self.require(not is_uri(self.folder), "folder", rule)
        return self


class ServeSpec(Spec):
    """Settings of a server."""

    indexes: dict[Annotated[str, Field(pattern=NAME)], ServedIndex] = Field(min_length=1)
    """Indexes by name."""
    federations: dict[Annotated[str, Field(pattern=NAME)], FederationSpec] = Field(
        default_factory=dict
    )
    """Federations of these indexes by name: mappings, or the paths of YAML files. Requests search
    them like indexes."""
    keys: str = ""
    """File of the access keys, see `pipeline.serve.keys`. Without a file, no key is required and
    only requests over the loopback interface are accepted."""
    limits: Limits = Limits()
    """Limits per request and per access key."""
    timeouts: Timeouts = Timeouts()
    """Time limits for the stages of a request and for shutdown."""
    reload_interval_s: PositiveFloat = 5
    """Interval at which indexes are checked for a new version, in seconds."""
    evaluations: Evaluations = Evaluations()
    """Evaluations requested over HTTP."""
    gateway: Scale = Scale(max_ongoing_requests=1_000, max_queued_requests=1_000)
    """Deployment of the gateways, which handle the HTTP requests."""
    encoder: Scale = Scale()
    """Deployment of the query encoder."""
    searcher: Scale = Scale()
    """Deployment of each shard of each index."""
    reranker: Scale = Scale()
    """Deployment that reranks by vectors, one per index."""
    rerank_models: Scale = Scale()
    """Deployment of the rerankers of an index, one per index with `rerank`."""
    library: Scale = Scale()
    """Deployment that reads items and creates previews."""

    single_process: bool | None = None
    """Runs all stages in the processes of the gateways instead of deployments of their own.
    Requests are faster, but stages do not scale separately, and only `gateway` has settings. Null
    means true for `maxray serve` on a local Ray cluster, unless other deployments have settings."""

    @property
    def scaled(self) -> list[str]:
        """Settings that need a deployment per stage."""
        names = ("encoder", "searcher", "reranker", "rerank_models", "library")
        scaled = [f"settings of {name}" for name in names if getattr(self, name) != Scale()]
        return scaled + [f"indexes.{name}.gang" for name, i in self.indexes.items() if i.gang]

    def member_index(self, member: Member) -> str:
        """Returns the name of the served index of a member of a federation.

        Raises:
            SpecError: It is not served, or the member requires a version of it.
        """
        if member.index in self.federations:
            rule = "a served index"
            raise SpecError("index", member.index, rule, "is a federation")
        rule = "null, because a server searches the newest version"
        member.require(member.version is None, "version", rule)
        if member.index in self.indexes:
            return member.index
        uri = absolute(member.index).rstrip("/")
        for name, served in self.indexes.items():
            if absolute(served.uri).rstrip("/") == uri:
                return name
        raise SpecError.unknown_name("index", member.index, self.indexes, "is not served")

    @model_validator(mode="after")
    def _check_federations(self) -> ServeSpec:
        for name, federation in self.federations.items():
            if name in self.indexes:
                rule = "names that no index has"
                raise SpecError("federations", name, rule)
            for key, member in federation.members.items():
                with within(f"federations.{name}.members.{key}"):
                    self.member_index(member)
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> ServeSpec:
        is_valid = not (self.single_process and self.scaled)
        self.require(is_valid, "single_process", f"false with {', '.join(self.scaled)}")
        with within("gateway"):
            is_valid = self.gateway.target_queueing_delay_s is None
            rule = "null for the gateway, which has no queue"
            self.gateway.require(is_valid, "target_queueing_delay_s", rule)
        return self


def is_loopback(host: str | None) -> bool:
    """Checks whether a host name or an address refers to the loopback interface.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", None)]
    [True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
