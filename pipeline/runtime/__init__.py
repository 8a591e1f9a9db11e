"""Files, logs, progress, traces, retries, tables, and processes that compute together."""
