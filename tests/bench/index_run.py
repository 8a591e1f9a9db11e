"""Runs an index spec in this process, as the Ray job or as a plain loop.

    python -m tests.bench.index_run ray SPEC.yaml RESOURCES.yaml
    python -m tests.bench.index_run bare SPEC.yaml RESOURCES.yaml

The plain loop calls the functions of the job: it reads, encodes, compresses and writes the same
units into fragments of the same size, in one process and without Ray. The last line of the output
is a JSON object with the job's summary, the time at which imports finished, the start-up time of
Ray, and the peak memory of this process.
"""

from __future__ import annotations

import json
import sys
import time

import pyarrow as pa

import jobs
from pipeline import config
from pipeline.config import digest
from pipeline.index import JOBS, job, listing, unit_reader
from pipeline.index.columns import all_representations, encoder_fields, representation_fields
from pipeline.index.counts import Counts
from pipeline.index.fragments import write_table
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import part_uri
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import run_stage
from pipeline.index.stages import Compress, Encode, Represent
from pipeline.index.units import UnitRange
from pipeline.index.writer import IndexWriter
from pipeline.registry import ENCODERS
from tests.bench.harness import peak_bytes


def main() -> None:
    """Runs one side and prints its result."""
    imported = time.time()
    side, spec_path, resources_path = sys.argv[1:]
    spec = config.load(IndexSpec, spec_path)
    resources = config.load(IndexResources, resources_path)
    times = {"imported": imported}
    if side == "bare":
        progress = bare_loop(spec, resources.encode.num_threads)
    else:
        start = time.time()
        with jobs.cluster(resources.object_store_bytes):
            times["ray_start"] = time.time() - start
            progress = job.run(spec, resources, job=jobs.job_id(), report=jobs.say)
    print(json.dumps({"summary": progress.summary(), "times": times, "peak_bytes": peak_bytes()}))


def bare_loop(spec: IndexSpec, num_threads: int) -> Counts:
    """Builds a new index from a new source. Rejects and resuming are not supported."""
    import torch

    torch.set_num_threads(num_threads)
    progress = Counts()
    writer = IndexWriter(spec.index, "bare")
    encoder = ENCODERS.load(spec.encoder.name)
    listing_job = ListingJob(
        part_uri(spec.index),
        part_uri(spec.index, JOBS, "bare"),
        spec.source,
        digest({}),
        wants=encoder.supported_inputs(spec.encoder),
        limits=spec.unit_limits,
    )
    num_shards = len(listing.list_source(listing_job))

    encoder_info = EncoderInfo.from_encoder(ENCODERS.build(spec.encoder), spec.encoder)
    fields = encoder_fields(encoder_info, spec.keep_positions)
    representations = all_representations(spec)
    writer.add_columns(
        [
            *fields,
            *(f for r in representations for f in representation_fields(r, encoder_info, None)),
        ]
    )
    compress = Compress(encoder_info, representations, {}, [f.name for f in fields])
    stage = Represent(Encode(spec.encoder, encoder_info), compress).load()

    tables: list[pa.Table] = []  # of the next fragment
    fragments, uncommitted = [], 0
    seconds = dict.fromkeys(("read", "encode", "compress", "write", "commit"), 0.0)

    def write() -> None:
        nonlocal uncommitted
        start = time.perf_counter()
        table = pa.concat_tables(tables)
        fragments.extend(write_table(table, writer.dataset.uri))
        tables.clear()
        uncommitted += table.num_rows
        seconds["write"] += time.perf_counter() - start

    def commit() -> None:
        nonlocal uncommitted
        start = time.perf_counter()
        writer.commit(fragments)
        fragments.clear()
        progress.new += uncommitted
        progress.commits += 1
        uncommitted = 0
        seconds["commit"] += time.perf_counter() - start

    started = time.perf_counter()
    for shard in range(num_shards):
        for unit in unit_reader.read_units(listing_job, UnitRange(shard)):
            seconds["read"] += time.perf_counter() - started
            unit = run_stage(stage, unit)
            for name, spent in unit.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + spent
            tables.append(unit.items)
            if sum(table.num_rows for table in tables) >= spec.fragment_items:
                write()
            if spec.commit_items and uncommitted >= spec.commit_items:
                commit()
            started = time.perf_counter()
    if tables:
        write()
    if fragments:
        commit()
    writer.release()
    progress.seconds = seconds
    return progress


if __name__ == "__main__":
    main()
