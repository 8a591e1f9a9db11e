"""Checks of an index job before it does any work."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipeline.config import SpecError, within
from pipeline.encoders import AttentionInfo
from pipeline.index.columns import aspects_of, every_representation, needed_taps
from pipeline.index.info import EncoderInfo, pooled_infos, representation_infos
from pipeline.index.reader import Index, check_location
from pipeline.index.rerank_tokens import edje_of
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import ENCODERS, SOURCES
from pipeline.taps import Tap


def check(spec: IndexSpec) -> None:
    """Raises `SpecError` for whatever can be known to fail before any work."""
    aspects = aspects_of(every_representation(spec))
    check_location(spec.index)
    with within("source"):
        spec.build_source().check()
    if (calibration := spec.calibration()) is not None:
        with within("fit.source"):
            calibration.build_source().check()
    encoder = ENCODERS.load(spec.encoder.name)
    with within("encoder"):
        encoder.check(spec.encoder)
    if spec.rerank is not None:
        if "content" not in aspects:
            rule = "null unless a representation is `of: content`"
            raise SpecError("rerank", spec.rerank, rule)
        edje_of(spec.rerank)
    encoder_dim, source_dim = (getattr(s, "dim", None) for s in (spec.encoder, spec.source))
    if "vectors" in encoder.default_inputs and source_dim and encoder_dim != source_dim:
        raise SpecError("encoder.dim", encoder_dim, f"{source_dim}, the value of source.dim")
    _check_taps(spec, encoder.attention(spec.encoder))
    for source in filter(None, (spec.source, spec.fit.source)):
        for each in SOURCES.load(source.name).leaf_specs(source):
            _check_source(spec, each.name)


def check_resources(spec: IndexSpec, resources: IndexResources) -> None:
    """Raises `SpecError` if the profile spreads an encoder over GPUs that cannot be spread."""
    if resources.device_map and not ENCODERS.load(spec.encoder.name).supports_device_map:
        rule = f"null (the encoder {spec.encoder.name} runs on one GPU)"
        raise SpecError("device_map", resources.device_map, rule)


def check_reasons(spec: IndexSpec, reasons: Sequence[str]) -> None:
    """Raises `SpecError` for a reason for which the index has no rejects."""
    if reasons:
        known = set(Index(spec.index).rejects()["reason"].to_pylist())
        for reason in reasons:
            if reason not in known:
                problem = "is not a reason in the index"
                raise SpecError.unknown_name("--retry-rejects", reason, sorted(known), problem)


def refuse_other_encoders(schema: pa.Schema, encoder_info: EncoderInfo) -> None:
    """Raises `SpecError` if another encoder filled columns of this encoder's vector space."""
    pooled, representations = pooled_infos(schema).values(), representation_infos(schema).values()
    stored = [(info.name, info.encoder, info.fingerprint) for info in pooled]
    for info in representations:
        stored.append((info.name, info.encoder.prefix, info.encoder.fingerprint))
    for name, prefix, fingerprint in stored:
        if prefix == encoder_info.prefix and fingerprint != encoder_info.fingerprint:
            raise SpecError(
                "encoder",
                encoder_info.name,
                f"the encoder of {name!r} (fingerprint {fingerprint})",
                f"has the fingerprint {encoder_info.fingerprint}",
            )


def _check_taps(spec: IndexSpec, attention: AttentionInfo | None) -> None:
    """Raises `SpecError` if the encoder cannot give a wanted attention statistic."""
    wanted = {"keep_taps": tuple(Tap.parse(name) for name in spec.keep_taps)}
    needed = needed_taps(every_representation(spec))
    wanted |= {f"representations.{name}": taps for name, taps in needed.items()}
    for field, taps in wanted.items():
        for tap in taps:
            if attention is None or tap.statistic not in attention.statistics:
                given = ", ".join(attention.statistics) if attention else "no attention"
                rule = f"attention statistics that the encoder provides ({given})"
                problem = f"is not provided by the encoder {spec.encoder.name}"
                raise SpecError(field, tap.name, rule, problem)
            with within(field):
                tap.layer_indices(attention.num_layers)


def _check_source(spec: IndexSpec, source: str) -> None:
    """Raises `SpecError` if a source provides none of the inputs of the encoder."""
    provided = SOURCES.load(source).provides
    aspects = aspects_of(every_representation(spec))
    encoder = ENCODERS.load(spec.encoder.name)
    reads = encoder.supported_inputs(spec.encoder)
    if "caption" in provided and "caption" in aspects:
        return
    if "content" not in aspects:
        problem = f"is not provided by the source {source}"
        raise SpecError("representations.of", "caption", "content", problem)
    missing = set(encoder.required_inputs(spec.encoder)) - set(provided)
    if missing or not set(reads) & set(provided):
        rule = f"an encoder of {' or '.join(provided)}, as provided by the source {source}"
        problem = f"reads {', '.join(sorted(missing or reads))}"
        raise SpecError("encoder", spec.encoder.name, rule, problem)
