"""Prints the status of an index: items, representations, rejects, writer and recent jobs.

maxray status out/cranfield/index
maxray status s3://bucket/cranfield --json
maxray status s3://bucket/cranfield --watch
maxray status out/cranfield/index --rejects

`cosine` is the mean cosine of different vectors. From about 0.5, the vectors share a direction, for
which the codec `bits` allows.

The cache is that of this machine: packed vectors of searches of this index, of all indexes, and
the limit (MAXRAY_CACHE_BYTES) beyond which the longest unused files are removed.

With --watch, the progress of the job that is writing to the index is shown until it ends, from any
process or machine that can read the index.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import jobs
from pipeline.index import JOBS, PROGRESS, check_index, find_index
from pipeline.runtime.progress import Display, Snapshot, open_display
from pipeline.runtime.text import Table

#: Interval between reads of the progress of a job, in seconds.
POLL_SECONDS = 1.0
#: Time without a new snapshot after which the lease is checked, in seconds.
STALE_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and prints the status."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="path or URI of an index")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--watch", action="store_true", help="show the progress of the running job until it ends"
    )
    parser.add_argument("--rejects", action="store_true", help="list the rejected items by reason")
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    if args.watch and args.json:
        parser.error("--json cannot be combined with --watch; use --progress json")
    if args.watch and args.rejects:
        parser.error("--rejects cannot be combined with --watch")
    args.index = find_index(args.index)
    check_index(args.index)
    if args.watch:
        with open_display(args.progress) as display:
            display.phase("load modules")
            watch(args.index, display)
        return

    from pipeline.index.status import rejects, status
    from pipeline.search.cache import cache_usage

    if args.rejects:
        rows = rejects(args.index)
        print(json.dumps(rows, indent=1) if args.json else format_rejects(rows))
        return
    summary = {**status(args.index), "cache": cache_usage(args.index)}
    print(json.dumps(summary, indent=1) if args.json else format_status(summary))


def watch(uri: str, display: Display) -> None:
    """Shows the progress of the job that writes to an index, on any machine, until it ends."""
    from pipeline.index.reader import IndexReader

    lease = IndexReader(uri).lease()
    if lease is None:
        display.say(f"no job is writing to {uri}")
        return
    job, last, changed = lease.job, 0.0, time.monotonic()
    while True:
        # Before its first report and after its end, a job has no snapshot.
        if text := _read(uri, job, PROGRESS):
            snapshot = Snapshot.from_json(text)
            # Compared with its predecessor only, because the clocks of the machines may differ.
            if snapshot.time != last:
                last, changed = snapshot.time, time.monotonic()
                display.show(snapshot)
        is_stale = time.monotonic() - changed > STALE_SECONDS
        if not text or is_stale:
            lease = IndexReader(uri).lease()
            if lease is None or lease.job != job:
                break
        if is_stale:
            display.say(f"job {job} has not reported its progress for {STALE_SECONDS:.0f} s")
            changed = time.monotonic()
        time.sleep(POLL_SECONDS)
    # A job that was killed early has no summary.
    summary = {"kind": "job", "state": "running", "error": ""}
    summary |= json.loads(_read(uri, job, "summary.json") or "{}")
    state = "killed" if summary["state"] == "running" else summary["state"]
    error = f": {summary['error']}" if summary["error"] else ""
    display.say(f"{summary['kind']} {job} {state}{error}")


def _read(uri: str, job: str, name: str) -> str:
    """Returns the content of a file of a job, or an empty text if it does not exist."""
    from pipeline.index.reader import open_folder

    storage, path = open_folder(uri, JOBS, job, name)
    try:
        return storage.cat_file(path).decode()
    except FileNotFoundError:
        return ""


def format_rejects(rows: Sequence[dict[str, Any]]) -> str:
    """Formats rejects as text: each reason with its items and their details."""
    lines = [] if rows else ["no rejects"]
    for reason, group in itertools.groupby(rows, lambda row: row["reason"]):
        items = list(group)
        lines.append(f"{reason} ({len(items):,})")
        lines += [f"  {r['item_id']}" + (f": {r['detail']}" if r["detail"] else "") for r in items]
    return "\n".join(lines)


def format_status(summary: dict[str, Any]) -> str:
    """Formats the result of `pipeline.index.status.status` and `cache_usage` as text."""
    lines = [
        f"index        {summary['index']}",
        f"version      {summary['version']} ({summary['fragments']} fragments)",
        f"items        {summary['items']:,}",
    ]
    holder = summary["lease"]
    lines.append(f"writer       {holder if holder else 'none'}")
    cache = summary["cache"]
    used, total, limit = (cache[name] / 1e6 for name in ("bytes", "bytes_all", "limit"))
    lines.append(f"cache        {used:,.1f} MB of {total:,.1f} MB, limit {limit:,.0f} MB")
    for encoder in summary["encoders"]:
        lines.append(f"encoder      {encoder['name']} (fingerprint {encoder['fingerprint']})")
    header = ["representation", "method", "K", "codec", "vectors", "cosine"]
    header += ["B/item", "B/item all", "filled"]
    cells = Table([header])
    for name, r in summary["representations"].items():
        budget = r["num_vectors"] or (f"{100 * r['ratio']:g}%" if r["ratio"] else "all")
        cosine = "-" if r["cosine"] is None else f"{r['cosine']:.2f}"
        settings = (r["method"], str(budget), r["codec"], f"{r['vectors']:.1f}", cosine)
        sizes = (f"{r['bytes_vectors']:,.0f}", f"{r['bytes_all']:,.0f}", f"{r['filled']:.1%}")
        cells.append((name, *settings, *sizes))
    lines += ["", cells.text()]
    for codes in summary["candidates"]:
        coded = f"{codes['coded']:,} of {codes['items']:,} items have codes"
        name = f"{codes['generator']} for {codes['representation']}"
        lines.append(f"candidates: {name}, revision {codes['revision']}, {coded}")
        if numbers := codes["numbers"]:
            counts = " and ".join(f"{count:,}" for count in numbers["counts"])
            line = f"  {counts} candidates for 10 and 100 hits, recall {numbers['recall']:g}"
            if numbers.get("probes"):
                probes = " and ".join(f"{probes:,}" for probes in numbers["probes"])
                line += f", from {probes} lists per query token"
            lines.append(line)
    if summary["taps"]:
        lines.append(f"attention statistics: {', '.join(summary['taps'])}")
    if tokens := summary["rerank_tokens"]:
        per_item = f"{tokens['tokens']:.1f} per item, {tokens['bytes']:,.0f} B/item"
        filled = f"{tokens['filled']:.1%} filled, adapter {tokens['adapter']}"
        lines.append(f"rerank_tokens: {per_item}, {filled}")
    lines += [f"warning: {warning}" for warning in summary["warnings"]]
    lines.append("")
    lines.append(f"rejects      {sum(summary['rejects'].values()):,}")
    for reason, count in summary["rejects"].items():
        lines.append(f"  {count:8,}  {reason}")
    for job in summary["jobs"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["updated"]))
        rates = "  ".join(f"{name} {rate:,.1f}/s" for name, rate in job.get("rates", {}).items())
        lines.append(f"{job['kind']:12} {job['job']}  {job['state']} {when}  {rates}")
        if job["error"]:
            lines.append(f"             {job['error']}")
    return "\n".join(lines)


if __name__ == "__main__":
    jobs.run(main)
