"""Environment variables of Ray Serve, to be set before it is imported or a cluster starts."""

#: Environment variables for Ray Serve. Running user code and routers in the main event loop halves
#: the overhead of a call to a stage. All stages compute in worker threads of their own.
RAY_SERVE_ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
}
#: Environment variables for Ray Serve's proxies, see `pipeline.serve.front`. Ray restarts a proxy
#: after three failed health checks. The default interval of these checks is ten seconds.
PROXY_ENV = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pipeline.serve.front:middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
#: Environment variables for the traces of Ray Serve, see `pipeline.runtime.tracing`. Its setting
#: `tracing_config` does not reach the proxies. With a ratio below 1, calls of a request that was
#: not sampled are sampled again, as separate traces.
TRACING_ENV = {
    "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "pipeline.runtime.tracing:span_processors",
    "RAY_SERVE_TRACING_SAMPLING_RATIO": "1",
}
