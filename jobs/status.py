"""Says what an index holds: items, representations, rejects, who writes, and the last jobs.

python -m jobs.status out/cranfield/index
python -m jobs.status s3://bucket/cranfield --json
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import jobs
from pipeline.index import check_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and prints the status."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="the URI of an index")
    parser.add_argument("--json", action="store_true", help="as JSON, for scripts")
    args = parser.parse(arguments)
    check_index(args.index)

    from pipeline.index.status import status

    there = status(args.index)
    print(json.dumps(there, indent=1) if args.json else text(there))


def text(there: dict[str, Any]) -> str:
    """The status as a page of text."""
    lines = [
        f"index        {there['index']}",
        f"version      {there['version']} ({there['fragments']} fragments)",
        f"items        {there['items']:,}",
    ]
    holder = there["lease"]
    lines.append(f"writer       {holder if holder else 'nobody'}")
    for encoder in there["encoders"]:
        lines.append(f"encoder      {encoder['name']} (fingerprint {encoder['fingerprint']})")
    lines += ["", _REPRESENTATION.format(*_HEADER)]
    for name, r in there["representations"].items():
        budget = r["num_vectors"] or (f"{100 * r['ratio']:g}%" if r["ratio"] else "all")
        cells = (r["method"], budget, r["codec"], f"{r['vectors']:.1f}")
        sizes = (f"{r['bytes_vectors']:,.0f}", f"{r['bytes_all']:,.0f}", f"{r['filled']:.1%}")
        lines.append(_REPRESENTATION.format(name, *cells, *sizes))
    if there["taps"]:
        lines.append(f"attention kept: {', '.join(there['taps'])}")
    if tokens := there["rerank_tokens"]:
        per_item = f"{tokens['tokens']:.1f} per item, {tokens['bytes']:,.0f} B/item"
        of_all = f"{tokens['filled']:.1%}, adapter {tokens['adapter']}"
        lines.append(f"rerank_tokens: {per_item}, {of_all}")
    lines.append("")
    lines.append(f"rejects      {sum(there['rejects'].values()):,}")
    for reason, count in there["rejects"].items():
        lines.append(f"  {count:8,}  {reason}")
    for job in there["jobs"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["updated"]))
        rates = "  ".join(f"{name} {rate:,.1f}/s" for name, rate in job["rates"].items())
        lines.append(f"{job['kind']:12} {job['job']}  {job['state']} {when}  {rates}")
        if job["error"]:
            lines.append(f"             {job['error']}")
    return "\n".join(lines)


_HEADER = ("representation", "method", "K", "codec", "vectors", "B/item", "B/item all", "filled")
_REPRESENTATION = "{:28} {:10} {:>5} {:19} {:>8} {:>12} {:>12} {:>8}"


if __name__ == "__main__":
    jobs.run(main)
