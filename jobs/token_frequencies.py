"""Counts in how many items each token occurs, to weight the tokens of queries.

    maxray token_frequencies out/cranfield/index
    maxray token_frequencies INDEX representation=hpool_32 max_items=1000000

Searches with `--idf-power POWER` (jobs.search) or `idf_power` (jobs.evaluate, HTTP) then multiply
the similarity of each query token by its inverse document frequency to this power. The tokens are
those of the query encoder, and all representations of the encoder use the result. Rerun the command
after the collection has changed considerably.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs
from pipeline import config
from pipeline.index import check_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="URI of the index")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="assignments of the form field=value"
    )
    args = parser.parse(arguments)
    check_index(args.index)

    from pipeline.search import token_weights_job

    fields = config.override({"index": args.index}, args.overrides)
    spec = config.parse(token_weights_job.TokenFrequenciesSpec, fields)
    token_weights_job.run(spec, job=jobs.job_id(), report=jobs.say)


if __name__ == "__main__":
    jobs.run(main)
