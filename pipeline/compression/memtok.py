"""MemTok, memory tokens (AGC paper, section 4.2)."""

from __future__ import annotations

from typing import Literal

from pipeline.compression import Compressor, NumVectors
from pipeline.config import ComponentSpec, SpecError
from pipeline.tokens import TokenBatch, normalise


class MemTok(Compressor["MemTok.Spec"]):
    """Represents an item by the vectors of the learned tokens that the encoder appends to it.

    The vectors are normalised to unit length as in the reference implementation. The method has no
    parameters of its own: the appended tokens, the memory tokens, are trained with the encoder.
    Their number is the budget of every item, also of shorter ones, and cannot be changed.
    """

    class Spec(ComponentSpec):
        """Options of `MemTok`."""

        name: Literal["memtok"] = "memtok"
        num_vectors: NumVectors | None = None
        """Number of vectors per item, which must be the number of tokens that the encoder appends;
        null accepts any number."""

    needs_appended = True
    assignment_form = None
    keeps_tokens = False

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        if batch.appended is None:
            rule = "used with an encoder with appended_tokens"
            raise SpecError("compressor memtok", "a batch without appended tokens", rule)
        self.check_budget(batch.appended.shape[1])
        vectors_BMD = normalise(batch.appended.float())
        mask_BM = batch.mask.any(dim=1, keepdim=True).expand(vectors_BMD.shape[:2])
        return TokenBatch(vectors_BMD, mask_BM, True, pooled=batch.pooled)

    def check_budget(self, num_tokens: int) -> None:
        """Raises `SpecError` if the budget is not the number of appended tokens."""
        if self.spec.num_vectors not in (None, num_tokens):
            rule = f"{num_tokens}, the number of tokens that the encoder was trained to append"
            note = "; MemTok cannot change its budget after training"
            raise SpecError("num_vectors", self.spec.num_vectors, rule, note=note)
