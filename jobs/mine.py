"""Mines hard negatives from an index, for training.

    maxray mine out/cranfield/index pairs.jsonl negatives.jsonl --representation full
    maxray mine INDEX QUERIES OUTPUT.jsonl --representation hpool_32 --ranks 10 50
    maxray mine INDEX run.yaml OUTPUT.jsonl --score hybrid

QUERIES is a file of pairs (see docs/reference/training.md), or a training spec, whose data are
used. The job searches the index for each query, removes the relevant documents, and writes the
given range of ranks as negatives. Document ids in the index must equal those in the data. The
output, to which `data.hard_negatives` of a training spec refers, consists of lines
 {"query": "...", "negatives": ["id", ...]}.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import check_index
from pipeline.scores import VECTOR_SCORES


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and mines."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="URI of the index")
    parser.add_argument("queries", help="pairs (.jsonl, .parquet) or training spec (.yaml)")
    parser.add_argument("output", help="path or URI of the .jsonl file to write")
    parser.add_argument(
        "--representation",
        help="representation to search (default: full if it exists, else the first)",
    )
    parser.add_argument(
        "--ranks",
        nargs=2,
        type=jobs.positive,
        default=(10, 50),
        metavar=("FIRST", "LAST"),
        help="range of ranks of the negatives (default: 10 50)",
    )
    parser.add_argument("--score", choices=VECTOR_SCORES, default="maxsim")
    parser.add_argument("--version", type=int, help="version of the index (default: the latest)")
    parser.add_argument(
        "--device",
        default="cpu",
        help="device used for scoring: cpu, cuda or cuda:N (default: cpu)",
    )
    args = parser.parse(arguments)
    check_index(args.index)
    is_spec = args.queries.endswith((".yaml", ".yml"))
    if is_spec:
        jobs.check_paths(config.read(args.queries, "queries"))
    else:
        jobs.check_paths({"data": {"path": args.queries}})

    from pipeline.atomic import check_writable
    from pipeline.registry import TRAINING_DATA
    from pipeline.search.searcher import open_index
    from pipeline.train.spec import TrainSpec
    from pipeline.training_data.mining import mine
    from pipeline.training_data.row_data import RowData

    check_writable(args.output, "output", as_file=True)
    if is_spec:
        spec = config.load(TrainSpec, args.queries, role="queries").data
    else:
        spec = TRAINING_DATA.resolve({"name": "pairs", "path": args.queries})
    data_class = TRAINING_DATA.load(spec.name)
    if not issubclass(data_class, RowData):
        raise SpecError(
            "queries", spec.name, "training data with document ids", "has no document ids"
        )
    spec = spec.model_copy(
        update={"hard_negatives": None}
    )  # the field may name the output of this job
    data = data_class(spec, batch_size=1, seed=0)
    mined = mine(
        open_index(args.index, args.version, device=args.device),
        data.training,
        args.output,
        representation=args.representation,
        ranks=tuple(args.ranks),
        score=args.score,
        report=jobs.say,
    )
    print(f"{args.output}: {mined.negatives:,} negatives of {mined.queries:,} queries")


if __name__ == "__main__":
    jobs.run(main)
