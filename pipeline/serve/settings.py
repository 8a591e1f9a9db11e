"""Settings of a server: the argument of `pipeline.serve.app:build`."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from pipeline.config import Spec, SpecError, Uri
from pipeline.registry import BenchmarkSpec
from pipeline.schema import Precision

#: Environment of Ray Serve. Calls of the stages bypass the separate thread and event loop, which
#: halves the overhead of a call; all stages leave their work to other threads anyway.
LEAN = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
}
#: Environment of Ray Serve's proxies, see `pipeline.serve.front`. A proxy is restarted after three
#: failed health checks, which Ray makes every ten seconds by default.
FRONT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pipeline.serve.front:middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
#: Pattern of names in URLs, in metrics and in the names of deployments.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Scale(Spec):
    """Replicas and resources of a deployment, in the terms of Ray Serve."""

    renamed: ClassVar[Mapping[str, str]] = {
        "replicas": "num_replicas",
        "target_ongoing": "target_ongoing_requests",
        "threads": "num_threads",
        "max_ongoing": "max_ongoing_requests",
        "max_queued": "max_queued_requests",
    }

    num_replicas: PositiveInt = 1
    """Number of replicas; the minimum if `max_replicas` is set."""
    max_replicas: PositiveInt | None = None
    """Maximum number of replicas under load; null disables autoscaling."""
    target_ongoing_requests: PositiveFloat = 8
    """Average number of requests in progress per replica that autoscaling aims at."""
    num_cpus: NonNegativeFloat = 0.1
    """CPUs that Ray reserves per replica. With a tenth, a laptop can run all deployments."""
    num_gpus: NonNegativeFloat = 0
    """GPUs that Ray reserves per replica."""
    num_threads: PositiveInt | None = None
    """Threads of torch per replica; null: the number of cores."""
    max_ongoing_requests: PositiveInt = 256
    """Maximum number of calls in progress per replica, which shares its time fairly among keys."""
    max_queued_requests: PositiveInt = 64
    """Maximum number of calls that wait for a replica, in order; others are refused (503)."""

    @field_validator("max_replicas")
    @classmethod
    def _check_max_replicas(cls, maximum: int | None, info: ValidationInfo) -> int | None:
        minimum = info.data.get("num_replicas", 1)
        if maximum is not None and maximum < minimum:
            raise SpecError("", maximum, f"at least num_replicas, {minimum}")
        return maximum


class ServedIndex(Spec):
    """An index and the options of searching it."""

    renamed: ClassVar[Mapping[str, str]] = {"shards": "num_shards", "load": "preload"}

    uri: str
    """URI of the index; every node of the cluster must be able to read it."""
    num_shards: PositiveInt = 1
    """Number of shards of the items, each a deployment of its own; a search asks all of them."""
    cache: bool = True
    """Whether vectors are packed into local files and memory-mapped."""
    device: str = "cpu"
    """Device used for scoring: `cpu` or `cuda`."""
    preload: list[str] = Field(default_factory=list)
    """Representations that are opened before the first request; empty: the default one. Others are
    opened at the first request for them."""
    documents: dict[str, str] = Field(default_factory=dict)
    """Present location of the files of a collection, by its name, if they have moved."""
    edje: Uri | None = None
    """Folder of an EDJE model for reranking. The index must contain the tokens of its adapter, see
    docs/tutorials/reranking.md."""
    edje_precision: Precision | None = None
    """Precision of the joint encoder: float32, bfloat16, float16 or, on a CPU, int8; null: that of
    the model's folder."""


class Limits(Spec):
    """Limits of a request, of an access key, and of a gateway."""

    renamed: ClassVar[Mapping[str, str]] = {
        "body_bytes": "max_body_bytes",
        "query_chars": "max_query_chars",
        "batch_chars": "max_batch_chars",
        "image_pixels": "max_image_pixels",
        "k": "max_k",
        "batch": "max_batch_queries",
        "batch_hits": "max_batch_hits",
        "pairs": "max_rerank_pairs",
        "in_flight": "max_in_flight_requests",
        "bodies": "max_pending_bodies",
    }

    max_body_bytes: PositiveInt = 8 << 20
    """Maximum size of a request body, in bytes."""
    max_query_chars: PositiveInt = 4_000
    """Maximum length of the text of one query, in characters."""
    max_batch_chars: PositiveInt = 40_000
    """Maximum total length of the texts of all queries of a request, in characters."""
    max_image_pixels: PositiveInt = 50_000_000
    """Maximum size of a query image, in pixels."""
    max_k: PositiveInt = 1_000
    """Maximum number of hits per query."""
    max_batch_queries: PositiveInt = 128
    """Maximum number of queries per request."""
    max_batch_hits: PositiveInt = 20_000
    """Maximum total number of hits of all queries of a request."""
    max_rerank_pairs: PositiveInt = 2_000
    """Maximum number of (query, item) pairs per request that EDJE reranks."""
    max_in_flight_requests: PositiveInt = 128
    """Maximum number of requests in progress per gateway; others are refused (503). With access
    keys, a key gets another place while it holds fewer than are free: one key holds at most half
    of the places, two keys a third each."""
    max_pending_bodies: PositiveInt = 128
    """Maximum number of requests per gateway whose body has not arrived, shared among keys in the
    same way."""
    requests_per_second: PositiveFloat | None = None
    """Rate limit per access key and gateway; null: unlimited. A key may have a limit of its own."""
    burst: PositiveInt = 20
    """Number of requests that a key may send at once before the rate limit applies."""


