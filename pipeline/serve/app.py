"""The application: `build` makes its deployments of settings.

    serve run pipeline.serve.app:build indexes.cranfield.uri=/data/index     # and
    serve deploy cluster/serve/cranfield.yaml                                # on a cluster

`python -m jobs.serve` starts the same on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve

from pipeline.config import override, parse
from pipeline.serve.api import create_app
from pipeline.serve.calls import Handle, Stages
from pipeline.serve.engine import Engine
from pipeline.serve.evaluations import Evaluator, Store, check_folder
from pipeline.serve.gateway import Gateway
from pipeline.serve.library import Library
from pipeline.serve.metrics import Metrics
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.settings import Scale, ServeSpec
from pipeline.serve.stages import JointRanker, QueryEncoder, Ranker

#: Interval and time limit of Ray's health checks of replicas, in seconds.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2, 10


class Ingress:
    """The gateway as a deployment of Ray."""

    def __init__(self, settings: ServeSpec, stages: Stages[Handle], evaluator: Any = None):
        bind_to_loopback()
        # The evaluator is not asked for anything; being bound, it is started.
        self._settings, self._stages, self._evaluator = settings, stages, evaluator
        self._made: Gateway | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray's name for it
        return create_app(self._gateway)

    async def _gateway(self) -> Gateway:
        metrics = Metrics()
        engine = Engine(self._settings, self._stages, metrics.stage, metrics.event)
        await engine.indexes.start()
        store = Store(self._settings) if self._settings.evaluations.folder else None
        self._made = Gateway(self._settings, engine, metrics, store)
        return self._made

    async def drain(self) -> None:
        """Takes no more requests, and waits until those under way are answered."""
        if self._made is not None:
            await self._made.drain()


def build(settings: ServeSpec | Mapping[str, Any]) -> serve.Application:
    """The deployments of a server, bound to each other.

    Args:
        settings: as Ray hands them on: of a YAML file, or of a command line, where a name may be a
            dotted one.

    Raises:
        SpecError: They are invalid.
    """
    if not isinstance(settings, ServeSpec):
        settings = _parsed(settings)
    check_folder(settings.evaluations)
    drain = settings.timeouts.drain_s
    encoder = _deployment(QueryEncoder, "Encoder", settings.encoder, drain)
    library = _deployment(Library, "Library", settings.library, drain)
    searchers: dict[str, list[Any]] = {}
    rerankers: dict[str, Any] = {}
    edjes: dict[str, Any] = {}
    for name, served in settings.indexes.items():
        searchers[name] = [
            _deployment(Ranker, f"Searcher-{name}-{i}", settings.searcher, drain).bind(
                served, settings.searcher, settings.timeouts.filter_s, (i, served.num_shards)
            )
            for i in range(served.num_shards)
        ]
        reranker = _deployment(Ranker, f"Reranker-{name}", settings.reranker, drain)
        rerankers[name] = reranker.bind(served, settings.reranker, settings.timeouts.filter_s)
        if served.edje is not None:
            edje = _deployment(JointRanker, f"Edje-{name}", settings.edje, drain)
            edjes[name] = edje.bind(served, settings.edje)
    gateway = _deployment(serve.ingress()(Ingress), "Gateway", settings.gateway, drain)
    evaluator = None
    if settings.evaluations.folder:
        evaluator = _deployment(Evaluator, "Evaluator", Scale(), drain).bind(settings)
    stages = Stages(
        encoder.bind(settings.encoder), searchers, rerankers, edjes, library.bind(settings.indexes)
    )
    return gateway.bind(settings, stages, evaluator)


def _parsed(given: Mapping[str, Any]) -> ServeSpec:
    dotted = {name: value for name, value in given.items() if "." in name}
    plain = {name: value for name, value in given.items() if name not in dotted}
    assigned = [f"{name}={value}" for name, value in dotted.items()]
    return parse(ServeSpec, override(plain, assigned))


async def drain(application: str, seconds: float) -> None:
    """Lets every gateway of a running application answer what it has begun, and take no more.

    Before Ray ends an application: it ends all stages at once, also those that a request of the
    gateway has yet to come to.
    """
    handle = serve.get_app_handle(application)
    await handle.broadcast("drain").results_async(timeout_s=seconds, return_exceptions=True)


def _deployment(stage: type, name: str, scale: Scale, drain: float) -> serve.Deployment:
    """Returns the deployment of a stage, with the replicas and resources of the settings."""
    num_replicas: int | str = scale.num_replicas
    autoscaling: dict[str, float] | None = None
    if scale.max_replicas is not None:
        num_replicas = "auto"
        autoscaling = {
            "min_replicas": scale.num_replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": scale.target_ongoing_requests,
        }
    return serve.deployment(
        name=name,
        num_replicas=num_replicas,
        autoscaling_config=autoscaling,
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus},
        max_ongoing_requests=scale.max_ongoing_requests,
        max_queued_requests=scale.max_queued_requests,
        logging_config={"encoding": "JSON", "enable_access_log": False},
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
    )(stage)
