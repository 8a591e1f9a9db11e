"""Serving of indexes over HTTP with Ray Serve: search, reranking, encoding and evaluation.

`wire` defines the schemas of the API, `client` is its Python client, and `app` builds the
application that `python -m jobs.serve`, `serve run` and `serve deploy` start.
"""
