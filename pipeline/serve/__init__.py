"""Serving of indexes over HTTP with Ray Serve: search, reranking, encoding and evaluation.

The module `wire` defines the schemas of the API, and `client` is its Python client. `app` builds
the application, which is started by `maxray serve`, `serve run` or `serve deploy`.
"""
