"""Serving: search, reranking, encoding and evaluation of indexes over HTTP, on Ray Serve.

`wire` has the types that travel, `client` uses them from outside, `app` builds the application that
`python -m jobs.serve`, `serve run` and `serve deploy` start.
"""
