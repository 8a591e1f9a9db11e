"""Trains a model, a projection, an adapter or a reranker; mines hard negatives.

    maxray train jobs/specs/training/flickr30k_samer.yaml
    maxray train SPEC optimiser.learning_rate=1e-4 epochs=3
    maxray train SPEC --resources cluster/profiles/train_gpus.yaml
    maxray train SPEC --in-process
    maxray train SPEC --dry-run
    maxray train mine INDEX QUERIES OUTPUT.jsonl    # hard negatives; see train mine --help

The output folder of the spec receives:

    model/          the trained weights, in the form that the spec of an encoder refers to
    best/           the weights with the best result on the validation data
    metrics.jsonl   losses and metrics by step
    checkpoints/    state from which the same command resumes

Training runs on Ray Train, on the cluster at RAY_ADDRESS or on a local cluster. By default, it has
one worker, with a GPU if the cluster has one; --resources names a profile with more. Starting Ray
and the worker takes several seconds, once per command. With --in-process, the same loop runs in
this process without Ray, with the same results. Either resumes a run that the other started.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.extras import require
from pipeline.index import check_index
from pipeline.search.scores import VECTOR_SCORES

if TYPE_CHECKING:
    from pipeline.train.spec import TrainSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and trains."""
    if jobs.run_form(FORMS, arguments):
        return
    args = parser(__doc__).parse(arguments)

    from pipeline.train.spec import TrainSpec

    spec = config.load(TrainSpec, args.spec, args.overrides)
    train({spec.name: spec}, args)


def parser(doc: str | None) -> jobs.Parser:
    """Creates the parser of a job that trains runs."""
    parser = jobs.spec_parser(doc)
    parser.add_argument(
        "--dry-run", action="store_true", help="check the spec and list the runs without training"
    )
    parser.add_argument(
        "--in-process", action="store_true", help="train in this process, without Ray"
    )
    return parser


def train(runs: Mapping[str, TrainSpec], args: argparse.Namespace) -> None:
    """Checks and trains runs; resources are only for training on Ray."""
    from pipeline.runtime.atomic import check_writable
    from pipeline.train import loop, ray
    from pipeline.train.checkpoints import Checkpoints

    workers = None
    if not (args.in_process or args.dry_run):
        require("ray")
    if args.resources and args.in_process:
        raise SpecError("--resources", args.resources, "omitted with --in-process")
    if args.resources:
        workers = config.load(ray.Workers, args.resources, role="profile")
        ray.check_batches(runs.values(), workers)
    for run in runs.values():
        check_writable(run.output, "output")
        data = loop.check(run)
        Checkpoints(run).check_spec()  # before Ray starts
    if args.dry_run:
        for title, run in runs.items():
            print(f"{title}: {_described(run)}")
        return
    started = time.monotonic()
    if args.in_process:
        loop.train(runs, jobs.say, data=data if len(runs) == 1 else None)
    else:
        del data  # the worker loads its own
        jobs.say("start Ray")
        with jobs.cluster():
            ray.train(runs, workers or ray.default_workers(), jobs.say)
    jobs.say(f"trained for {(time.monotonic() - started) / 60:.1f} min")


def _described(spec: TrainSpec) -> str:
    steps = f"at most {spec.max_steps} steps" if spec.max_steps else f"{spec.epochs} epochs"
    return f"{steps} of {spec.batch_size} documents, seed {spec.seed}, to {spec.output}"


def _mine(arguments: Sequence[str]) -> None:
    """Mines hard negatives from an index, for training.

        maxray train mine out/cranfield/index pairs.jsonl negatives.jsonl --representation full
        maxray train mine INDEX QUERIES OUTPUT.jsonl --representation hpool_32 --ranks 10 50
        maxray train mine INDEX run.yaml OUTPUT.jsonl --score hybrid

    QUERIES is a file of pairs (see docs/reference/training.md), or a training spec, whose data are
    used. The job searches the index for each query, removes the relevant documents, and writes the
    given range of ranks as negatives. Document ids in the index must equal those in the data. The
    output, to which `data.hard_negatives` of a training spec refers, consists of lines of the form:

        {"query": "...", "negatives": ["id", ...]}
    """
    parser = jobs.parser(_mine.__doc__, "mine")
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

    from pipeline.registry import TRAINING_DATA
    from pipeline.runtime.atomic import check_writable
    from pipeline.search.searcher import open_index
    from pipeline.train.data.mining import mine
    from pipeline.train.data.row_data import RowData
    from pipeline.train.spec import TrainSpec

    check_writable(args.output, "output", as_file=True)
    if is_spec:
        spec = config.load(TrainSpec, args.queries, role="queries").data
    else:
        spec = TRAINING_DATA.resolve({"name": "pairs", "path": args.queries})
    data_class = TRAINING_DATA.load(spec.name)
    if not issubclass(data_class, RowData):
        rule = "training data with document ids"
        raise SpecError("queries", spec.name, rule, "has no document ids")
    # The field may name the output of this job.
    spec = spec.model_copy(update={"hard_negatives": None})
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


FORMS: dict[str, jobs.Form] = {"mine": _mine}


if __name__ == "__main__":
    jobs.run(main)
