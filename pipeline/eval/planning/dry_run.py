"""Dry run of the index job, which encodes a few items and estimates the time and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pipeline.config import dump_yaml
from pipeline.eval.planning.trial import list_items, run_trial
from pipeline.index.checks import check
from pipeline.index.spec import IndexResources, IndexSpec

#: Maximum number of items to encode.
NUM_TRIED = 32


def dry_run(
    spec: IndexSpec, resources: IndexResources, limit: int | None, report: Callable[[str], None]
) -> None:
    """Estimates the time and size of an index job from a few items. Nothing is written."""
    check(spec)
    report(dump_yaml(spec).rstrip())
    listed = list_items(spec, resources, limit, NUM_TRIED)
    num_rejects = len(listed.rejects)
    report(f"\nlisted {listed.num_items + num_rejects:,} items, {num_rejects:,} unreadable")
    for reject in listed.rejects[:5]:
        report(f"  rejected {reject.item_id}: {reject.reason} {reject.detail}")
    if not listed.sample:
        return
    trial = run_trial(spec, resources, listed)
    rate = 1 / sum(time.seconds for time in trial.times.values())
    num_actors = resources.encode.max_actors
    report(
        f"encoded {trial.num_items} items: {trial.tokens:.0f} tokens per item,"
        f" {rate:,.1f} items/s per actor;"
        f" about {listed.num_items / rate / num_actors:,.0f} s in total with {num_actors} actors"
    )
    for reason, number in Counter(trial.rejects).items():
        report(f"  rejected {number} of them: {reason}")
    for name, num_bytes in trial.column_bytes.items():
        total = f"{num_bytes * listed.num_items / 1e6:12,.1f} MB"
        report(f"  {name:24} {num_bytes:10,.0f} bytes per item {total}")
