"""The Ray Serve application, built from settings by `build`.

Usage on a cluster:

    serve run pipeline.serve.app:build indexes.cranfield.uri=/data/index
    serve deploy cluster/serve/cranfield.yaml

`python -m jobs.serve` starts the same application on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import GangSchedulingConfig, RequestRouterConfig

from pipeline.config import override, parse
from pipeline.serve.api import create_app
from pipeline.serve.calls import Handle, Stages
from pipeline.serve.engine import Engine
from pipeline.serve.evaluations import EvaluationStore, Evaluator, check_folder
from pipeline.serve.gateway import Gateway
from pipeline.serve.library import Library
from pipeline.serve.limiter import LimiterClient, RateLimiter
from pipeline.serve.metrics import Metrics
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.settings import Scale, ServedIndex, ServeSpec
from pipeline.serve.stages import GangRanker, JointRanker, QueryEncoder, Ranker

#: Interval and time limit of Ray's health checks of replicas, in seconds.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2, 10
#: Router of the calls to searchers and rerankers. Their replicas report once per second what they
#: have loaded.
ROUTER = RequestRouterConfig.model_validate(
    {
        "request_router_class": "pipeline.serve.router.VectorRouter",
        "request_routing_stats_period_s": 1,
    }
)
#: Import path of the autoscaling policy for stages with `target_queueing_delay_s`.
POLICY = "pipeline.serve.autoscaling:QueueingDelayPolicy"


class Ingress:
    """Deployment of the gateway."""

    def __init__(
        self,
        settings: ServeSpec,
        stages: Stages[Handle],
        evaluator: Any = None,
        limiter: Handle | None = None,
    ):
        bind_to_loopback()
        # The evaluator is never called. Binding it to the gateway makes Ray deploy it.
        self._settings, self._evaluator = settings, evaluator
        self._stages = stages.with_shards(settings.indexes)
        self._limiter = None if limiter is None else LimiterClient(limiter)
        self._gateway: Gateway | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:  # called by Ray Serve
        return create_app(self._create_gateway)

    async def _create_gateway(self) -> Gateway:
        metrics = Metrics()
        engine = Engine(self._settings, self._stages, metrics.stage, metrics.event)
        await engine.indexes.start()
        store = EvaluationStore(self._settings) if self._settings.evaluations.folder else None
        self._gateway = Gateway(self._settings, engine, metrics, store, self._limiter)
        return self._gateway

    async def drain(self) -> None:
        """Rejects new requests and waits until the requests in progress have been answered."""
        if self._gateway is not None:
            await self._gateway.drain()


def build(settings: ServeSpec | Mapping[str, Any]) -> serve.Application:
    """Returns the application of a server.

    Args:
        settings: Settings of the server. Ray passes them from a YAML file or from the command line.
            The latter may contain dotted names.

    Raises:
        SpecError: They are invalid.
    """
    if not isinstance(settings, ServeSpec):
        settings = _parse_settings(settings)
    check_folder(settings.evaluations)
    drain_s = settings.timeouts.drain_s
    encoder = _deployment(QueryEncoder, "Encoder", settings.encoder, drain_s)
    library = _deployment(Library, "Library", settings.library, drain_s)
    searchers: dict[str, list[Any]] = {}
    rerankers: dict[str, Any] = {}
    edjes: dict[str, Any] = {}
    for name, served in settings.indexes.items():
        searchers[name] = _searchers(name, served, settings)
        reranker = _deployment(
            Ranker, f"Reranker-{name}", settings.reranker, drain_s, router=ROUTER
        )
        rerankers[name] = reranker.bind(served, settings.reranker, settings.timeouts.filter_s)
        if served.edje is not None:
            edje = _deployment(JointRanker, f"Edje-{name}", settings.edje, drain_s)
            edjes[name] = edje.bind(served, settings.edje)
    gateway = _deployment(serve.ingress()(Ingress), "Gateway", settings.gateway, drain_s)
    evaluator = None
    if settings.evaluations.folder:
        evaluator = _deployment(Evaluator, "Evaluator", Scale(), drain_s).bind(settings)
    limiter, num_gateways = None, settings.gateway.max_num_replicas
    if num_gateways > 1:
        scale = Scale(max_ongoing_requests=1_000, max_queued_requests=1_000)
        deployment = _deployment(RateLimiter, "RateLimiter", scale, drain_s)
        limiter = deployment.bind(settings.limits.burst, num_gateways)
    stages = Stages(
        encoder.bind(settings.encoder), searchers, rerankers, edjes, library.bind(settings.indexes)
    )
    return gateway.bind(settings, stages, evaluator, limiter)


def _parse_settings(settings: Mapping[str, Any]) -> ServeSpec:
    dotted = {name: value for name, value in settings.items() if "." in name}
    plain = {name: value for name, value in settings.items() if name not in dotted}
    overrides = [f"{name}={value}" for name, value in dotted.items()]
    return parse(ServeSpec, override(plain, overrides))


async def drain(application: str, timeout_s: float) -> None:
    """Drains all gateways of a running application.

    Call this function before shutting down the application. Otherwise, Ray stops all deployments at
    the same time, including stages that the requests in progress still need.

    Args:
        application: Name of the application.
        timeout_s: Time limit, in seconds.
    """
    handle = serve.get_app_handle(application)
    await handle.broadcast("drain").results_async(timeout_s=timeout_s, return_exceptions=True)


def _searchers(name: str, served: ServedIndex, settings: ServeSpec) -> list[serve.Application]:
    """Returns the searchers of an index: one per shard, or a single one for all shards of gangs."""
    scale, drain_s = settings.searcher, settings.timeouts.drain_s
    arguments = served, scale, settings.timeouts.filter_s
    if served.gang:
        deployment = _deployment(
            GangRanker, f"Searcher-{name}", scale, drain_s, ROUTER, served.num_shards
        )
        return [deployment.bind(*arguments)]
    return [
        _deployment(Ranker, f"Searcher-{name}-{i}", scale, drain_s, ROUTER).bind(
            *arguments, (i, served.num_shards)
        )
        for i in range(served.num_shards)
    ]


def _deployment(
    stage: type,
    name: str,
    scale: Scale,
    drain_s: float,
    router: RequestRouterConfig | None = None,
    gang_size: int = 1,
) -> serve.Deployment:
    """Returns the deployment of a stage with the replicas and resources from the settings.

    Args:
        stage: Class of the stage.
        name: Name of the deployment.
        scale: Settings of the deployment. Its replicas are gangs if `gang_size` is more than 1.
        drain_s: Time limit for shutting down a replica, in seconds.
        router: Router of the calls, or None for Ray's default.
        gang_size: Number of replicas that are scheduled together.
    """
    num_replicas: int | str = scale.num_replicas * gang_size
    autoscaling: dict[str, Any] | None = None
    if scale.max_replicas is not None:
        num_replicas = "auto"
        autoscaling = {
            "min_replicas": scale.num_replicas * gang_size,
            "max_replicas": scale.max_replicas * gang_size,
            "target_ongoing_requests": scale.target_ongoing_requests,
            "upscale_delay_s": scale.upscale_delay_s,
            "downscale_delay_s": scale.downscale_delay_s,
        }
        if scale.target_queueing_delay_s is not None:
            policy = {"target_s": scale.target_queueing_delay_s}
            autoscaling["policy"] = {"policy_function": POLICY, "policy_kwargs": policy}
    options: dict[str, Any] = {} if router is None else {"request_router_config": router}
    if gang_size > 1:
        options["gang_scheduling_config"] = GangSchedulingConfig(gang_size=gang_size)
    return serve.deployment(
        name=name,
        num_replicas=num_replicas,
        autoscaling_config=autoscaling,
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus},
        max_ongoing_requests=scale.max_ongoing_requests,
        max_queued_requests=scale.max_queued_requests,
        logging_config={"encoding": "JSON", "enable_access_log": False},
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        **options,
    )(stage)
