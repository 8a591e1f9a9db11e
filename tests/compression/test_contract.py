"""What every registered compressor keeps, whoever wrote it: the registry says which there are."""

import dataclasses

import pytest
import torch

from pipeline.compression import Budget, Budgeted, Compressor
from pipeline.config import SpecError, parse
from pipeline.registry import COMPRESSORS

NUM_VECTORS = 5
LENGTHS = [9, 1, 0, 23, 5, 4, 40, 6]
#: Methods by name, and some with options that are other algorithms.
METHODS = [
    *COMPRESSORS.names(),
    *(f"{name} {seeds}" for name in ("samer", "spatial") for seeds in ("lattice", "farthest")),
]


def build(method, ragged, **budget) -> Compressor:
    name, _, seeds = method.partition(" ")
    cls = COMPRESSORS.load(name)
    if "num_vectors" in cls.Spec.model_fields:
        budget = budget or {"num_vectors": NUM_VECTORS}
    else:
        budget = {"ratio": 0.3} if "ratio" in cls.Spec.model_fields else {}
    options = {"seeds": seeds} if seeds else {}
    compressor = cls(parse(cls.Spec, {"name": name, **budget, **options}))
    if not compressor.needs_fit:
        return compressor
    names = [tap.name for tap in compressor.needs_taps]
    sample = ragged([30] * 16, seed=9, boxes=True, taps=names)
    return cls(compressor.spec, cls.fit(compressor.spec, [sample]))


@pytest.fixture(params=METHODS)
def compressor(request, ragged):
    return build(request.param, ragged)


def make(compressor, ragged, lengths=LENGTHS, **options):
    return ragged(lengths, taps=[tap.name for tap in compressor.needs_taps], **options)


def budget(compressor):
    """The most vectors of an item; for a method that chooses by itself every number is valid."""
    return compressor.spec.num_vectors if isinstance(compressor, Budgeted) else 10**9


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_shapes_mask_and_unit_length(compressor, ragged, boxes, unit):
    batch = make(compressor, ragged, boxes=boxes, unit=unit)
    result = compressor.compress(batch)
    num_items, width, _ = result.vectors.shape
    assert num_items == len(batch) and width <= min(budget(compressor), max(LENGTHS))
    assert result.vectors.is_floating_point()
    assert result.normalised == compressor.normalised
    for length, num_outputs in zip(LENGTHS, result.lengths.tolist(), strict=True):
        assert bool(num_outputs) == bool(length)
        assert num_outputs <= min(length, budget(compressor))
    # Real outputs come first.
    assert torch.equal(result.mask, torch.arange(width) < result.lengths.unsqueeze(1))
    if compressor.normalised:
        lengths = result.vectors[result.mask].norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_items_within_the_budget_keep_their_tokens(compressor, ragged, unit_items):
    if not compressor.keeps_tokens or not isinstance(compressor, Budgeted):
        pytest.skip("the method makes other vectors of any item, or chooses how many")
    batch = make(compressor, ragged)
    result = compressor.compress(batch)
    for i, item in enumerate(unit_items(batch)):
        if len(item) <= budget(compressor):
            kept = result.vectors[i, result.mask[i]].double()
            torch.testing.assert_close(kept, torch.from_numpy(item), atol=1e-6, rtol=0)


def test_support_says_which_output_stands_for_each_token(compressor, ragged):
    batch = make(compressor, ragged)
    result = compressor.compress(batch)
    if result.support is None:  # the outputs are the inputs, in order
        assert torch.equal(result.lengths, batch.lengths)
        return
    assert result.support.shape == batch.mask.shape and result.support.dtype == torch.int64
    assert (result.support[~batch.mask] == -1).all()
    for i, num_outputs in enumerate(result.lengths.tolist()):
        support = result.support[i, batch.mask[i]].tolist()
        if compressor.support_form == "indices":
            # Each output is one token, unchanged and in the original order.
            assert [k for k in support if k >= 0] == list(range(num_outputs))
        else:
            # Methods that prune as well leave some tokens out, but not all.
            assert all(-1 <= k < num_outputs for k in support)
            assert not support or max(support) >= 0


def test_two_runs_are_equal_bit_for_bit(compressor, ragged):
    batch = make(compressor, ragged, boxes=True)
    assert_equal(compressor.compress(batch), compressor.compress(batch))


def test_an_item_does_not_depend_on_its_batch(compressor, ragged):
    batch = make(compressor, ragged, boxes=True)
    together = compressor.compress(batch)
    for i in range(len(batch)):
        real = batch.mask[i]
        alone = dataclasses.replace(
            batch,
            vectors=batch.vectors[i : i + 1, real],
            mask=torch.ones(1, int(real.sum()), dtype=torch.bool),
            extents=batch.extents[i : i + 1, real],
            taps={name: tap[i : i + 1, real] for name, tap in batch.taps.items()},
        )
        result = compressor.compress(alone)
        torch.testing.assert_close(
            result.vectors[result.mask], together.vectors[i, together.mask[i]], atol=1e-6, rtol=0
        )
        if result.support is not None:
            assert torch.equal(result.support[0], together.support[i, real])


