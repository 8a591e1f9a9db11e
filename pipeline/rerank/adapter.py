"""EDJE's adapter: compresses the states of a vision encoder to few language-model tokens.

    K = X W_K, V = X W_V                                                        (EDJE, eq. 1)
    H = MultiHeadAttention(Q, K, V), Q learned                                  (eq. 2)
    O = H + MLP(LayerNorm(H))                                                   (eq. 3)
    Y = O W_proj                                                                (eq. 4)

The local variant is an MLP per token instead (section 3.4).
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch.nn import functional

from pipeline import config
from pipeline.config import SpecError
from pipeline.tokens import PROMPT, TokenBatch, pad

ACTIVATIONS = {"gelu": torch.nn.GELU, "relu": torch.nn.ReLU, "silu": torch.nn.SiLU}


class Adapter(torch.nn.Module):
    """The token-compression adapter, or the local one, for items of one or several frames.

    Each video frame, image or page is compressed separately, to `num_tokens` tokens or, in the
    local variant, to as many tokens as it has states. The tokens of an item are those of its frames
    in order, at most `max_tokens` in all. If there are more, `max_tokens // (tokens of the longest
    frame)` frames remain, each the middle one of an equal part of the item. If a single frame is
    too long (in the local variant), its tokens are subsampled evenly. An item without states has no
    tokens.

    Args:
        spec: Settings.
        width: d_vision, dimension of the states.
        dim: d_language, dimension of the tokens.
    """

    class Spec(config.Spec):
        """Settings of the adapter; the defaults are the paper's where it states them.

        Attributes:
            kind: `compressed`, to `num_tokens` tokens per frame, or `local`, one token per state.
            num_tokens: m, number of tokens per frame of the compressed variant.
            max_tokens: Maximum number of tokens per item.
            heads: Number of attention heads.
            project_queries: Whether the learned queries Q are projected by a W_Q.
            project_output: Whether H is projected by a W_O.
            attention_bias: Whether the projections of the attention have biases.
            hidden: Hidden dimension of the MLP (appendix A).
            activation: Activation function of the MLP.
            norm_eps: Epsilon of the LayerNorm.
            norm_states: Whether X first passes a LayerNorm without weights. Recommended for
                encoders with vectors of unit length, whose components are too small otherwise.
            queries_std: Standard deviation of the initial Q; a small one makes the tokens start
                out similar.
        """

        kind: Literal["compressed", "local"] = "compressed"
        num_tokens: int = Field(64, ge=1)
        max_tokens: int = Field(1024, ge=1)
        heads: int = Field(8, ge=1)
        project_queries: bool = True
        project_output: bool = True
        attention_bias: bool = True
        hidden: int = Field(8192, ge=1)
        activation: Literal["gelu", "relu", "silu"] = "gelu"
        norm_eps: float = Field(1e-5, gt=0, allow_inf_nan=False)
        norm_states: bool = False
        queries_std: float = Field(0.02, gt=0, allow_inf_nan=False)

        @model_validator(mode="after")
        def _a_frame_fits(self) -> Self:
            if self.kind == "compressed" and self.max_tokens < self.num_tokens:
                rule = f"at least num_tokens={self.num_tokens}"
                raise SpecError("max_tokens", self.max_tokens, rule)
            return self

    def __init__(self, spec: Spec, width: int, dim: int):
        super().__init__()
        self.spec, self.width, self.dim = spec, width, dim
        activation = ACTIVATIONS[spec.activation]()
        if spec.kind == "local":
            self.mlp = torch.nn.Sequential(
                torch.nn.Linear(width, spec.hidden), activation, torch.nn.Linear(spec.hidden, dim)
            )
            return
        if width % spec.heads:
            rule = f"a divisor of {width}, the width of the encoder's states"
            raise SpecError("heads", spec.heads, rule)

        def linear(is_there: bool = True) -> torch.nn.Module:
            if not is_there:
                return torch.nn.Identity()
            return torch.nn.Linear(width, width, bias=spec.attention_bias)

        self.queries = torch.nn.Parameter(torch.randn(spec.num_tokens, width) * spec.queries_std)
        self.query, self.output = linear(spec.project_queries), linear(spec.project_output)
        self.key, self.value = linear(), linear()
        self.norm = torch.nn.LayerNorm(width, eps=spec.norm_eps)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, spec.hidden), activation, torch.nn.Linear(spec.hidden, width)
        )
        self.projection = torch.nn.Linear(width, dim, bias=False)

    def forward(
        self,
        states_BND: torch.Tensor,
        mask_BN: torch.Tensor,
        frames_BN: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the tokens of items.

        Args:
            states_BND: Hidden states of the vision encoder.
            mask_BN: bool, the real states.
            frames_BN: int64, frame number of each state, non-decreasing within an item; None if
                each item is one frame.

        Returns:
            Tokens (B, V, dim), the real ones first, and their mask (B, V).
        """
        if frames_BN is None:
            frames_BN = torch.zeros_like(mask_BN, dtype=torch.int64)
        num_items = len(mask_BN)
        item_T = mask_BN.nonzero()[:, 0]
        states_TD = states_BND[mask_BN]
        if self.spec.norm_states:
            states_TD = functional.layer_norm(states_TD, (self.width,), eps=self.spec.norm_eps)
        # Frames by their order in the whole batch, and by their order in their item.
        named_T2 = torch.stack([item_T, frames_BN[mask_BN]], dim=1)
        named_F2, frame_T, length_F = torch.unique_consecutive(
            named_T2, dim=0, return_inverse=True, return_counts=True
        )
        item_F = named_F2[:, 0]
        num_frames_B = torch.bincount(item_F, minlength=num_items)
        longest_B = torch.zeros_like(num_frames_B).scatter_reduce(0, item_F, length_F, "amax")
        if self.spec.kind == "compressed":
            longest_B = longest_B.clamp(max=1) * self.spec.num_tokens
        most_B = (self.spec.max_tokens // longest_B.clamp_min(1)).clamp_min(1)
        keep_F = evenly(num_frames_B, most_B)
        item_F, length_F = item_F[keep_F], length_F[keep_F]
        states_TD = states_TD[keep_F[frame_T]]

        if self.spec.kind == "compressed":
            frames_FND, mask_FN = pad(states_TD, length_F.cpu().numpy())
            flat_TD = self._compressed(frames_FND, mask_FN).flatten(0, 1)
            length_F = torch.full_like(length_F, self.spec.num_tokens)
        else:
            # More than that only where one frame alone has them.
            keep_T = evenly(length_F, torch.full_like(length_F, self.spec.max_tokens))
            length_F = length_F.clamp(max=self.spec.max_tokens)
            flat_TD = self.mlp(states_TD[keep_T])
        lengths_B = torch.zeros_like(num_frames_B).index_add(0, item_F, length_F)
        return pad(flat_TD, lengths_B.cpu().numpy())

    def _compressed(self, frames_FND: torch.Tensor, mask_FN: torch.Tensor) -> torch.Tensor:
        """Computes the tokens (F, m, dim) of F frames, each with at least one state (eq. 1-4)."""
        num_frames = len(frames_FND)

        def heads(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(-1, (self.spec.heads, -1)).transpose(-3, -2)

        attended = functional.scaled_dot_product_attention(
            heads(self.query(self.queries)).expand(num_frames, -1, -1, -1),
            heads(self.key(frames_FND)),
            heads(self.value(frames_FND)),
            attn_mask=mask_FN[:, None, None, :],
        )
        hidden_FMD = self.output(attended.transpose(1, 2).flatten(2))
        hidden_FMD = hidden_FMD + self.mlp(self.norm(hidden_FMD))
        return self.projection(hidden_FMD)

    def tokens(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the tokens of encoded items and their mask; prompt tokens are left out."""
        device = next(self.parameters()).device
        mask_BN = batch.mask if batch.kind is None else batch.mask & (batch.kind != PROMPT)
        frames_BN = None if batch.extents is None else frames_of(batch.extents, mask_BN).to(device)
        states_BND = batch.vectors.to(device, next(self.parameters()).dtype)
        return self(states_BND, mask_BN.to(device), frames_BN)

    @torch.inference_mode()
    def cached(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the tokens (B, V, dim) in float16 that are cached, and their mask (B, V)."""
        tokens_BVD, mask_BV = self.tokens(batch)
        return tokens_BVD.half(), mask_BV


def frames_of(extents_BN6: torch.Tensor, mask_BN: torch.Tensor) -> torch.Tensor:
    """Returns the frame number of each token (B, N): a frame begins where the start time changes.

    >>> times = torch.tensor([[0.0, 0.0, 2.0, torch.nan, 4.0]])
    >>> extents = torch.zeros(1, 5, 6)
    >>> extents[..., 4] = times
    >>> frames_of(extents, torch.tensor([[True, True, True, False, True]])).tolist()
    [[0, 0, 1, 0, 2]]
    """
    item_T, place_T = mask_BN.nonzero(as_tuple=True)
    start_T = extents_BN6[..., 4][mask_BN].nan_to_num(nan=-torch.inf)  # images have no time
    is_new_T = torch.zeros_like(item_T)
    is_new_T[1:] = (start_T[1:] != start_T[:-1]) | (item_T[1:] != item_T[:-1])
    frames_BN = torch.zeros_like(mask_BN, dtype=torch.int64)
    frame_T = is_new_T.cumsum(0)
    first_B = torch.zeros(len(mask_BN), dtype=torch.int64, device=mask_BN.device)
    first_B.scatter_reduce_(0, item_T, frame_T, "amin", include_self=False)
    frames_BN[item_T, place_T] = frame_T - first_B[item_T]
    return frames_BN


def evenly(count_B: torch.Tensor, most_B: torch.Tensor) -> torch.Tensor:
    """Subsamples groups evenly: each of n remaining members is the middle of an n-th of its group.

    Args:
        count_B: int64, size of each group.
        most_B: int64, maximum number of remaining members of each group.

    Returns:
        (sum of `count_B`,) bool, the remaining members of all groups.

    >>> evenly(torch.tensor([5, 2]), torch.tensor([2, 4])).int().tolist()
    [0, 1, 0, 1, 0, 1, 1]
    """
    stay_B = torch.minimum(count_B, most_B)
    start_B = count_B.cumsum(0) - count_B
    group_S = torch.repeat_interleave(torch.arange(len(count_B), device=count_B.device), stay_B)
    number_S = torch.arange(len(group_S), device=count_B.device)
    number_S = number_S - (stay_B.cumsum(0) - stay_B)[group_S]
    place_S = (2 * number_S + 1) * count_B[group_S] // (2 * stay_B[group_S])
    keep = torch.zeros(int(count_B.sum()), dtype=torch.bool, device=count_B.device)
    keep[start_B[group_S] + place_S] = True
    return keep
