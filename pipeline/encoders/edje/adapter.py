"""Adapter of EDJE, which compresses vision-encoder states to a few language-model tokens.

    K = X W_K, V = X W_V                                                        (EDJE, eq. 1)
    H = MultiHeadAttention(Q, K, V), Q learned                                  (eq. 2)
    O = H + MLP(LayerNorm(H))                                                   (eq. 3)
    Y = O W_proj                                                                (eq. 4)

The local variant applies an MLP to each state instead (section 3.4).
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch.nn import functional

from pipeline import config
from pipeline.tokens import PROMPT, TokenBatch, pad

ACTIVATIONS = {"gelu": torch.nn.GELU, "relu": torch.nn.ReLU, "silu": torch.nn.SiLU}


class Adapter(torch.nn.Module):
    """Token-compression adapter, or its local variant, for items with one or several frames.

    Each frame, which is a video frame, an image or a page, is compressed separately. It yields
    `num_tokens` tokens or, in the local variant, one token per state. The tokens of all frames are
    concatenated. If an item would have more than `max_tokens` tokens, its frames are subsampled
    evenly to `max_tokens // (tokens of the longest frame)`. In the local variant, a single frame
    may already exceed the limit. In this case, its tokens are subsampled evenly. An item without
    states has no tokens.

    Args:
        spec: Settings.
        width: Dimension d_vision of the states.
        dim: Dimension d_language of the tokens.
    """

    class Spec(config.Spec):
        """Options of the adapter. Defaults are the values of the paper, if it specifies them."""

        kind: Literal["compressed", "local"] = "compressed"
        """`compressed` for `num_tokens` tokens per frame, `local` for one token per state."""
        num_tokens: int = Field(64, ge=1)
        """Number m of tokens per frame in the compressed variant."""
        max_tokens: int = Field(1024, ge=1)
        """Maximum number of tokens per item."""
        heads: int = Field(8, ge=1)
        """Number of attention heads, which must divide the dimension of the states."""
        project_queries: bool = True
        """Whether to project the learned queries Q by a W_Q."""
        project_output: bool = True
        """Whether to project H by a W_O."""
        attention_bias: bool = True
        """Whether the attention projections have biases."""
        hidden: int = Field(8192, ge=1)
        """Hidden dimension of the MLP (appendix A)."""
        activation: Literal["gelu", "relu", "silu"] = "gelu"
        """Activation function of the MLP."""
        norm_eps: float = Field(1e-5, gt=0, allow_inf_nan=False)
        """Epsilon of the LayerNorm."""
        norm_states: bool = False
        """Whether to apply a LayerNorm without weights to X first. Recommended for encoders with
        vectors of unit length, whose components are otherwise too small."""
        queries_std: float = Field(0.02, gt=0, allow_inf_nan=False)
        """Standard deviation of the initial Q. With a small value all tokens start out similar."""

        @model_validator(mode="after")
        def _check_max_tokens(self) -> Self:
            fits = self.kind != "compressed" or self.max_tokens >= self.num_tokens
            self.require(fits, "max_tokens", f"at least num_tokens={self.num_tokens}")
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
        rule = f"a divisor of {width}, the dimension of the encoder's hidden states"
        spec.require(width % spec.heads == 0, "heads", rule)

        def linear(is_enabled: bool = True) -> torch.nn.Module:
            if not is_enabled:
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
        """Computes the tokens (B, V, dim) of items, right-padded, and their mask (B, V).

        Args:
            states_BND: Hidden states of the vision encoder.
            mask_BN: False for padding.
            frames_BN: Frame number of each state, non-decreasing within an item, or None if each
                item is a single frame.
        """
        if frames_BN is None:
            frames_BN = torch.zeros_like(mask_BN, dtype=torch.int64)
        num_items = len(mask_BN)
        item_T = mask_BN.nonzero()[:, 0]
        states_TD = states_BND[mask_BN]
        if self.spec.norm_states:
            states_TD = functional.layer_norm(states_TD, (self.width,), eps=self.spec.norm_eps)
        # F indexes the frames of all items in the batch.
        key_T2 = torch.stack([item_T, frames_BN[mask_BN]], dim=1)
        key_F2, frame_T, length_F = torch.unique_consecutive(
            key_T2, dim=0, return_inverse=True, return_counts=True
        )
        item_F = key_F2[:, 0]
        num_frames_B = torch.bincount(item_F, minlength=num_items)
        longest_B = torch.zeros_like(num_frames_B).scatter_reduce(0, item_F, length_F, "amax")
        if self.spec.kind == "compressed":
            longest_B = longest_B.clamp(max=1) * self.spec.num_tokens
        max_frames_B = (self.spec.max_tokens // longest_B.clamp_min(1)).clamp_min(1)
        keep_F = subsample_mask(num_frames_B, max_frames_B)
        item_F, length_F = item_F[keep_F], length_F[keep_F]
        states_TD = states_TD[keep_F[frame_T]]

        if self.spec.kind == "compressed":
            frames_FND, mask_FN = pad(states_TD, length_F.cpu().numpy())
            flat_TD = self._compress(frames_FND, mask_FN).flatten(0, 1)
            length_F = torch.full_like(length_F, self.spec.num_tokens)
        else:
            # Only a single frame can still exceed the limit.
            keep_T = subsample_mask(length_F, torch.full_like(length_F, self.spec.max_tokens))
            length_F = length_F.clamp(max=self.spec.max_tokens)
            flat_TD = self.mlp(states_TD[keep_T])
        lengths_B = torch.zeros_like(num_frames_B).index_add(0, item_F, length_F)
        return pad(flat_TD, lengths_B.cpu().numpy())

    def _compress(self, frames_FND: torch.Tensor, mask_FN: torch.Tensor) -> torch.Tensor:
        """Computes the tokens (F, m, dim) of F non-empty frames (eq. 1-4)."""
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
        """Computes the tokens of encoded items and their mask. Prompt tokens are ignored."""
        device = next(self.parameters()).device
        mask_BN = batch.mask if batch.kind is None else batch.mask & (batch.kind != PROMPT)
        frames_BN = None
        if batch.extents is not None:
            frames_BN = frame_numbers(batch.extents, mask_BN).to(device)
        states_BND = batch.vectors.to(device, next(self.parameters()).dtype)
        return self(states_BND, mask_BN.to(device), frames_BN)

    @torch.inference_mode()
    def cache_tokens(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the tokens (B, V, dim) float16 to store in the index, and their mask (B, V)."""
        tokens_BVD, mask_BV = self.tokens(batch)
        return tokens_BVD.half(), mask_BV


