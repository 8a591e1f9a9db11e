"""Contract of all registered compressors."""

import dataclasses

import pytest
import torch

from pipeline import compression
from pipeline.compression import Budget, Budgeted, Compressor
from pipeline.config import SpecError, parse
from pipeline.registry import COMPRESSORS

NUM_VECTORS = 5
LENGTHS = [9, 1, 0, 23, 5, 4, 40, 6]
#: All methods, and options that select a different algorithm.
METHODS = [
    *COMPRESSORS.names(),
    *(f"{name} {seeds}" for name in ("samer", "spatial") for seeds in ("lattice", "farthest")),
    "kcenter progressive",
]
#: Methods whose items have the same number of vectors, also if they have fewer tokens.
CONSTANT = ("memtok", "seqresize")


def build(method, ragged, **budget) -> Compressor:
    name, _, option = method.partition(" ")
    cls = COMPRESSORS.load(name)
    if "num_vectors" in cls.Spec.model_fields:
        budget = budget or {"num_vectors": NUM_VECTORS}
    else:
        budget = {"ratio": 0.3} if "ratio" in cls.Spec.model_fields else {}
    options = {"output" if name == "kcenter" else "seeds": option} if option else {}
    if name == "seqresize":
        options = {"sequence_length": max(12, budget["num_vectors"]), "hidden_size": 7}
    compressor = cls(parse(cls.Spec, {"name": name, **budget, **options}))
    if not compressor.needs_fit:
        return compressor
    names = [tap.name for tap in compressor.needs_taps]
    sample = ragged([30] * 16, seed=9, boxes=True, taps=names)
    return cls(compressor.spec, cls.fit(compressor.spec, [sample]))


@pytest.fixture(params=METHODS)
def compressor(request, ragged):
    return build(request.param, ragged)


def make_batch(compressor, ragged, lengths=LENGTHS, **options):
    batch = ragged(lengths, taps=[tap.name for tap in compressor.needs_taps], **options)
    if compressor.spec.name != "memtok":
        return batch
    generator = torch.Generator().manual_seed(1)
    size = len(batch), compressor.spec.num_vectors, batch.vectors.shape[2]
    return dataclasses.replace(batch, appended=torch.randn(size, generator=generator))


def max_vectors(compressor):
    """Returns the maximum number of vectors per item; unlimited for methods without a budget."""
    return compressor.spec.num_vectors if isinstance(compressor, Budgeted) else 10**9


def limit(compressor, length):
    """Returns the maximum number of vectors of an item with `length` tokens."""
    if compressor.spec.name in CONSTANT:
        return compressor.spec.num_vectors if length else 0
    return min(max_vectors(compressor), length)


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_shapes_mask_and_unit_length(compressor, ragged, boxes, unit):
    batch = make_batch(compressor, ragged, boxes=boxes, unit=unit)
    result = compressor.compress(batch)
    num_items, width, _ = result.vectors.shape
    assert num_items == len(batch) and width <= limit(compressor, max(LENGTHS))
    assert result.vectors.is_floating_point()
    assert result.normalised == compressor.normalised
    for length, num_outputs in zip(LENGTHS, result.lengths.tolist(), strict=True):
        assert bool(num_outputs) == bool(length)
        assert num_outputs <= limit(compressor, length)
    # Real outputs come first.
    assert torch.equal(result.mask, torch.arange(width) < result.lengths.unsqueeze(1))
    if compressor.normalised:
        lengths = result.vectors[result.mask].norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_items_within_budget_keep_their_tokens(compressor, ragged, unit_items):
    if not compressor.keeps_tokens or not isinstance(compressor, Budgeted):
        pytest.skip("the method has no budget or changes the vectors of all items")
    batch = make_batch(compressor, ragged)
    result = compressor.compress(batch)
    for i, item in enumerate(unit_items(batch)):
        if len(item) <= max_vectors(compressor):
            found = result.vectors[i, result.mask[i]].double()
            torch.testing.assert_close(found, torch.from_numpy(item), atol=1e-6, rtol=0)


