"""Published collections, one file each.

A file begins with the readers of the published files. Up to three classes make a collection usable:

- `Items`, the source of an index, is a `pipeline.data.Source`; see `items` for its bases.
- `Queries`, the benchmark of an evaluation, has `queries` and `judgments`; see `queries`.
- `Rows`, the training data, has `rows`; see `pipeline.train.data.row_data`.
"""
