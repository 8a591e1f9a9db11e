import numpy as np
import pytest
import torch

from pipeline.compression.hpc import HPC
from pipeline.compression.random import sample_tokens
from pipeline.config import SpecError, parse
from pipeline.tokens import TokenBatch, unit_vectors

TAP = "eos_row/mean/last"
LENGTHS = [23, 4, 0, 9, 1, 40, 6]


def fitted(ragged, **options):
    spec = HPC.Spec(**{"num_vectors": 5, "num_centroids": 7, **options})
    return HPC(spec, HPC.fit(spec, [ragged([50, 0, 30], seed=9)]))


def reference(x, saliency, codebook, num):
    """Returns the codes of the top tokens in order of appearance, and the output of each token."""
    ranked = sorted(range(len(x)), key=lambda n: (-saliency[n], n))
    codes, assignment = [], []
    for n in range(len(x)):
        if n not in ranked[:num]:
            assignment.append(-1)
            continue
        code = int(np.argmax([x[n] @ centroid for centroid in codebook]))
        if code not in codes:
            codes.append(code)
        assignment.append(codes.index(code))
    return codes, assignment


@pytest.mark.parametrize("budget", [{"num_vectors": 5}, {"num_vectors": None, "ratio": 0.6}])
@pytest.mark.parametrize("binary", [False, True])
def test_equals_reference(ragged, unit_items, binary, budget):
    compressor = fitted(ragged, binary=binary, **budget)
    codebook = compressor.artefact["codebook"].astype(np.float64)
    batch = ragged(LENGTHS, taps=[TAP])
    result = compressor.compress(batch)
    num_merged = 0
    for i, x in enumerate(unit_items(batch)):
        num = compressor.spec.num_vectors or max(1, int(0.6 * len(x)))
        saliency = batch.taps[TAP][i, batch.mask[i]].tolist()
        codes, assignment = reference(x, saliency, codebook, num)
        expected = codebook[codes]
        if binary:  # 7 centroids: 3 bits
            signs = [[1 if code >> shift & 1 else -1 for shift in range(3)] for code in codes]
            expected = np.array(signs).reshape(-1, 3) / np.sqrt(3)
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], expected, atol=1e-6)
        assert result.assignment[i, batch.mask[i]].tolist() == assignment
        num_merged += min(len(x), num) - len(codes)
    assert num_merged > 0


def test_codebook_is_fixed_point_of_spherical_k_means(ragged):
    sample = ragged([200, 100])
    spec = HPC.Spec(num_vectors=5, num_centroids=6, num_iterations=200)
    codebook = HPC.fit(spec, [sample])["codebook"]
    tokens = unit_vectors(sample)[sample.mask].double().numpy()
    members = [[] for _ in codebook]
    for token in tokens:
        members[int(np.argmax([token @ centroid for centroid in codebook]))].append(token)
    for centroid, group in zip(codebook, members, strict=True):
        mean = sum(group)
        np.testing.assert_allclose(centroid, mean / np.sqrt((mean**2).sum()), atol=1e-5)


def test_codebook_depends_only_on_tokens_and_seed(ragged):
    """Batches, order and padding of the items make no difference."""
    sample = ragged([300, 500, 0, 200, 700], dim=16)
    spec = HPC.Spec(num_vectors=5, num_centroids=4, num_iterations=3)  # fitted on 1024 tokens
    codebook = HPC.fit(spec, [sample])["codebook"]
    np.testing.assert_array_equal(HPC.fit(spec, [sample])["codebook"], codebook)
    items = [
        TokenBatch(
            sample.vectors[i : i + 1, sample.mask[i]],
            torch.ones(1, int(sample.lengths[i]), dtype=torch.bool),
            normalised=False,
        )
        for i in (3, 2, 0, 4, 1)
    ]
    np.testing.assert_array_equal(HPC.fit(spec, items)["codebook"], codebook)
    other = HPC.fit(spec.model_copy(update={"seed": 1}), [sample])["codebook"]
    assert not np.allclose(other, codebook)


def test_sample_is_uniform_and_bounded(ragged):
    items = [ragged([100, 300], seed=seed) for seed in range(50)]
    tokens = sample_tokens(iter(items), 0, 2000)
    assert tokens.shape == (2000, 8)
    known = {
        token.tobytes(): i for i, x in enumerate(items) for token in unit_vectors(x)[x.mask].numpy()
    }
    counts = np.bincount([known[token.tobytes()] for token in tokens], minlength=50)
    assert ((counts - 40) ** 2 / 40).sum() < 85.4  # 99.9 % quantile at 49 degrees of freedom


def test_fewer_tokens_than_centroids_yield_smaller_codebook(ragged):
    spec = HPC.Spec(num_vectors=50)
    sample = ragged([12], taps=[TAP])
    compressor = HPC(spec, HPC.fit(spec, [sample]))
    assert compressor.artefact["codebook"].shape == (12, 8)
    tokens = unit_vectors(sample)[sample.mask]
    torch.testing.assert_close(compressor.compress(sample).vectors[0], tokens)


def test_rejects_sample_without_tokens(ragged):
    spec = HPC.Spec(num_vectors=5)
    for sample in ([], [ragged([0, 0])]):
        with pytest.raises(SpecError, match="sample must be at least one token, got '0 tokens'"):
            HPC.fit(spec, sample)


@pytest.mark.parametrize("num_centroids", [1, 2, 7, 8, 9])
def test_dot_product_of_bits_equals_hamming_distance(ragged, num_centroids):
    compressor = fitted(ragged, num_centroids=num_centroids, binary=True)
    codebook = torch.from_numpy(compressor.artefact["codebook"])
    found = compressor.transform_queries(3 * codebook)  # a centroid is nearest to itself
    num_bits = max(1, int(np.ceil(np.log2(num_centroids))))
    assert found.shape == (num_centroids, num_bits) and compressor.output_dim(8) == num_bits
    for a in range(num_centroids):
        for b in range(num_centroids):
            hamming = bin(a ^ b).count("1")
            assert float(found[a] @ found[b]) == pytest.approx(1 - 2 * hamming / num_bits, abs=1e-6)


def test_tokens_of_item_as_query_score_1(ragged):
    compressor = fitted(ragged, num_vectors=50, binary=True)
    batch = ragged([20], taps=[TAP])
    stored = compressor.compress(batch)
    queries = compressor.transform_queries(batch.vectors[0, batch.mask[0]])
    best = (queries @ stored.vectors[0, stored.mask[0]].T).amax(dim=1)
    torch.testing.assert_close(best, torch.ones(20))


def test_queries_are_unchanged_without_bits(ragged):
    queries = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    compressor = fitted(ragged)
    assert compressor.transform_queries(queries) is queries and compressor.output_dim(8) == 8


def test_rejects_invalid_saliency():
    with pytest.raises(
        SpecError, match="saliency must be STATISTIC/HEADS/LAYERS .*, got 'attention'"
    ):
        parse(HPC.Spec, {"num_vectors": 5, "saliency": "attention"})
    spec = parse(HPC.Spec, {"num_vectors": 5, "saliency": "column_sums"})
    assert spec.saliency == "column_sums/mean/last"
    assert [tap.name for tap in HPC(spec).needs_taps] == [spec.saliency]
