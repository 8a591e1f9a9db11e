"""Candidates of a recommendation: combinations of method, budget and codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.config import ComponentSpec, SpecError, TrainedSpec
from pipeline.eval.recommend.spec import RecommendSpec
from pipeline.index.columns import Representation, needs_appended_vectors
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import Index
from pipeline.index.recompress import check_taps
from pipeline.registry import CODECS, COMPRESSORS

#: Method that stores all tokens. It has no budget.
UNCOMPRESSED = "none"


class Candidates(NamedTuple):
    """Representations to compare."""

    representations: list[Representation]
    left_out: dict[str, str]


def list_candidates(
    spec: RecommendSpec, index: Index, encoder_info: EncoderInfo, field: str
) -> Candidates:
    """Combines the methods, budgets and codecs of a spec."""
    left_out = {}
    codecs = []
    for codec in spec.codecs:
        if CODECS.load(codec.name).needs_fit:
            left_out[codec.name] = "is fitted on the corpus"
        else:
            codecs.append(codec)
    representations = []
    for method in spec.methods:
        try:
            compressors = _compressors(method, spec.budgets)
        except _LeftOut as reason:
            left_out[method] = str(reason)
            continue
        listed = [
            Representation(compressor=compressor, codec=codec, field=field)
            for compressor in compressors
            for codec in codecs
        ]
        if listed and (problem := _problem(listed[0], index, encoder_info)):
            left_out[method] = problem
        else:
            representations += listed
    if not representations:
        reasons = "; ".join(f"{name} {reason}" for name, reason in left_out.items())
        rule = "methods and codecs that can be computed from stored token vectors"
        raise SpecError("methods", spec.methods, rule, note=f" ({reasons})")
    return Candidates(representations, left_out)


class _LeftOut(Exception):
    """Raised for a method that cannot be compared. The message is the reason."""


def _compressors(method: str, budgets: Sequence[int]) -> list[ComponentSpec]:
    compressor_class = COMPRESSORS.load(method)
    if method == UNCOMPRESSED:
        return [COMPRESSORS.resolve(method)]
    if issubclass(compressor_class.Spec, TrainedSpec):
        raise _LeftOut("needs trained weights")
    if compressor_class.needs_fit:
        raise _LeftOut("is fitted on the corpus")
    if "num_vectors" not in compressor_class.Spec.model_fields:
        raise _LeftOut("has no budget num_vectors")
    try:
        return [COMPRESSORS.resolve({"name": method, "num_vectors": n}) for n in budgets]
    except SpecError as error:
        raise _LeftOut(f"needs further settings ({error})") from None


def _problem(representation: Representation, index: Index, encoder_info: EncoderInfo) -> str | None:
    """Returns the reason why a representation cannot be computed from the index, or None."""
    if needs_appended_vectors([representation]):
        return "needs the vectors of appended tokens, which are not stored"
    try:
        check_taps(index, encoder_info.for_field(representation.field), [representation])
    except SpecError as error:
        return f"needs the attention statistic {error.value}, which is not stored"
    return None