def test_assignment_maps_tokens_to_outputs(compressor, ragged):
    batch = make_batch(compressor, ragged)
    result = compressor.compress(batch)
    if compressor.assignment_form is None:
        assert result.assignment is None
        return
    if result.assignment is None:  # the assignment is the identity
        assert torch.equal(result.lengths, batch.lengths)
        return
    assert result.assignment.shape == batch.mask.shape and result.assignment.dtype == torch.int64
    assert (result.assignment[~batch.mask] == -1).all()
    for i, num_outputs in enumerate(result.lengths.tolist()):
        assignment = result.assignment[i, batch.mask[i]].tolist()
        if compressor.assignment_form == "indices":
            # Each output is one token, in the original order.
            assert [k for k in assignment if k >= 0] == list(range(num_outputs))
        else:
            # Methods that also prune leave some tokens unassigned, but not all.
            assert all(-1 <= k < num_outputs for k in assignment)
            assert not assignment or max(assignment) >= 0


def test_runs_are_bit_identical(compressor, ragged):
    batch = make_batch(compressor, ragged, boxes=True)
    assert_equal(compressor.compress(batch), compressor.compress(batch))


def test_other_devices_compute_the_same(compressor, ragged, monkeypatch):
    """Some helpers use other operations on GPUs, which yield the same results on a CPU."""
    batch = make_batch(compressor, ragged, boxes=True)
    expected = compressor.compress(batch)
    monkeypatch.setattr(compression, "is_cpu", lambda tensor: False)
    found = compressor.compress(batch)
    assert torch.equal(found.mask, expected.mask)
    if expected.assignment is not None:
        assert torch.equal(found.assignment, expected.assignment)
    torch.testing.assert_close(
        found.vectors[found.mask], expected.vectors[expected.mask], atol=1e-5, rtol=0
    )


def test_large_items_are_computed_in_parts(compressor, ragged, monkeypatch):
    batch = make_batch(compressor, ragged)
    expected = compressor.compress(batch)
    monkeypatch.setattr(compression, "LARGE", 16)
    result = compressor.compress(batch)
    torch.testing.assert_close(result.vectors, expected.vectors, rtol=0, atol=1e-6)
    assert torch.equal(result.mask, expected.mask)
    if expected.assignment is not None:
        assert torch.equal(result.assignment, expected.assignment)


def test_result_is_independent_of_batch(compressor, ragged):
    batch = make_batch(compressor, ragged, boxes=True)
    together = compressor.compress(batch)
    for i in range(len(batch)):
        real = batch.mask[i]
        alone = dataclasses.replace(
            batch,
            vectors=batch.vectors[i : i + 1, real],
            mask=torch.ones(1, int(real.sum()), dtype=torch.bool),
            extents=batch.extents[i : i + 1, real],
            taps={name: tap[i : i + 1, real] for name, tap in batch.taps.items()},
            appended=None if batch.appended is None else batch.appended[i : i + 1],
        )
        result = compressor.compress(alone)
        torch.testing.assert_close(
            result.vectors[result.mask], together.vectors[i, together.mask[i]], atol=1e-6, rtol=0
        )
        if result.assignment is not None:
            assert torch.equal(result.assignment[0], together.assignment[i, real])


@pytest.mark.parametrize("length", [40, NUM_VECTORS, 3])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_batches_without_padding_equal_others(
    compressor, ragged, monkeypatch, length, in_blocks, is_cpu
):
    """Some methods need no masks for them. The other batch has an additional longer item."""
    padded = make_batch(compressor, ragged, [length, length, length, length + 2], boxes=True)
    expected = compressor.compress(padded)

    def unpad(tensor):
        return tensor[:3][padded.mask[:3]].unflatten(0, (3, length))

    full = dataclasses.replace(
        padded,
        vectors=unpad(padded.vectors),
        mask=unpad(padded.mask),
        extents=unpad(padded.extents),
        taps={name: unpad(tap) for name, tap in padded.taps.items()},
        appended=None if padded.appended is None else padded.appended[:3],
    )
    monkeypatch.setattr(compression, "is_cpu", lambda tensor: is_cpu)
    if in_blocks:
        monkeypatch.setitem(compression.MAX_BLOCK_ELEMENTS, "cpu", 1)
    found = compressor.compress(full)
    for i in range(3):
        torch.testing.assert_close(
            found.vectors[i, found.mask[i]],
            expected.vectors[i, expected.mask[i]],
            atol=1e-5,
            rtol=0,
        )
        if expected.assignment is not None:
            assert torch.equal(found.assignment[i], expected.assignment[i, padded.mask[i]])


