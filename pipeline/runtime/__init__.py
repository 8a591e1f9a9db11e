"""Files, logs, progress, traces, retries, and processes that compute together."""
