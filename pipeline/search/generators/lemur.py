"""LEMUR: one vector per item whose inner product with a query estimates MaxSim (arXiv 2601.21853).

Shapes: B items, T vectors in total, S sample tokens, M query tokens, D dimensions of a vector, F
features, H = F - 1 features without the constant, and R dimensions of a code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional

from pipeline import config
from pipeline.compression.codecs.int8 import Int8
from pipeline.config import SpecError
from pipeline.search.generators import Generator, Sample

#: Maximum number of elements of a block of similarities and of a block of token maxima, which
#: correspond to 8 and 32 MiB of float32.
MAX_SIMILARITIES, MAX_MAXIMA = 1 << 21, 1 << 23
#: Maximum number of items whose coefficients determine the directions of the codes.
NUM_REDUCTION_ITEMS = 4096
#: Default maximum dimension of a code.
DEFAULT_DIMS = 192
#: Maximum norm of the gradient of the network.
MAX_GRADIENT_NORM = 0.5


class Lemur(Generator["Lemur.Spec"]):
    """Describes each item by the coefficients of a linear model of its token maxima.

    The MaxSim score of a query Q and an item C is the sum over the query tokens x of the token
    maxima `g(x) = max over c in C of <c, x>`. With features `phi` that all items share, and
    coefficients w of the item such that `g(x)` is approximately `<w, phi(x)>`, the score is
    approximately `<w, sum over x of phi(x)>`: one inner product per item.

    The coefficients are the ridge regression of the token maxima on the features at S sample
    tokens. They are `P g`, where g are the S token maxima of the item and the matrix P is the same
    for all items, so that scores are comparable between items. All features but the last are
    standardised on the sample tokens. The last is 1, and its coefficient is the mean of the maxima.

    A code consists of R numbers instead of the F coefficients. The differences between items and
    the mean item are projected onto the R directions that preserve most of the variance of the
    scores of sample tokens (reduced-rank regression), which is not part of the paper. With 192 of
    512 dimensions, 1.6 % of 50,000 items contain 95.8 % of the ten best items, and 96.7 % without
    the reduction. The score of a query lacks that of the mean item, which does not change rankings.
    """

    class Spec(config.ComponentSpec):
        """Options of `Lemur`."""

        name: Literal["lemur"] = "lemur"
        features: Literal["random", "mlp"] = "mlp"
        """Features of a token.

        - "random": GELU of random projections.
        - "mlp": The hidden layer of a network that is trained to predict the token maxima of a
          sample of the items. It needs half as many candidates for the same recall.
        """
        num_features: int = Field(1024, ge=2, le=16384)
        """Number of features F."""
        num_dims: int | None = Field(None, ge=1, le=16384)
        """Dimension R of a code, which is the number of bytes per item apart from the scale. The
        time of a search is proportional to it. The default is 192, or `num_features` if that is
        smaller.
        """
        num_samples: int = Field(4096, ge=2, le=262144)
        """Maximum number of sample tokens. The time to encode an item is proportional to it."""
        ridge: float = Field(0.03, gt=0, le=1e6)
        """Penalty on the squared norm of the coefficients, relative to the variance of a feature.
        Larger values are better if there are few sample tokens.
        """
        num_targets: int = Field(1024, ge=1, le=8192)
        """Maximum number of items whose token maxima the network predicts. Used by "mlp"."""
        epochs: int = Field(10, ge=1)
        """Number of passes over the sample tokens. Used by "mlp"."""
        learning_rate: float = Field(3e-3, gt=0, le=1)
        """Learning rate of Adam. Used by "mlp"."""
        batch_size: int = Field(512, ge=1)
        """Number of sample tokens per optimiser step. Used by "mlp"."""
        seed: int = Field(0, ge=0, lt=1 << 63)
        """Seed of the sampling, of the projections or initial weights, and of the batches."""

        @model_validator(mode="after")
        def _check_num_samples(self) -> Self:
            if self.num_samples < self.num_features:
                rule = f"at least num_features, which is {self.num_features}"
                raise SpecError("num_samples", self.num_samples, rule)
            if self.num_dims is not None and self.num_dims > self.num_features:
                rule = f"at most num_features, which is {self.num_features}"
                raise SpecError("num_dims", self.num_dims, rule)
            return self

    codec = Int8(Int8.Spec())

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray]):
        super().__init__(spec, artefact)
        self._tensors: dict[torch.device, dict[str, torch.Tensor]] = {}

    @classmethod
    def fit(cls, spec: Spec, sample: Sample) -> dict[str, np.ndarray]:
        """Fits the features and the linear maps. The result is deterministic.

        Returns:
            The float32 arrays `tokens` (S, D); `operator` (R, S) and `offset` (R,), which map the
            token maxima of an item to its code; `mean` (H,) and `scale` (H,) of the features;
            `projection` (F, R), which maps the features of a query; and the weights of the
            features: `weight` (D, H), and for "mlp" `bias`, `norm_weight` and `norm_bias` (H,).

        Raises:
            SpecError: The sample has no items, or fewer query tokens than features, so that the
                regression would be underdetermined.
        """
        num_tokens, num_items = len(sample.queries_SD), len(sample.lengths_B)
        if num_tokens < spec.num_features:
            rule = f"at most {num_tokens}, the number of query tokens in the sample to fit on"
            raise SpecError("num_features", spec.num_features, rule)
        if not num_items:
            raise SpecError("name", spec.name, "used with a sample that has items")
        tokens_SD = sample.queries_SD[_choose(num_tokens, spec.num_samples, spec.seed)]
        maxima_NS = _sample_maxima(sample, tokens_SD, NUM_REDUCTION_ITEMS, spec.seed)
        if spec.features == "mlp":
            targets_NS = _sample_maxima(sample, tokens_SD, spec.num_targets, spec.seed)
            network = _train(spec, tokens_SD, targets_NS)
        else:
            network = _projections(spec, tokens_SD)

        hidden_SH = _hidden(network, tokens_SD).double()
        mean_H, scale_H = hidden_SH.mean(dim=0), hidden_SH.std(dim=0, correction=0)
        is_constant_H = scale_H <= 1e-6 * hidden_SH.abs().max()
        scale_H[is_constant_H] = 1.0  # instead of amplifying rounding errors
        features_SH = (hidden_SH - mean_H) / scale_H
        features_SF = torch.cat([features_SH, torch.ones_like(features_SH[:, :1])], dim=1)
        ridge_F = torch.full_like(features_SF[0], spec.ridge)
        ridge_F[-1] = 0  # the mean of the maxima is not shrunk
        moments_FF = features_SF.T @ features_SF / len(tokens_SD) + ridge_F.diag()
        factor_FF = torch.linalg.cholesky(moments_FF)
        operator_FS = torch.cholesky_solve(features_SF.T / len(tokens_SD), factor_FF)

        coefficients_NF = maxima_NS.double() @ operator_FS.T
        # In this basis, the squared norm of a difference is the mean squared difference of scores.
        basis_NF = (coefficients_NF - coefficients_NF.mean(dim=0)) @ factor_FF
        _, directions_FF = torch.linalg.eigh(basis_NF.T @ basis_NF)
        directions_FR = directions_FF[:, -_num_dims(spec) :].flip(1)
        reduction_FR = factor_FF @ directions_FR
        arrays = {
            **network,
            "mean": mean_H,
            "scale": scale_H,
            "projection": torch.linalg.solve_triangular(factor_FF.T, directions_FR, upper=True),
            "tokens": tokens_SD,
            "operator": reduction_FR.T @ operator_FS,
            "offset": coefficients_NF.mean(dim=0) @ reduction_FR,
        }
        return {name: array.float().cpu().numpy() for name, array in arrays.items()}

    @property
    def dim(self) -> int:
        """Dimension of the codes."""
        return _num_dims(self.spec)

    def encode(
        self, vectors_TD: torch.Tensor, lengths_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a code (V, R) float32 per item with vectors, and its numbers (B,), 0 or 1."""
        arrays = self._arrays(vectors_TD.device)
        lengths_V = lengths_B[lengths_B > 0]
        blocks = lengths_V.split(max(MAX_MAXIMA // len(arrays["tokens"]), 1))
        block_vectors = vectors_TD.split([int(lengths_b.sum()) for lengths_b in blocks])
        codes = [
            token_maxima(vectors_tD, lengths_b, arrays["tokens"]) @ arrays["operator"].T
            - arrays["offset"]
            for vectors_tD, lengths_b in zip(block_vectors, blocks, strict=True)
        ]
        return torch.cat(codes), (lengths_B > 0).long()

    def queries(self, queries: list[torch.Tensor]) -> list[torch.Tensor]:
        """Computes the projected sum of the features of each query's tokens, (1, R)."""
        sums = []
        for query_MD in queries:
            arrays = self._arrays(query_MD.device)
            hidden_MH = _hidden(arrays, query_MD.float())
            ones_M = torch.ones(len(query_MD), device=query_MD.device)
            sum_H = ones_M @ ((hidden_MH - arrays["mean"]) / arrays["scale"])
            sum_F = torch.cat([sum_H, ones_M.sum(dim=0, keepdim=True)])
            sums.append((sum_F @ arrays["projection"]).unsqueeze(0))
        return sums

    def _arrays(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns the artefact on the given device. Tensors are cached per device."""
        if device not in self._tensors:
            self._tensors[device] = {
                name: torch.tensor(array, device=device) for name, array in self.artefact.items()
            }
        return self._tensors[device]


def token_maxima(
    vectors_TD: torch.Tensor, lengths_B: torch.Tensor, tokens_SD: torch.Tensor
) -> torch.Tensor:
    """Computes the maximum similarity of each token to the vectors of each item.

    Args:
        lengths_B: (B,) int64, number of vectors per item, at least 1.

    Returns:
        (B, S) float32.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    >>> token_maxima(vectors, torch.tensor([2, 1]), torch.tensor([[1.0, 0.0], [3.0, 4.0]])).tolist()
    [[1.0, 8.0], [-1.0, -3.0]]
    """
    maxima_BS = vectors_TD.new_empty(len(lengths_B), len(tokens_SD))
    lengths_B = lengths_B.to(vectors_TD.device)
    starts_B = lengths_B.cumsum(0) - lengths_B
    # A maximum over a dimension is much faster than a scattered one, so items of equal lengths are
    # processed together.
    for length in lengths_B.unique().tolist():
        size = max(MAX_SIMILARITIES // (length * len(tokens_SD)), 1)
        for items_b in (lengths_B == length).nonzero().squeeze(1).split(size):
            rows_bn = starts_B[items_b, None] + torch.arange(length, device=starts_B.device)
            sim_tS = vectors_TD[rows_bn.flatten()] @ tokens_SD.T
            maxima_BS[items_b] = sim_tS.view(len(items_b), length, -1).amax(dim=1)
    return maxima_BS


def _sample_maxima(
    sample: Sample, tokens_SD: torch.Tensor, num_items: int, seed: int
) -> torch.Tensor:
    is_chosen_B = _choose(len(sample.lengths_B), num_items, seed).to(sample.lengths_B.device)
    is_chosen_T = torch.repeat_interleave(is_chosen_B, sample.lengths_B)
    return token_maxima(sample.vectors_TD[is_chosen_T], sample.lengths_B[is_chosen_B], tokens_SD)


def _num_dims(spec: Lemur.Spec) -> int:
    return min(DEFAULT_DIMS, spec.num_features) if spec.num_dims is None else spec.num_dims


def _choose(count: int, limit: int, seed: int) -> torch.Tensor:
    """Returns a mask (count,) that selects at most `limit` random elements."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order < limit


def _projections(spec: Lemur.Spec, tokens_SD: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(spec.seed)
    weight_DH = torch.randn(tokens_SD.shape[1], spec.num_features - 1, generator=generator)
    return {"weight": weight_DH.to(tokens_SD.device)}


def _train(
    spec: Lemur.Spec, tokens_SD: torch.Tensor, targets_NS: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Trains a network that predicts the token maxima of N items and returns its hidden layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        linear = nn.Linear(tokens_SD.shape[1], spec.num_features - 1)
        norm = nn.LayerNorm(spec.num_features - 1)
        output = nn.Linear(spec.num_features - 1, len(targets_NS))
    network = nn.Sequential(linear, norm, nn.GELU(), output).to(tokens_SD.device)
    std, mean = torch.std_mean(targets_NS)
    targets_SN = ((targets_NS - mean) / std.clamp_min(1e-12)).T.contiguous()
    optimiser = torch.optim.Adam(network.parameters(), lr=spec.learning_rate)
    generator = torch.Generator().manual_seed(spec.seed)
    for _ in range(spec.epochs):
        order_S = torch.randperm(len(tokens_SD), generator=generator).to(tokens_SD.device)
        for rows in order_S.split(spec.batch_size):
            optimiser.zero_grad()
            functional.mse_loss(network(tokens_SD[rows]), targets_SN[rows]).backward()
            nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
            optimiser.step()
    return {
        "weight": linear.weight.detach().T.contiguous(),
        "bias": linear.bias.detach(),
        "norm_weight": norm.weight.detach(),
        "norm_bias": norm.bias.detach(),
    }


def _hidden(network: Mapping[str, torch.Tensor], tokens_MD: torch.Tensor) -> torch.Tensor:
    """Computes the features (M, H) before they are standardised."""
    hidden_MH = tokens_MD @ network["weight"]
    if "norm_weight" in network:
        hidden_MH = functional.layer_norm(
            hidden_MH + network["bias"],
            hidden_MH.shape[1:],
            network["norm_weight"],
            network["norm_bias"],
        )
    return functional.gelu(hidden_MH)