def frame_numbers(extents_BN6: torch.Tensor, mask_BN: torch.Tensor) -> torch.Tensor:
    """Determines the frame number of each token (B, N). A change of the time starts a new frame.

    >>> times = torch.tensor([[0.0, 0.0, 2.0, torch.nan, 4.0]])
    >>> extents = torch.zeros(1, 5, 6)
    >>> extents[..., 4] = times
    >>> frame_numbers(extents, torch.tensor([[True, True, True, False, True]])).tolist()
    [[0, 0, 1, 0, 2]]
    """
    item_T, column_T = mask_BN.nonzero(as_tuple=True)
    start_T = extents_BN6[..., 4][mask_BN].nan_to_num(nan=-torch.inf)  # images have no time
    is_new_T = torch.zeros_like(item_T)
    is_new_T[1:] = (start_T[1:] != start_T[:-1]) | (item_T[1:] != item_T[:-1])
    frames_BN = torch.zeros_like(mask_BN, dtype=torch.int64)
    frame_T = is_new_T.cumsum(0)
    first_B = torch.zeros(len(mask_BN), dtype=torch.int64, device=mask_BN.device)
    first_B.scatter_reduce_(0, item_T, frame_T, "amin", include_self=False)
    frames_BN[item_T, column_T] = frame_T - first_B[item_T]
    return frames_BN


def subsample_mask(count_B: torch.Tensor, limit_B: torch.Tensor) -> torch.Tensor:
    """Returns a mask (sum of `count_B`,) of at most `limit_B` elements of each group of `count_B`.

    A group is divided into equal intervals, and the element in the middle of each is selected.

    >>> subsample_mask(torch.tensor([5, 2]), torch.tensor([2, 4])).int().tolist()
    [0, 1, 0, 1, 0, 1, 1]
    """
    size_B = torch.minimum(count_B, limit_B)
    start_B = count_B.cumsum(0) - count_B
    group_S = torch.repeat_interleave(torch.arange(len(count_B), device=count_B.device), size_B)
    number_S = torch.arange(len(group_S), device=count_B.device)
    number_S = number_S - (size_B.cumsum(0) - size_B)[group_S]
    offset_S = (2 * number_S + 1) * count_B[group_S] // (2 * size_B[group_S])
    keep = torch.zeros(int(count_B.sum()), dtype=torch.bool, device=count_B.device)
    keep[start_B[group_S] + offset_S] = True
    return keep
