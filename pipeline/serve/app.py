"""The Ray Serve application, built from settings by `build`.

Usage on a cluster:

    serve run pipeline.serve.app:build indexes.cranfield.uri=/data/index
    serve deploy cluster/serve/cranfield.yaml

`maxray serve` starts the same application on this machine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import serve

from pipeline.config import assign, parse
from pipeline.serve.deployments import bind_stage, create_stages, deployment
from pipeline.serve.settings import Scale, ServeSpec

if TYPE_CHECKING:  # imported on use: the process that starts the server has no models
    from fastapi import FastAPI

    from pipeline.serve.calls import Handle, Stages
    from pipeline.serve.gateway import Gateway


class Ingress:
    """Deployment of the gateway.

    Args:
        stages: Handles of the stages, or None to run them in this process.
        evaluator: Handle of the evaluator, if there is one.
        limiter: Handle of the rate limiter that the gateways share, or None for one gateway.
    """

    def __init__(
        self,
        settings: ServeSpec,
        stages: Stages[Handle] | None = None,
        evaluator: Any = None,
        limiter: Handle | None = None,
    ):
        from pipeline.serve.limiter import LimiterClient
        from pipeline.serve.local import run_locally
        from pipeline.serve.replica import bind_to_loopback
        from pipeline.serve.stages import limit_threads

        bind_to_loopback()
        # The evaluator is never called. Binding it to the gateway makes Ray deploy it.
        self._settings, self._evaluator = settings, evaluator
        if stages is None:
            self._stages: Stages[Handle] = create_stages(settings, run_locally)
            limit_threads(settings.gateway)
        else:
            self._stages = stages.with_shards(settings.indexes)
        self._limiter = None if limiter is None else LimiterClient(limiter)
        self._gateway: Gateway | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:  # called by Ray Serve
        from pipeline.serve.api import create_app

        return create_app(self._create_gateway)

    async def _create_gateway(self) -> Gateway:
        from pipeline.serve.engine import Engine
        from pipeline.serve.evaluations import EvaluationStore
        from pipeline.serve.gateway import Gateway
        from pipeline.serve.metrics import Metrics

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
    """
    if not isinstance(settings, ServeSpec):
        settings = _parse_settings(settings)
    drain_s = settings.timeouts.drain_s
    gateway = deployment(serve.ingress()(Ingress), "Gateway", settings.gateway, drain_s)
    evaluator = None
    if settings.evaluations.folder:
        from pipeline.serve.evaluations import Evaluator

        evaluator = deployment(Evaluator, "Evaluator", Scale(), drain_s).bind(settings)
    limiter, num_gateways = None, settings.gateway.max_num_replicas
    if num_gateways > 1:
        from pipeline.serve.limiter import RateLimiter

        scale = Scale(max_ongoing_requests=1_000, max_queued_requests=1_000)
        limiter = deployment(RateLimiter, "RateLimiter", scale, drain_s).bind(
            settings.limits.burst, num_gateways
        )
    stages = None
    if not settings.single_process:
        stages = create_stages(settings, functools.partial(bind_stage, drain_s=drain_s))
    return gateway.bind(settings, stages, evaluator, limiter)


def _parse_settings(settings: Mapping[str, Any]) -> ServeSpec:
    dotted = {name: value for name, value in settings.items() if "." in name}
    plain = {name: value for name, value in settings.items() if name not in dotted}
    return parse(ServeSpec, assign(plain, dotted.items()))


async def drain(application: str, timeout_s: float) -> None:
    """Drains all gateways of a running application.

    Call this function before shutting down the application. Otherwise, Ray stops all deployments at
    the same time, including stages that the requests in progress still need.
    """
    handle = serve.get_app_handle(application)
    await handle.broadcast("drain").results_async(timeout_s=timeout_s, return_exceptions=True)
