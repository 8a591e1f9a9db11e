"""Published collections, one file each.

A file begins with the readers of the published files. Up to three classes make a collection usable:

- `Items`, the source of an index, is a `pipeline.data.base.Source`. `items` has bases for images
  and videos, and `pipeline.data.text.Text` is one for JSON lines of texts.
- `Queries`, the benchmark of an evaluation, has `queries` and `judgments`; see `queries`.
- `Rows`, the training data, has `rows`; see `pipeline.train.data.row_data`.

Each class has an entry in the registry of its kind: `SOURCES`, `BENCHMARKS` or `TRAINING_DATA`.
"""
