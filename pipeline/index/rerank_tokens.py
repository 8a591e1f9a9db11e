"""The column `rerank_tokens`: what EDJE's adapter makes of an item, kept for its joint encoder.

The adapter reads an item's vectors as the encoder gives them, in the encoder's own batches: what
was trained on. They are not those of a column of full tokens, which has them at unit length and
does not tell prompts from other tokens; so this column is written where items are encoded.
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
    from pipeline.rerank.adapter import Adapter
    from pipeline.tokens import TokenBatch


def rerank_field(folder: str, encoder_info: EncoderInfo) -> pa.Field:
    """The column of an adapter's tokens, `list<fixed_size_list<float16>[d_language]>`.

    Raises:
        SpecError: for `rerank`: the folder is no EDJE's, or one of another encoder.
    """
    edje = edje_of(folder)
    if edje["vision"]["fingerprint"] != encoder_info.fingerprint:
        rule = f"an EDJE of the index's encoder, {encoder_info.spec['name']}"
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
        "of": "content",
    }
    return with_metadata(pa.field(RERANK_TOKENS, vectors_type(edje["dim"])), metadata)


def edje_of(folder: str) -> dict[str, Any]:
    """What the folder of an EDJE says of itself; see `pipeline.rerank.edje.read_metadata`."""
    from pipeline.rerank.edje import read_metadata  # it needs transformers, and most jobs do not

    return read_metadata(folder, "rerank")


def refuse_other_adapter(folder: str, stored: RerankInfo) -> None:
    """Raises `SpecError` if the tokens of a stored column are another adapter's."""
    from pipeline.rerank.edje import check_tokens

    check_tokens(folder, stored.adapter, "rerank")


def tokens_column(adapter: Adapter, batch: TokenBatch) -> pa.Array:
    """What is stored of encoded items: null where there is no token, or one beyond float16."""
    tokens_BVD, mask_BV = adapter.cached(batch)
    is_finite_B = (tokens_BVD.isfinite().all(dim=2) | ~mask_BV).all(dim=1)
    has_any = (mask_BV.any(dim=1) & is_finite_B).cpu().numpy()
    stored = ragged_to_arrow(tokens_BVD, mask_BV & is_finite_B.unsqueeze(1), pa.float16())
    return pa.ListArray.from_arrays(stored.offsets, stored.values, mask=pa.array(~has_any))
