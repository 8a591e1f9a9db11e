"""Validation of an index job, which takes place before any work starts."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipeline.config import ComponentSpec, MissingField, SpecError, within
from pipeline.data.combined import Combined
from pipeline.encoders import AttentionInfo, Encoder
from pipeline.index.columns import all_representations, represented_fields, taps_by_representation
from pipeline.index.info import EncoderInfo, pooled_infos, representation_infos
from pipeline.index.reader import IndexReader, check_location, contains_index, exists
from pipeline.index.rerank_tokens import read_edje
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.trained import check_compressors
from pipeline.registry import CODECS, ENCODERS, SOURCES
from pipeline.taps import Tap


def check(spec: IndexSpec) -> IndexSpec:
    """Returns a spec with the width of precomputed vectors, read from the file of the source.

    Raises:
        SpecError: The source, encoder, representations or location cannot succeed.
    """
    item_fields = represented_fields(all_representations(spec))
    check_location(spec.index)
    source = spec.build_source()
    with within("source"):
        if isinstance(source, Combined) and exists(spec.index) and contains_index(spec.index):
            source.check_some()
        else:
            source.check()
    if (calibration := spec.calibration()) is not None:
        with within("fit.source"):
            calibration.build_source().check()
    encoder = ENCODERS.load(spec.encoder.name)
    encoder_dim, source_dim = (getattr(s, "dim", None) for s in (spec.encoder, source))
    if "vectors" in encoder.default_inputs and source_dim != encoder_dim and source_dim:
        if encoder_dim is not None:
            raise SpecError("encoder.dim", encoder_dim, f"{source_dim}, as in source.dim")
        completed = spec.encoder.model_copy(update={"dim": source_dim})
        spec = spec.model_copy(update={"encoder": completed})
    with within("encoder"):
        encoder.check(spec.encoder)
    if spec.rerank is not None:
        if "content" not in item_fields:
            rule = "null unless a representation has `field: content`"
            raise SpecError("rerank", spec.rerank, rule)
        read_edje(spec.rerank)
    _check_see(spec)
    check_compressors(all_representations(spec), spec.encoder)
    _check_taps(spec, encoder.attention(spec.encoder))
    for source_spec in filter(None, (spec.source, spec.fit.source)):
        for leaf in SOURCES.load(source_spec.name).leaf_specs(source_spec):
            _check_source(spec, leaf)
    return spec


def check_resources(spec: IndexSpec, resources: IndexResources) -> None:
    """Raises `SpecError` if `device_map` is set but the encoder does not support it."""
    if resources.device_map and not ENCODERS.load(spec.encoder.name).supports_device_map:
        rule = f"null for the encoder {spec.encoder.name}, which runs on one GPU"
        raise SpecError("device_map", resources.device_map, rule)
    if resources.prepare and spec.see:
        rule = "null for a spec with `see`, whose encoding actors read the images"
        raise SpecError("prepare", "a pool", rule)


def _check_see(spec: IndexSpec) -> None:
    """Raises `SpecError` unless `see` is an encoder of images, and represented without a fit."""
    seen = [r for r in all_representations(spec) if r.field == "image"]
    if spec.see is None:
        if seen:
            raise MissingField("see", None, f"an encoder of images, for {seen[0].id}")
        return
    if not seen:
        raise SpecError("see", spec.see.name, "null unless a representation has `field: image`")
    encoder: type[Encoder] = ENCODERS.load(spec.see.name)
    inputs = set(encoder.supported_inputs(spec.see))
    if not inputs or not inputs <= {"image", "frames"}:
        rule = "an encoder of images, such as dual"
        raise SpecError("see", spec.see.name, rule, f"reads {', '.join(sorted(inputs))}")
    prefixes = [ENCODERS.load(s.name).column_prefix(s) for s in (spec.encoder, spec.see)]
    if prefixes[0] == prefixes[1]:
        raise SpecError("see", spec.see.name, f"another encoder than `encoder` ({prefixes[0]})")
    with within("see"):
        encoder.check(spec.see)
    for r in seen:
        if r.compressor.name != "none" or CODECS.build(r.codec).needs_fit:
            rule = "none, with a codec without a fit, for `field: image`"
            raise SpecError(f"representations.{r.id}.compressor", r.compressor.name, rule)


def check_reasons(spec: IndexSpec, reasons: Sequence[str]) -> None:
    """Raises `SpecError` if no reject of the index has one of the given reasons."""
    if reasons:
        known = set(IndexReader(spec.index).rejects()["reason"].to_pylist())
        for reason in reasons:
            if reason not in known:
                problem = "is not the reason of any reject in the index"
                raise SpecError.unknown_name("--retry-rejects", reason, sorted(known), problem)


def check_same_encoder(schema: pa.Schema, encoder_info: EncoderInfo) -> None:
    """Raises `SpecError` if columns of this encoder were filled with another fingerprint."""
    if encoder_info.see is not None:
        check_same_encoder(schema, encoder_info.see)
    pooled, representations = pooled_infos(schema).values(), representation_infos(schema).values()
    stored = [(info.name, info.encoder, info.fingerprint) for info in pooled]
    for info in representations:
        stored.append((info.name, info.encoder.prefix, info.encoder.fingerprint))
    for name, prefix, fingerprint in stored:
        if prefix == encoder_info.prefix and fingerprint != encoder_info.fingerprint:
            rule = f"the encoder that filled {name!r} (fingerprint {fingerprint})"
            problem = f"has the fingerprint {encoder_info.fingerprint}"
            raise SpecError("encoder", encoder_info.name, rule, problem)


def _check_taps(spec: IndexSpec, attention: AttentionInfo | None) -> None:
    required = {"keep_taps": tuple(Tap.parse(name) for name in spec.keep_taps)}
    by_representation = taps_by_representation(all_representations(spec))
    required |= {f"representations.{name}": taps for name, taps in by_representation.items()}
    for field, taps in required.items():
        for tap in taps:
            if attention is None or tap.statistic not in attention.statistics:
                provided = ", ".join(attention.statistics) if attention else "none"
                rule = f"an attention statistic that the encoder provides ({provided})"
                problem = f"is not provided by the encoder {spec.encoder.name}"
                raise SpecError(field, tap.name, rule, problem)
            with within(field):
                tap.layer_indices(attention.num_layers)


def _check_source(spec: IndexSpec, leaf: ComponentSpec) -> None:
    source, provided = leaf.name, SOURCES.load(leaf.name).provided_inputs(leaf)
    item_fields = represented_fields(all_representations(spec))
    encoder = ENCODERS.load(spec.encoder.name)
    reads = encoder.supported_inputs(spec.encoder)
    if "caption" in provided and "caption" in item_fields:
        return
    if "content" not in item_fields:
        problem = f"is not provided by the source {source}"
        raise SpecError("representations.field", "caption", "content", problem)
    missing = set(encoder.required_inputs(spec.encoder)) - set(provided)
    if missing or not set(reads) & set(provided):
        rule = f"an encoder that reads {' or '.join(provided)}, which the source {source} provides"
        problem = f"reads {', '.join(sorted(missing or reads))}"
        raise SpecError("encoder", spec.encoder.name, rule, problem)
