"""Compressors of contrastive training: the one of the loss, and additional ones of validation."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline import config
from pipeline.compression import Compressor
from pipeline.compression.geometry import object_labels, token_coordinates
from pipeline.compression.memtok import MemTok
from pipeline.config import SpecError, TrainedSpec
from pipeline.encoders import Encoder
from pipeline.encoders.trained import TrainedCompressor, appended_shape, load_parameters
from pipeline.registry import COMPRESSORS, CompressorSpec
from pipeline.taps import APPENDED_STATISTICS, Tap, average_layers, single_layer_taps
from pipeline.tokens import TokenBatch, pad
from pipeline.train.contrastive_spec import ContrastiveSpec

log = logging.getLogger("maxray.train")


class Compressors:
    """Compressors that are applied to the token vectors of one model.

    Attributes:
        by_label: Compressors by the label of their metrics, which is empty for the one of the loss.
        taps: Attention statistics of single layers that they need.
    """

    def __init__(self, spec: ContrastiveSpec, encoder: Encoder):
        artefact = None
        with config.within("learner.compressor"):
            if isinstance(spec.compressor, TrainedSpec) and spec.compressor.weights is not None:
                artefact = load_parameters(spec.compressor.weights)
            self.by_label = {"": COMPRESSORS.build(spec.compressor, artefact)}
        for other in spec.validation_compressors:
            self.by_label[compressor_label(other)] = COMPRESSORS.build(other)
        self.taps: tuple[Tap, ...] = ()
        needed = [tap for compressor in self.by_label.values() for tap in compressor.needs_taps]
        if needed:
            attention = encoder.attention(spec.encoder)
            if attention is None:
                rule = f"a compressor without attention ({spec.encoder.name} provides none)"
                raise SpecError("learner.compressor.name", spec.compressor.name, rule)
            self._num_layers = attention.num_layers
            self.taps = single_layer_taps(needed, self._num_layers)
        self._has_remarked = False  # the remark on the items is logged once

    def compress(
        self, tokens: TokenBatch, boxes: Sequence[np.ndarray] | None = None, label: str = ""
    ) -> TokenBatch:
        """Compresses documents, which have the `taps`, with the compressor of a label."""
        compressor = self.by_label[label]
        if boxes is not None and compressor.uses_objects:
            tokens = with_objects(tokens, boxes)
        if self.taps:
            taps = {}
            for tap in compressor.needs_taps:
                values = average_layers(tap, tokens.taps, self._num_layers)
                is_learned = tap.statistic in APPENDED_STATISTICS
                taps[tap.name] = values if is_learned else values.detach()
            tokens = dataclasses.replace(tokens, taps=taps)
        self._log_remark(compressor, tokens)
        return compressor.compress(tokens)

    def _log_remark(self, compressor: Compressor, tokens: TokenBatch) -> None:
        if tokens.extents is None or self._has_remarked or not bool(tokens.mask[0].any()):
            return
        self._has_remarked = True
        if sentence := compressor.remark(tokens.extents[0, tokens.mask[0]].cpu().numpy()):
            log.warning("learner.compressor: %s", sentence)


def check_compressors(spec: ContrastiveSpec) -> None:
    """Checks that the compressors of a spec can be trained or evaluated, without weights."""
    additional = enumerate(spec.validation_compressors)
    numbered = {f"validation_compressors[{number}]": other for number, other in additional}
    compressors = {"compressor": spec.compressor, **numbered}
    for compressor in compressors.values():
        compressor_class = COMPRESSORS.load(compressor.name)
        if compressor_class.needs_fit:
            rule = "a compressor that needs no fitting (for the pruning of hpc, use eos)"
            raise SpecError("compressor.name", compressor.name, rule)
        if compressor_class.needs_appended and not spec.has_appended_tokens:
            rule = "a number of tokens, or encoder.appended_tokens a folder, for the compressor"
            raise SpecError("num_appended_tokens", None, f"{rule} {compressor.name}")
    num_appended = spec.num_appended_tokens
    if spec.appended_folder is not None:
        with config.within("encoder"):
            encoder: Any = spec.encoder
            num_appended, _ = appended_shape(encoder)
    for field, compressor in compressors.items():
        with config.within(field):
            if isinstance(compressor, MemTok.Spec):
                assert num_appended is not None, "MemTok needs appended tokens"
                if spec.num_appended_tokens and compressor.num_vectors not in (None, num_appended):
                    rule = f"{num_appended}, the value of learner.num_appended_tokens"
                    raise SpecError("num_vectors", compressor.num_vectors, rule)
                MemTok(compressor).check_budget(num_appended)
            if isinstance(compressor, TrainedSpec):
                if field != "compressor":
                    rule = "a compressor without parameters"
                    raise SpecError("name", compressor.name, rule)
                if compressor.weights is not None:
                    described, _ = TrainedCompressor.read(compressor.weights, "weights")
                    described.check_settings(compressor)


def compressor_label(spec: CompressorSpec) -> str:
    """Returns the name of a compressor with the fields that differ from their defaults.

    >>> compressor_label(COMPRESSORS.resolve({"name": "hpool", "num_vectors": 16}))
    'hpool num_vectors 16'
    """
    values = {name: value for name, value in config.dump(spec).items() if name != "name"}
    changed = [
        f"{name} {value}"
        for name, value in values.items()
        if getattr(spec, name) != type(spec).model_fields[name].default
    ]
    return " ".join([spec.name, *changed])


def with_objects(tokens: TokenBatch, boxes: Sequence[np.ndarray]) -> TokenBatch:
    """Labels each token with the annotated object that contains it (SaMer, section 4.2)."""
    lengths = np.array([len(boxes_M4) for boxes_M4 in boxes])
    flat = np.concatenate([np.asarray(boxes_M4, np.float32).reshape(-1, 4) for boxes_M4 in boxes])
    boxes_BM4, box_mask_BM = pad(torch.from_numpy(flat), lengths)
    device = tokens.mask.device
    objects = object_labels(token_coordinates(tokens), boxes_BM4.to(device), box_mask_BM.to(device))
    return dataclasses.replace(tokens, objects=objects)
