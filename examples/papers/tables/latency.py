"""Latency of the forward pass and of compressors per item (SAP, table 10)."""

from __future__ import annotations

import functools
import posixpath
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt

from pipeline.config import Spec, SpecError, dump
from pipeline.eval.evaluation import versions
from pipeline.eval.results import FULL, RESULTS, Evaluation, Result, method_name
from pipeline.index import unit_reader
from pipeline.index.columns import Representation, required_taps
from pipeline.index.fitting import fit
from pipeline.index.info import EncoderInfo
from pipeline.index.stages import Encode
from pipeline.index.token_columns import with_taps
from pipeline.index.units import UnitLimits
from pipeline.registry import COMPRESSORS, ENCODERS, SOURCES, EncoderSpec, SourceSpec
from pipeline.runtime.atomic import write_atomic
from pipeline.tokens import TokenBatch
from tests.bench.compress_run import timed

#: Row of the forward pass that also computes the attention statistics of the compressors.
STATISTICS = "full_statistics"


class LatencySpec(Spec):
    """Spec of a measurement."""

    source: SourceSpec
    """Source of the items."""
    encoder: EncoderSpec
    """Encoder of the items."""
    representations: list[Representation] = Field(min_length=1)
    """Representations whose compressors are measured. They are fitted to the items."""
    num_items: PositiveInt = 128
    """Number of items, a random sample."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the compressors. The encoder chooses its own: the GPU if there is one."""
    output: str
    """Output folder."""


@torch.no_grad()
def measure(spec: LatencySpec) -> Evaluation:
    """Measures the milliseconds of each item, one at a time, as values of the metric `ms`."""
    if spec.device == "cuda" and not torch.cuda.is_available():
        problem = "is not available; run this step on a machine with a GPU, or the miniature here"
        raise SpecError("device", "cuda", "an available device", problem)
    source = SOURCES.build(
        spec.source, ENCODERS.load(spec.encoder.name).supported_inputs(spec.encoder)
    )
    source.check()
    encoder = ENCODERS.build(spec.encoder)
    info = EncoderInfo.from_encoder(encoder, spec.encoder)
    taps = required_taps(spec.representations, info.num_layers)
    plain, tapped = (
        Encode(spec.encoder, info, taps=names).with_encoder(encoder) for names in ((), taps)
    )
    sample, _, _ = unit_reader.choose(source, None, spec.num_items)
    decoded = unit_reader.decode_units(source, sample, UnitLimits(items=1))
    items = [plain.prepared(item) for item, _ in decoded if item.num_rows]
    batches = [found.batch.to(spec.device) for item in items for found in tapped.batches(item)]

    def row(name: str, compressor: Any, work: Callable[[Any], object], inputs: Sequence) -> Result:
        work(inputs[0])  # the first call initialises libraries and allocates memory
        taken = [timed(functools.partial(work, value), spec.device) for value in inputs]
        values = {str(number): {"ms": 1e3 * seconds} for number, seconds in enumerate(taken)}
        settings = dump(compressor)
        return Result(
            name, method_name(settings), None, "maxsim", "", values,
            0.0, 0.0, 0.0, 0.0, 0.0, 0.0, compressor=settings,
        )  # fmt: skip

    none = COMPRESSORS.resolve("none")
    rows = [
        row(FULL, none, lambda item: list(plain.batches(item)), items),
        row(STATISTICS, none, lambda item: list(tapped.batches(item)), items),
    ]
    for representation in spec.representations:
        needed = COMPRESSORS.build(representation.compressor).needs_taps
        averaged = functools.partial(with_taps, taps=needed, encoder_info=info)
        learned = fit(representation, info, functools.partial(map, averaged, batches), 0)
        compressor = COMPRESSORS.build(representation.compressor, learned.compressor)

        def compress(batch: TokenBatch, compressor=compressor, averaged=averaged) -> TokenBatch:
            return compressor.compress(averaged(batch))

        rows.append(row(representation.id, representation.compressor, compress, batches))
    created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    hardware = torch.cuda.get_device_name() if spec.device == "cuda" else "CPU"
    return Evaluation(dump(spec), "ms", "", len(items), [hardware], created, versions(), rows)


def run(spec: LatencySpec) -> dict[str, str]:
    """Measures, writes the results as an evaluation does, and returns the versions."""
    measured = measure(spec)
    write_atomic(posixpath.join(spec.output, RESULTS), measured.to_json())
    return measured.versions
