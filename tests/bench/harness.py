"""Infrastructure of the benchmarks, such as repeated measurements, tables and the JSON record."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
from pipeline.config import SpecError
from pipeline.runtime.text import Table

PACKAGES = ("ray", "pylance", "torch", "transformers", "pyarrow")


@dataclass(frozen=True)
class Repeats:
    """Repeated measurements of one quantity.

    >>> print(Repeats((3.0, 1.0, 2.0)))
    2.00 (1.00-3.00)
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the measurements."""
        return statistics.median(self.values)

    def over(self, other: Repeats) -> Repeats:
        """Returns the ratios to `other`, repeat by repeat, so that drift cancels out.

        >>> print(Repeats((1.0, 3.0)).over(Repeats((2.0, 4.0))))
        0.62 (0.50-0.75)
        """
        return Repeats(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def __str__(self) -> str:
        if len(self.values) == 1:
            return _number(self.median)
        return f"{_number(self.median)} ({_number(min(self.values))}-{_number(max(self.values))})"

    def record(self) -> dict[str, float | list[float]]:
        """Returns the median and all measured values, for the JSON file."""
        return {"median": self.median, "values": list(self.values)}


class Bench:
    """Run of a benchmark, which prints the machine and the results and records them.

    Args:
        out: File for the record as JSON, if any.
    """

    def __init__(self, name: str, arguments: Sequence[str], out: Path | None):
        self.out = out
        self.record: dict[str, Any] = {
            "bench": name,
            "command": shlex.join(["python", "-m", "tests.bench", name, *arguments]),
            "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "machine": machine(),
            "versions": versions(),
            "figures": {},
        }
        for key in ("command", "when", "machine", "versions"):
            value = self.record[key]
            say = (
                ", ".join(f"{k} {v}" for k, v in value.items())
                if isinstance(value, dict)
                else value
            )
            print(f"{key:9} {say}", flush=True)

    def add(self, name: str, title: str, figures: Mapping[str, Any], text: str) -> None:
        """Prints a table, adds its numbers to the record, and writes the record."""
        print(f"\n{title}\n\n{text}", flush=True)
        self.record["figures"][name] = {"title": title, **figures}
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.record, indent=1, default=_plain) + "\n")


def parse_on_device(
    parser: argparse.ArgumentParser, arguments: Sequence[str], repeats: int
) -> argparse.Namespace:
    """Parses arguments with `--repeats`, `--device` (a GPU if there is one) and `--out`."""
    import torch

    on_gpu = torch.cuda.is_available()
    parser.add_argument("--repeats", type=jobs.positive, default=repeats)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not on_gpu:
        raise SpecError("device", "cuda", "cpu", "is not available")
    return args


def machine() -> dict[str, Any]:
    """Describes the hardware, the OpenMP settings, and the load, which distorts measurements."""
    import torch

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    on_gpu = torch.cuda.is_available()
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory / 2**30:.1f} GiB",
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "load": f"{os.getloadavg()[0]:.1f}",
        **{name: value for name, value in os.environ.items() if name.startswith("OMP_")},
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of all packages that affect the measurements."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def run_apart(module: str, *arguments: str) -> dict[str, Any]:
    """Runs a module in a separate process and returns the last JSON object that it printed.

    Raises:
        RuntimeError: The process failed. The message contains its output.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes(pid: int | None = None) -> int:
    """Returns the peak resident memory of a process in bytes. Defaults to this process.

    `getrusage` cannot be used for this purpose. Its value survives `exec`, so it may include the
    process that started this one.
    """
    text = Path(f"/proc/{pid or 'self'}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def cpu_seconds() -> float:
    """Returns the CPU time of this process in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def proportional_bytes(pid: int) -> int:
    """Returns the proportional set size of a process in bytes, or 0 if the process has exited."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def descendants(pid: int) -> Iterator[int]:
    """Yields the process ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    pending = list(children.get(pid, ()))
    while pending:
        child = pending.pop()
        yield child
        pending += children.get(child, [])


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table.

    >>> print(table(["side", "items/s"], [["bare loop", 3.14159]]))
    | side | items/s |
    | --- | --- |
    | bare loop | 3.14 |
    """
    cells = [[_number(cell) if isinstance(cell, float) else str(cell) for cell in r] for r in rows]
    return Table([header, *cells]).markdown().rstrip("\n")


def _number(value: float) -> str:
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.3g}"
        if abs(value) >= 100
        else f"{value:.2f}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # compressors are also measured without Ray
        return "none"


def _plain(value: Any) -> Any:
    return value.record() if isinstance(value, Repeats) else str(value)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def seconds_of(call: Any) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def recall(exact: Sequence[Sequence[Any]], found: Sequence[Collection[Any]], depth: int) -> float:
    """Returns the mean share of the ids of the `depth` best exact results that were found."""
    shares = [
        len(set(reference[:depth]) & set(ids)) / depth
        for reference, ids in zip(exact, found, strict=True)
    ]
    return statistics.fmean(shares)
