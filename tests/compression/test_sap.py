import math

import pytest
import torch

from pipeline.compression.eos import Eos
from pipeline.compression.sap import Sap
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS
from pipeline.taps import Tap, average_layers, single_layer_taps
from pipeline.tokens import TokenBatch

NUM_TOKENS, NUM_VISUAL, NUM_HEADS, NUM_LAYERS, K = 14, 10, 3, 7, 4


def attention(seed=0):
    """Returns random attention of all layers and heads; the first ten tokens are visual."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_LAYERS, NUM_HEADS, NUM_TOKENS, NUM_TOKENS)
    return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(dim=3)


def reference_scores(matrices, heads, layers):
    """Computes eq. 2 to 6 of the SAP paper with scalar loops."""
    scores = []
    for j in range(NUM_VISUAL):
        layer_scores = []
        for layer in layers:
            c = [
                sum(float(matrices[layer, h, i, j]) for i in range(NUM_VISUAL))
                for h in range(NUM_HEADS)
            ]
            layer_scores.append(sum(c) / NUM_HEADS if heads == "mean" else max(c))
        scores.append(sum(layer_scores) / len(layers))
    return scores


def make_batch(matrices, taps):
    """Returns the visual tokens of one item with the attention statistics of an encoder."""
    values = {}
    for tap in taps:
        matrix = matrices[int(tap.layers)]
        rows = matrix[:, :NUM_VISUAL].sum(dim=1)
        if tap.statistic == "eos_row":
            rows = matrix[:, -1]
        aggregated = rows.mean(dim=0) if tap.heads == "mean" else rows.amax(dim=0)
        values[tap.name] = aggregated[:NUM_VISUAL].unsqueeze(0)
    vectors = torch.randn(1, NUM_VISUAL, 8, generator=torch.Generator().manual_seed(5))
    return TokenBatch(vectors, torch.ones(1, NUM_VISUAL, dtype=torch.bool), False, taps=values)


def selected_tokens(compressor, matrices):
    """Returns the tokens that a compressor keeps, with taps averaged as in the index job."""
    batch = make_batch(matrices, single_layer_taps(compressor.needs_taps, NUM_LAYERS))
    taps = {t.name: average_layers(t, batch.taps, NUM_LAYERS) for t in compressor.needs_taps}
    batch = TokenBatch(batch.vectors, batch.mask, False, taps=taps)
    result = compressor.compress(batch)
    tokens = (result.assignment[0] >= 0).nonzero().squeeze(1).tolist()
    expected = batch.vectors[0, tokens] / batch.vectors[0, tokens].norm(dim=1, keepdim=True)
    torch.testing.assert_close(result.vectors[0], expected)
    return tokens


def top_tokens(scores):
    return sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[:K])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("layers", [None, [0], [1, -1], [6]])
def test_sap_equals_reference(heads, layers, seed):
    matrices = attention(seed)
    spec = Sap.Spec(num_vectors=K, heads=heads, layers=layers)
    numbers = (
        [layer % NUM_LAYERS for layer in layers] if layers else [2, 3, 4]
    )  # floor of 2.8 and 4.2
    assert selected_tokens(Sap(spec), matrices) == top_tokens(
        reference_scores(matrices, heads, numbers)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layer", [-1, 2])
def test_eos_equals_reference(layer, seed):
    matrices = attention(seed)
    scores = [
        sum(float(matrices[layer, h, -1, j]) for h in range(NUM_HEADS)) / NUM_HEADS
        for j in range(NUM_VISUAL)
    ]
    assert selected_tokens(Eos(Eos.Spec(num_vectors=K, layers=[layer])), matrices) == top_tokens(
        scores
    )


@pytest.mark.parametrize(("depth", "first", "last"), [(18, 7, 10), (28, 11, 16), (36, 14, 21)])
def test_window_equals_table_4(depth, first, last):
    (tap,) = Sap(Sap.Spec(num_vectors=1)).needs_taps
    assert tap.layer_indices(depth) == tuple(range(first, last + 1))


def test_window_bounds_are_rounded_down():
    for depth in range(1, 130):
        layers = Tap("column_sums", "mean", "0.4-0.6").layer_indices(depth)
        low, high = depth * 4 // 10, min(depth * 6 // 10, depth - 1)
        assert layers == tuple(range(low, high + 1)), depth
    assert Tap("column_sums", "mean", "0-1").layer_indices(3) == (0, 1, 2)


def test_keeps_first_of_equal_scores():
    taps = {Tap("eos_row").name: torch.tensor([[0.1, 0.3, 0.2, 0.3, 0.3]])}
    vectors = torch.eye(5).unsqueeze(0)
    batch = TokenBatch(vectors, torch.ones(1, 5, dtype=torch.bool), True, taps=taps)
    spec = Eos.Spec(num_vectors=2, layers=[-1])
    taps["eos_row/mean/-1"] = taps["eos_row/mean/last"]
    assert Eos(spec).compress(batch).assignment.tolist() == [[-1, 0, -1, 1, -1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"window": [0.6, 0.4]},
            "window must be [alpha, beta] with 0 <= alpha <= beta <= 1, got [0.6, 0.4]",
        ),
        (
            {"window": [0.4, math.nan]},
            "window must be [alpha, beta] with 0 <= alpha <= beta <= 1, got [0.4, nan]",
        ),
        ({"layers": []}, "layers must have at least 1 item after validation, not 0, got []"),
        ({"heads": "median"}, "heads must be 'mean' or 'max', got 'median'"),
    ],
)
def test_rejects_invalid_fields(fields, message):
    with pytest.raises(SpecError) as error:
        COMPRESSORS.resolve({"name": "sap", "num_vectors": 3, **fields})
    assert str(error.value).startswith(message)


def test_rejects_missing_layer():
    (tap,) = Sap(Sap.Spec(num_vectors=3, layers=[2, 9])).needs_taps
    with pytest.raises(
        SpecError, match=r"layers must be from -6 to 5 \(the model has 6 layers\), got 9"
    ):
        tap.layer_indices(6)


@pytest.mark.parametrize(
    "name", ["row", "eos_row/median", "eos_row/mean/first", "eos_row/mean/1/2", "eos_row/mean/2-3"]
)
def test_rejects_invalid_tap(name):
    with pytest.raises(SpecError, match="must be STATISTIC/HEADS/LAYERS"):
        Tap.parse(name)