@pytest.mark.parametrize("garbage", [float("inf"), 1e30, -7.0])
def test_values_at_padding_are_ignored(compressor, ragged, garbage):
    clean = compressor.compress(make_batch(compressor, ragged, boxes=True, garbage=0.0))
    for value in (garbage, float("nan")):
        batch = make_batch(compressor, ragged, boxes=True, garbage=value)
        assert_equal(compressor.compress(batch), clean)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("num_padding", [0, 2, 3])
def test_empty_batches_and_short_items(compressor, ragged, lengths, num_padding):
    batch = make_batch(compressor, ragged, lengths, num_padding=num_padding, boxes=True)
    result = compressor.compress(batch)
    assert result.lengths.tolist() == [limit(compressor, length) for length in lengths]
    assert result.assignment is None or result.assignment.shape == batch.mask.shape


def test_equal_tokens(compressor, ragged):
    """All tokens and attention values of a blank page are equal."""
    batch = make_batch(compressor, ragged, boxes=True)
    batch.vectors[:] = torch.arange(1.0, 9)
    for values in batch.taps.values():
        values[:] = 0.1
    result = compressor.compress(batch)
    assert result.vectors[result.mask].isfinite().all()
    assert torch.equal(result.lengths > 0, batch.lengths > 0)
    if compressor.keeps_tokens:
        vectors = result.vectors[result.mask]
        token = torch.arange(1.0, 9) / torch.arange(1.0, 9).norm()
        torch.testing.assert_close(vectors, token.expand_as(vectors), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_vectors", [1, 2, 39, 40, 1000])
def test_any_budget(name, ragged, num_vectors):
    compressor = build(name, ragged, num_vectors=num_vectors)
    result = compressor.compress(make_batch(compressor, ragged))
    assert result.vectors[result.mask].isfinite().all()
    assert result.lengths.max() <= limit(compressor, max(LENGTHS))


@pytest.mark.parametrize("name", COMPRESSORS.names())
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 1.0])
def test_ratio_applies_to_each_item(name, ratio, ragged):
    if not issubclass(COMPRESSORS.load(name), Budgeted):
        pytest.skip("the method has no budget")
    compressor = build(name, ragged, ratio=ratio)
    lengths = compressor.compress(make_batch(compressor, ragged)).lengths.tolist()
    limits = [min(length, max(1, int(length * ratio + 1e-9))) for length in LENGTHS]
    assert all(0 < n <= k or n == k == 0 for n, k in zip(lengths, limits, strict=True))
    if compressor.assignment_form == "indices":
        assert lengths == limits


def test_rounding_of_ratios():
    lengths = torch.tensor([0, 1, 5, 9, 15, 100])
    assert Budget(name="any", ratio=0.29).budgets(lengths).tolist() == [0, 1, 1, 2, 4, 29]
    even = Budget(name="any", ratio=0.5, rounding="half_even").budgets(lengths)
    assert even.tolist() == [0, 1, 2, 4, 8, 50]


@pytest.mark.parametrize("name", COMPRESSORS.names())
def test_rejects_missing_taps(name, ragged):
    compressor = build(name, ragged)
    for tap in compressor.needs_taps:
        with pytest.raises(SpecError, match=f"got '{tap.name}', which is not in the batch"):
            compressor.compress(ragged(LENGTHS))


@pytest.mark.parametrize("name", COMPRESSORS.names())
def test_rejects_invalid_specs(name):
    cls = COMPRESSORS.load(name)
    with pytest.raises(SpecError) as error:
        parse(cls.Spec, {"name": name, "num_vector": 3})
    assert str(error.value).startswith("unknown field 'num_vector'; ")
    assert str(error.value).endswith(f" valid fields: {', '.join(cls.Spec.model_fields)}")
    if "num_vectors" in cls.Spec.model_fields:
        with pytest.raises(SpecError) as error:
            parse(cls.Spec, {"name": name, "num_vectors": 0})
        assert str(error.value) == ("num_vectors must be greater than or equal to 1, got 0")
        if name != "memtok":
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
    """Asserts bit-identical results, except at padding."""
    assert torch.equal(a.mask, b.mask)
    assert torch.equal(a.vectors[a.mask], b.vectors[b.mask])
    assert (a.assignment is None and b.assignment is None) or torch.equal(
        a.assignment, b.assignment
    )