class Timeouts(Spec):
    """Time limits of the stages of a request, waiting included, and of a shutdown."""

    renamed: ClassVar[Mapping[str, str]] = {
        "encode": "encode_s",
        "search": "search_s",
        "filter": "filter_s",
        "rerank": "rerank_s",
        "describe": "describe_s",
        "preview": "preview_s",
        "body": "body_s",
        "reload": "reload_interval_s of the server",
        "drain": "drain_s",
    }

    encode_s: PositiveFloat = 10
    """Time limit of encoding the queries, in seconds."""
    search_s: PositiveFloat = 20
    """Time limit of the search, in seconds."""
    filter_s: PositiveFloat = 5
    """Time limit of evaluating a filter, within `search_s`; its process is killed after that."""
    rerank_s: PositiveFloat = 20
    """Time limit of reranking, by vectors or by EDJE, in seconds."""
    describe_s: PositiveFloat = 10
    """Time limit of reading the metadata and explanations of the hits, in seconds."""
    preview_s: PositiveFloat = 30
    """Time limit of a preview, in seconds."""
    body_s: PositiveFloat = 30
    """Time within which the body of a request must arrive, in seconds."""
    drain_s: PositiveFloat = 30
    """Time that a replica has to finish the requests in progress when it shuts down, in seconds."""


class Evaluations(Spec):
    """Evaluations over HTTP."""

    renamed: ClassVar[Mapping[str, str]] = {
        "max_of_key": "max_queued_per_key",
        "keep": "max_finished",
    }

    folder: str = ""
    """Folder of the evaluations, which outlives the server; empty disables them."""
    benchmarks: dict[Annotated[str, Field(pattern=NAME)], BenchmarkSpec] = Field(
        default_factory=dict
    )
    """Benchmarks of the server, by the name that a request gives."""
    max_queued: PositiveInt = 16
    """Maximum number of queued evaluations; others are refused."""
    max_queued_per_key: PositiveInt = 8
    """Maximum number of queued evaluations per access key."""
    max_finished: PositiveInt = 1_000
    """Maximum number of finished evaluations that are kept; the oldest are removed."""


class ServeSpec(Spec):
    """Settings of a server."""

    renamed: ClassVar[Mapping[str, str]] = {"seconds": "timeouts"}

    indexes: dict[Annotated[str, Field(pattern=NAME)], ServedIndex] = Field(min_length=1)
    """Indexes by the name that a request gives."""
    keys: str = ""
    """File of the access keys, see `pipeline.serve.keys`. Without one, no key is needed, and only
    requests over the loopback interface are answered."""
    limits: Limits = Limits()
    """Limits of requests and access keys."""
    timeouts: Timeouts = Timeouts()
    """Time limits of the stages of a request."""
    reload_interval_s: PositiveFloat = 5
    """Interval at which indexes are checked for a new version, in seconds."""
    evaluations: Evaluations = Evaluations()
    """Evaluations over HTTP."""
    gateway: Scale = Scale(max_ongoing_requests=1_000, max_queued_requests=1_000)
    """Replicas of the gateway, which parses requests."""
    encoder: Scale = Scale()
    """Replicas of the query encoders."""
    searcher: Scale = Scale()
    """Replicas per shard of each index."""
    reranker: Scale = Scale()
    """Replicas that rerank by vectors."""
    edje: Scale = Scale()
    """Replicas of the joint encoders."""
    library: Scale = Scale()
    """Replicas that read the fields and previews of items."""


def is_loopback(host: str | None) -> bool:
    """Returns whether a host is the loopback interface of this machine.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", None)]
    [True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
