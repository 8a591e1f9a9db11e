"""Deployments of the stages with Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ray import serve
from ray.serve.config import GangSchedulingConfig, RequestRouterConfig

from pipeline.serve.settings import Scale, ServeSpec

if TYPE_CHECKING:  # imported on use, see app.py
    from pipeline.serve.calls import Stages

StageT = TypeVar("StageT", covariant=True)

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


class Place(Protocol[StageT]):
    """Protocol of a function that deploys a stage or creates it in this process."""

    def __call__(
        self, stage: type, name: str, scale: Scale, *arguments: Any, gang_size: int = 1
    ) -> StageT:
        """Returns the placed stage. The replicas of a gang are scheduled together."""


def create_stages(settings: ServeSpec, place: Place[StageT]) -> Stages[StageT]:
    """Places all stages of a server."""
    from pipeline.serve.calls import Stages
    from pipeline.serve.library import Library
    from pipeline.serve.stages import GangRanker, ModelRanker, QueryEncoder, Ranker

    timeouts, searcher, reranker = settings.timeouts, settings.searcher, settings.reranker
    searchers, rerankers, models = {}, {}, {}
    for name, served in settings.indexes.items():
        arguments, num_shards = (served, searcher, timeouts), served.num_shards
        if served.gang:  # one deployment of all shards
            title = f"Searcher-{name}"
            gangs = place(GangRanker, title, searcher, *arguments, gang_size=num_shards)
            searchers[name] = [gangs]
        else:
            searchers[name] = [
                place(Ranker, f"Searcher-{name}-{i}", searcher, *arguments, (i, num_shards))
                for i in range(num_shards)
            ]
        rerankers[name] = place(Ranker, f"Reranker-{name}", reranker, served, reranker, timeouts)
        if served.rerank:
            scale = settings.rerank_models
            title = f"RerankModels-{name}"
            models[name] = place(ModelRanker, title, scale, served, scale, timeouts)
    encoder = place(QueryEncoder, "Encoder", settings.encoder, settings.encoder, settings.indexes)
    library = place(Library, "Library", settings.library, settings.indexes, timeouts)
    return Stages(encoder, searchers, rerankers, models, library)


def bind_stage(
    stage: type, name: str, scale: Scale, *arguments: Any, drain_s: float, gang_size: int = 1
) -> Any:
    """Returns a stage as an application, which Ray replaces by a handle of its deployment."""
    from pipeline.serve.stages import Ranker

    router = ROUTER if issubclass(stage, Ranker) else None
    return deployment(stage, name, scale, drain_s, gang_size, router).bind(*arguments)


def deployment(
    stage: type,
    name: str,
    scale: Scale,
    drain_s: float,
    gang_size: int = 1,
    router: RequestRouterConfig | None = None,
) -> serve.Deployment:
    """Returns the deployment of a stage, which has `drain_s` seconds to shut down a replica.

    Its replicas are gangs if `gang_size` is more than 1.
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
    options: dict[str, Any] = {}
    if router is not None:
        options["request_router_config"] = router
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