@pytest.mark.parametrize("garbage", [float("inf"), 1e30, -7.0])
def test_what_lies_under_the_mask_never_leaks(compressor, ragged, garbage):
    clean = compressor.compress(make(compressor, ragged, boxes=True, garbage=0.0))
    for value in (garbage, float("nan")):
        batch = make(compressor, ragged, boxes=True, garbage=value)
        assert_equal(compressor.compress(batch), clean)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("num_padding", [0, 2, 3])
def test_empty_batches_and_tiny_items(compressor, ragged, lengths, num_padding):
    batch = make(compressor, ragged, lengths, num_padding=num_padding, boxes=True)
    result = compressor.compress(batch)
    assert result.lengths.tolist() == lengths
    assert result.support is None or result.support.shape == batch.mask.shape


def test_equal_tokens(compressor, ragged):
    """A blank page: every token is the same, and so is its attention."""
    batch = make(compressor, ragged, boxes=True)
    batch.vectors[:] = torch.arange(1.0, 9)
    for values in batch.taps.values():
        values[:] = 0.1
    result = compressor.compress(batch)
    assert result.vectors[result.mask].isfinite().all()
    assert torch.equal(result.lengths > 0, batch.lengths > 0)
    if compressor.keeps_tokens:
        kept = result.vectors[result.mask]
        token = torch.arange(1.0, 9) / torch.arange(1.0, 9).norm()
        torch.testing.assert_close(kept, token.expand_as(kept), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_vectors", [1, 2, 39, 40, 1000])
def test_any_budget(name, ragged, num_vectors):
    compressor = build(name, ragged, num_vectors=num_vectors)
    result = compressor.compress(make(compressor, ragged))
    assert result.vectors[result.mask].isfinite().all()
    assert result.lengths.max() <= min(budget(compressor), max(LENGTHS))


@pytest.mark.parametrize("name", COMPRESSORS.names())
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 1.0])
def test_a_ratio_is_a_share_of_each_item(name, ratio, ragged):
    if not issubclass(COMPRESSORS.load(name), Budgeted):
        pytest.skip("the method has no budget, or chooses by itself")
    compressor = build(name, ragged, ratio=ratio)
    lengths = compressor.compress(make(compressor, ragged)).lengths.tolist()
    shares = [min(length, max(1, int(length * ratio + 1e-9))) for length in LENGTHS]
    assert all(0 < n <= share or n == share == 0 for n, share in zip(lengths, shares, strict=True))
    if compressor.support_form == "indices":
        assert lengths == shares


def test_ratios_round_down_or_to_the_even_neighbour():
    lengths = torch.tensor([0, 1, 5, 9, 15, 100])
    assert Budget(name="any", ratio=0.29).budgets(lengths).tolist() == [0, 1, 1, 2, 4, 29]
    even = Budget(name="any", ratio=0.5, rounding="half_even").budgets(lengths)
    assert even.tolist() == [0, 1, 2, 4, 8, 50]


@pytest.mark.parametrize("name", COMPRESSORS.names())
def test_missing_taps_are_named(name, ragged):
    compressor = build(name, ragged)
    for tap in compressor.needs_taps:
        with pytest.raises(SpecError, match=f"got '{tap.name}', which is not in the batch"):
            compressor.compress(ragged(LENGTHS))


@pytest.mark.parametrize("name", COMPRESSORS.names())
def test_specs_say_what_is_wrong(name):
    cls = COMPRESSORS.load(name)
    with pytest.raises(SpecError) as error:
        parse(cls.Spec, {"name": name, "num_vector": 3})
    assert str(error.value).startswith("unknown field 'num_vector'; ")
    assert str(error.value).endswith(f" valid fields: {', '.join(cls.Spec.model_fields)}")
    if "num_vectors" in cls.Spec.model_fields:
        with pytest.raises(SpecError) as error:
            parse(cls.Spec, {"name": name, "num_vectors": 0})
        assert str(error.value) == ("num_vectors must be greater than or equal to 1, got 0")
        with pytest.raises(SpecError, match="field 'num_vectors' is required"):
            parse(cls.Spec, {"name": name})
    if issubclass(cls, Budgeted):
        with pytest.raises(
            SpecError, match="ratio must be null when num_vectors is given, got 0.5"
        ):
            parse(cls.Spec, {"name": name, "num_vectors": 3, "ratio": 0.5})
        with pytest.raises(SpecError, match="ratio must be .*, got 0"):
            parse(cls.Spec, {"name": name, "ratio": 0})


def assert_equal(a, b):
    """Equal bits in all that has a meaning."""
    assert torch.equal(a.mask, b.mask)
    assert torch.equal(a.vectors[a.mask], b.vectors[b.mask])
    assert (a.support is None and b.support is None) or torch.equal(a.support, b.support)
