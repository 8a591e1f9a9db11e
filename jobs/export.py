"""Exports the ids, vectors and items of a representation to Parquet or .npy files.

    maxray export out/cranfield/index out/hpool_32.parquet --representation hpool_32
    maxray export INDEX OUTPUT.parquet --representation full --filter "modality = 'text'"
    maxray export INDEX s3://bucket/export --representation minilm_pooled --format npy
    maxray export INDEX OUTPUT --representation full --format npy --queries QUERIES.jsonl

The format `parquet` is a file with the columns `id`, `vectors` and those of the items. `npy` is a
folder with documents.npy, doclens.npy, doc_ids.npy, items.jsonl and metadata.json, and optionally
queries.npy, query_ids.npy and qrels.tsv. The source `vectors` reads both, and the benchmark `npy`
reads the queries. The output appears atomically when the export is complete.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jobs
from pipeline.config import SpecError, Stopped
from pipeline.index import check_index

if TYPE_CHECKING:  # imported lazily to keep --help fast
    import numpy as np


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and exports."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="path or URI of an index")
    parser.add_argument("output", help="path or URI of a .parquet file, or of a folder for npy")
    parser.add_argument(
        "--representation",
        required=True,
        help="column of vectors, as listed by jobs.status, or NAME@K for a prefix",
    )
    parser.add_argument("--format", choices=["parquet", "npy"], default="parquet")
    parser.add_argument(
        "--dtype",
        choices=["float16", "float32"],
        help="precision of the vectors (default: as stored; float32 for quantised vectors)",
    )
    parser.add_argument("--filter", metavar="SQL", help="SQL condition that items must satisfy")
    parser.add_argument(
        "--queries",
        metavar="FILE",
        help="queries to encode, in lines of JSON or id<TAB>text (only for npy)",
    )
    parser.add_argument(
        "--qrels",
        metavar="FILE",
        help="judgments of the items, in BEIR or TREC format (only for npy)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing export")
    args = parser.parse(arguments)
    check_index(args.index)
    for option in ("queries", "qrels"):
        if getattr(args, option) and args.format != "npy":
            raise SpecError("format", args.format, f"npy if --{option} is given")

    from pipeline.eval.topics import read_qrels
    from pipeline.index.export import export

    signal.signal(signal.SIGTERM, _stop)
    export(
        args.index,
        args.output,
        args.representation,
        form=args.format,
        dtype=args.dtype,
        filter=args.filter,
        queries=_encode(args.index, args.representation, args.queries) if args.queries else None,
        qrels=read_qrels(args.qrels, "qrels") if args.qrels else None,
        overwrite=args.overwrite,
        report=jobs.say,
    )


def _encode(uri: str, representation: str, path: str) -> dict[str, np.ndarray]:
    from pipeline.eval.topics import read_queries
    from pipeline.search.searcher import open_index

    texts = read_queries(path)
    searcher = open_index(uri)
    if representation in searcher.index.pooled_columns:
        problem = "stores single vectors"
        rule = "a representation of token vectors if --queries is given"
        raise SpecError("representation", representation, rule, problem)
    encoded = searcher.queries(list(texts.values()), representation)
    arrays = [tokens.numpy() for tokens in encoded.tokens]
    return dict(zip(texts, arrays, strict=True))


def _stop(*_: object) -> None:
    raise Stopped("stopped by SIGTERM; nothing was written")


if __name__ == "__main__":
    jobs.run(main)
