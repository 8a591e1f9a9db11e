"""Column `rerank_tokens`: tokens of an EDJE adapter, stored for its joint encoder.

The adapter was trained on the batches that the encoder returns. An uncompressed representation
differs: its vectors have unit length and it does not mark prompt tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index.columns import RERANK_TOKENS
from pipeline.index.info import EncoderInfo, RerankInfo
from pipeline.schema import FORMAT_VERSION, vectors_type, with_metadata
from pipeline.tokens import ragged_to_arrow

if TYPE_CHECKING:
    from pipeline.encoders.edje.adapter import Adapter
    from pipeline.tokens import TokenBatch


def rerank_field(folder: str, encoder_info: EncoderInfo) -> pa.Field:
    """Returns the column for the tokens of an adapter, `list<fixed_size_list<float16>[D]>`.

    Raises:
        SpecError: The folder contains no EDJE, or one that was trained on another encoder.
    """
    edje = read_edje(folder)
    if edje["vision"]["fingerprint"] != encoder_info.fingerprint:
        rule = f"an EDJE trained on the encoder {encoder_info.spec['name']}"
        rule += f" (fingerprint {encoder_info.fingerprint})"
        problem = f"was trained on another encoder (fingerprint {edje['vision']['fingerprint']})"
        raise SpecError("rerank", folder, rule, problem)
    metadata = {
        "format_version": FORMAT_VERSION,
        "role": "rerank",
        "encoder": encoder_info.spec,
        "fingerprint": encoder_info.fingerprint,
        "adapter": {**edje["adapter"], "fingerprint": edje["fingerprints"]["adapter"]},
        "dim": edje["dim"],
        "normalised": False,
        "field": "content",
    }
    return with_metadata(pa.field(RERANK_TOKENS, vectors_type(edje["dim"])), metadata)


def read_edje(folder: str) -> dict[str, Any]:
    """Reads the metadata of an EDJE model, see `pipeline.encoders.edje.model.read_metadata`."""
    from pipeline.encoders.edje.model import (
        read_metadata,  # imports transformers, which few jobs need
    )

    return read_metadata(folder, "rerank")


def check_same_adapter(folder: str, stored: RerankInfo) -> None:
    """Raises `SpecError` if the tokens in a stored column were computed by another adapter."""
    from pipeline.encoders.edje.model import check_tokens

    check_tokens(folder, stored.adapter, "rerank")


def tokens_column(adapter: Adapter, batch: TokenBatch) -> pa.Array:
    """Computes the tokens to store; null for items without tokens or beyond the float16 range."""
    tokens_BVD, mask_BV = adapter.cache_tokens(batch)
    is_finite_B = (tokens_BVD.isfinite().all(dim=2) | ~mask_BV).all(dim=1)
    has_any = (mask_BV.any(dim=1) & is_finite_B).cpu().numpy()
    stored = ragged_to_arrow(tokens_BVD, mask_BV & is_finite_B.unsqueeze(1), pa.float16())
    return pa.ListArray.from_arrays(stored.offsets, stored.values, mask=pa.array(~has_any))
