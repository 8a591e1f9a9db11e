"""Exports the ids, vectors and items of a representation to Parquet or .npy files.

    python -m jobs.export out/cranfield/index out/hpool_32.parquet --representation hpool_32
    python -m jobs.export INDEX OUTPUT.parquet --representation full --filter "modality = 'text'"
    python -m jobs.export INDEX s3://bucket/export --representation minilm_pooled --format npy

The format `parquet` is a file with the columns `id`, `vectors` and those of the items. `npy` is a
folder with vectors.npy, lengths.npy, ids.txt, items.jsonl and metadata.json. The source `vectors`
reads both. The output appears atomically when the export is complete.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import jobs
from pipeline.config import Stopped
from pipeline.index import check_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and exports."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="path or URI of an index")
    parser.add_argument("output", help="path or URI of a .parquet file, or of a folder for npy")
    parser.add_argument(
        "--representation", required=True, help="column of vectors, as listed by jobs.status"
    )
    parser.add_argument("--format", choices=["parquet", "npy"], default="parquet")
    parser.add_argument("--filter", metavar="SQL", help="SQL condition that items must satisfy")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing export")
    args = parser.parse(arguments)
    check_index(args.index)

    from pipeline.index.export import export

    signal.signal(signal.SIGTERM, _stop)
    export(
        args.index,
        args.output,
        args.representation,
        form=args.format,
        filter=args.filter,
        overwrite=args.overwrite,
        report=jobs.say,
    )


def _stop(*_: object) -> None:
    raise Stopped("stopped by SIGTERM; nothing was written")


if __name__ == "__main__":
    jobs.run(main)
