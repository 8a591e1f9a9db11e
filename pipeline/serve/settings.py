"""What a server serves, and what it allows: the argument of `pipeline.serve.app:build`."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from pipeline.config import Spec, SpecError, Uri
from pipeline.registry import BenchmarkSpec
from pipeline.schema import Precision

#: What Ray Serve reads when it starts: stages are asked without a thread and a loop of their own in
#: between, which halves what a call costs. All of them leave their work to other threads.
LEAN = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
}
#: What Ray Serve's proxies read when they start: see `pipeline.serve.front`. A proxy is started
#: again after three failed health checks, which Ray would make every ten seconds.
FRONT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pipeline.serve.front:middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
#: Names that stand in URLs, in metrics and in the names of deployments.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Scale(Spec):
    """How many replicas of a stage run, and what each has.

    Attributes:
        replicas: how many; of a stage that scales itself, how many at least.
        max_replicas: so many at most, as the load asks for; null: `replicas`, always.
        target_ongoing: requests under way in a replica beyond which more replicas start.
        num_cpus, num_gpus: what Ray sets aside for each. A tenth of a CPU lets a laptop run all.
        threads: of torch, in each; null: as many as the machine has cores.
        max_ongoing: Calls that a replica takes at once; it shares its time fairly among their keys.
        max_queued: Calls that wait for a replica, in the order in which they came; more are refused
            (503).
    """

    replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None
    target_ongoing: PositiveFloat = 8
    num_cpus: NonNegativeFloat = 0.1
    num_gpus: NonNegativeFloat = 0
    threads: PositiveInt | None = None
    max_ongoing: PositiveInt = 256
    max_queued: PositiveInt = 64

    @field_validator("max_replicas")
    @classmethod
    def _no_fewer(cls, most: int | None, info: Any) -> int | None:
        least = info.data.get("replicas", 1)
        if most is not None and most < least:
            raise SpecError("", most, f"at least replicas, {least}")
        return most


class ServedIndex(Spec):
    """An index and where it is searched.

    Attributes:
        uri: of the index, as every machine of the cluster reads it.
        shards: parts of the items, each a deployment of its own; a search asks all of them.
        cache: whether vectors are packed into local files and mapped.
        device: that scores: cpu or cuda.
        load: representations whose vectors are opened before the first request; empty: the default
            one. Others are opened when they are first asked for.
        documents: where the files of a collection lie now, by its name, if they moved.
        edje: the folder of an EDJE by which hits can be reranked too; the index has its adapter's
            tokens, see docs/rerank.md.
        edje_precision: in which its joint encoder computes: float32, bfloat16, float16, or int8 (on
            a CPU); null: as the folder says.
    """

    uri: str
    shards: PositiveInt = 1
    cache: bool = True
    device: str = "cpu"
    load: list[str] = Field(default_factory=list)
    documents: dict[str, str] = Field(default_factory=dict)
    edje: Uri | None = None
    edje_precision: Precision | None = None


class Limits(Spec):
    """What one request, and one key, may ask for.

    Attributes:
        body_bytes: of a request.
        query_chars: of a query's text; of all those of a request, `batch_chars`.
        image_pixels: of a query's image.
        k: hits of a query; of a request of many, `batch_hits` in all.
        batch: queries of a request.
        pairs: of a query and an item that EDJE reads for one request.
        in_flight: Requests that a gateway works on at once; more are refused (503). Where there are
            access keys, a key gets another place while it holds fewer than are free: one key holds
            at most half of the places, two keys a third each.
        bodies: Requests whose body a gateway waits for at once, shared among keys in the same way.
        requests_per_second: of each key, at each gateway; null: any. A key may have its own.
        burst: requests that may come at once before the rate counts.
    """

    body_bytes: PositiveInt = 8 << 20
    query_chars: PositiveInt = 4_000
    batch_chars: PositiveInt = 40_000
    image_pixels: PositiveInt = 50_000_000
    k: PositiveInt = 1_000
    batch: PositiveInt = 128
    batch_hits: PositiveInt = 20_000
    pairs: PositiveInt = 2_000
    in_flight: PositiveInt = 128
    bodies: PositiveInt = 128
    requests_per_second: PositiveFloat | None = None
    burst: PositiveInt = 20


class Seconds(Spec):
    """How long each stage of a request may take, waiting for it included."""

    encode: PositiveFloat = 10
    search: PositiveFloat = 20
    #: Evaluating a filter, within `search`; its process is killed then.
    filter: PositiveFloat = 5
    rerank: PositiveFloat = 20  # by vectors, or by EDJE
    describe: PositiveFloat = 10
    preview: PositiveFloat = 30
    #: How long a request's body may take to come in.
    body: PositiveFloat = 30
    #: How often indexes are looked at for a new version.
    reload: PositiveFloat = 5
    #: How long a replica that ends goes on with what it has begun.
    drain: PositiveFloat = 30


class Evaluations(Spec):
    """Evaluations that are asked for over HTTP.

    Attributes:
        folder: where they are kept; it outlives the server. Empty: none can be asked for.
        benchmarks: judged queries of the server, by the name a request gives.
        max_queued: that wait; more are refused.
        max_of_key: that wait of one key.
        keep: finished ones that are kept; older ones are removed.
    """

    folder: str = ""
    benchmarks: dict[Annotated[str, Field(pattern=NAME)], BenchmarkSpec] = Field(
        default_factory=dict
    )
    max_queued: PositiveInt = 16
    max_of_key: PositiveInt = 8
    keep: PositiveInt = 1_000


class ServeSpec(Spec):
    """A server.

    Attributes:
        indexes: by the name a request gives.
        keys: the file of the access keys, see `pipeline.serve.keys`; empty: no key is needed, and
            whoever does not come over this machine's loopback is refused.
    """

    indexes: dict[Annotated[str, Field(pattern=NAME)], ServedIndex] = Field(min_length=1)
    keys: str = ""
    limits: Limits = Limits()
    seconds: Seconds = Seconds()
    evaluations: Evaluations = Evaluations()
    gateway: Scale = Scale(max_ongoing=1_000, max_queued=1_000)
    encoder: Scale = Scale()
    searcher: Scale = Scale()
    reranker: Scale = Scale()
    edje: Scale = Scale()
    library: Scale = Scale()


def is_loopback(host: str | None) -> bool:
    """Whether an address is this machine's own.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", None)]
    [True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
