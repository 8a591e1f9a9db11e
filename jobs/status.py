"""Prints the status of an index: items, representations, rejects, writer and recent jobs.

maxray status out/cranfield/index
maxray status s3://bucket/cranfield --json
maxray status s3://bucket/cranfield --watch
maxray status out/cranfield/index --rejects

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
from pipeline.index import check_index
from pipeline.index.display import open_display


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
    check_index(args.index)
    if args.watch:
        with open_display(args.progress) as display:
            display.phase("load modules")
            from pipeline.index.watch import watch

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
    lines += ["", _REPRESENTATION.format(*_HEADER)]
    for name, r in summary["representations"].items():
        budget = r["num_vectors"] or (f"{100 * r['ratio']:g}%" if r["ratio"] else "all")
        settings = (r["method"], budget, r["codec"], f"{r['vectors']:.1f}")
        sizes = (f"{r['bytes_vectors']:,.0f}", f"{r['bytes_all']:,.0f}", f"{r['filled']:.1%}")
        lines.append(_REPRESENTATION.format(name, *settings, *sizes))
    for codes in summary["candidates"]:
        coded = f"{codes['coded']:,} of {codes['items']:,} items have codes"
        name = f"{codes['generator']} for {codes['representation']}"
        lines.append(f"candidates: {name}, revision {codes['revision']}, {coded}")
    if summary["taps"]:
        lines.append(f"attention statistics: {', '.join(summary['taps'])}")
    if tokens := summary["rerank_tokens"]:
        per_item = f"{tokens['tokens']:.1f} per item, {tokens['bytes']:,.0f} B/item"
        filled = f"{tokens['filled']:.1%} filled, adapter {tokens['adapter']}"
        lines.append(f"rerank_tokens: {per_item}, {filled}")
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


_HEADER = ("representation", "method", "K", "codec", "vectors", "B/item", "B/item all", "filled")
_REPRESENTATION = "{:28} {:10} {:>5} {:19} {:>8} {:>12} {:>12} {:>8}"


if __name__ == "__main__":
    jobs.run(main)
