"""MaxSim against the oracle, and the oracle against values computed by hand."""

import numpy as np
import pytest
import torch

from pipeline.search.maxsim import best_tokens, maxsim, maxsim_oracle
from pipeline.search.packed import PackedVectors
from pipeline.tokens import pad

packed = PackedVectors.from_values

LENGTHS = [3, 0, 1, 7, 0, 0, 25, 1, 4, 0]


def documents(dim: int, lengths=LENGTHS, shift: float = 0.0, seed: int = 0):
    """Returns random tokens (T, D) and lengths; `shift` moves all similarities."""
    generator = torch.Generator().manual_seed(seed)
    tokens_TD = torch.randn(sum(lengths), dim, generator=generator) / dim**0.5 + shift
    return tokens_TD, torch.tensor(lengths)


def queries(dim: int, lengths=(4, 1, 6)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, dim, generator=generator) for length in lengths]


def oracle(queries, tokens_TD, lengths_B, **options) -> torch.Tensor:
    padded, mask = pad(tokens_TD.float().numpy(), lengths_B.numpy(), fill=99.0)
    return torch.stack([maxsim_oracle(query, padded, mask, **options)[0] for query in queries])


def test_oracle():
    query_MD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    docs_BND = torch.tensor(
        [
            [[-1.0, -2.0], [-3.0, -1.0], [9.0, 9.0]],
            [[2.0, 0.0], [2.0, 3.0], [0.0, 0.0]],
            [[9.0, 9.0], [9.0, 9.0], [9.0, 9.0]],
        ]
    )
    mask_BN = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    query_mask_M = torch.tensor([True, True, False])
    scores, best = maxsim_oracle(query_MD, docs_BND, mask_BN, query_mask_M=query_mask_M)
    assert scores.tolist() == [-1.0 - 1.0, 2.0 + 3.0, -torch.inf]
    assert best.tolist() == [[0, 1, 0], [0, 1, 1], [-1, -1, -1]]
    means, _ = maxsim_oracle(query_MD, docs_BND, mask_BN, query_mask_M=query_mask_M, reduce="mean")
    assert means.tolist() == [-1.0, 2.5, -torch.inf]


@pytest.mark.parametrize("dim", [48, 128, 384, 2048])
@pytest.mark.parametrize("block_bytes", [1, 6000, 8 << 20])
def test_equals_oracle_over_widths_and_blocks(dim, block_bytes):
    tokens_TD, lengths_B = documents(dim)
    scores = maxsim(queries(dim), packed(tokens_TD, lengths_B), block_bytes=block_bytes)
    torch.testing.assert_close(scores, oracle(queries(dim), tokens_TD, lengths_B))
    assert torch.isneginf(scores[:, lengths_B == 0]).all()


def test_float16_tokens_are_scored_in_float32():
    tokens_TD, lengths_B = documents(128)
    half_TD = tokens_TD.half()
    scores = maxsim(queries(128), packed(half_TD, lengths_B))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, oracle(queries(128), half_TD, lengths_B))


def test_all_similarities_negative():
    tokens_TD, lengths_B = documents(64, shift=-5.0)
    positive = [query.abs() for query in queries(64)]
    scores = maxsim(positive, packed(tokens_TD, lengths_B), block_bytes=9000)
    assert (scores < 0).all()
    torch.testing.assert_close(scores, oracle(positive, tokens_TD, lengths_B))


@pytest.mark.parametrize("selected", [[0, 2, 3], [1, 4], [1, 6, 9], [3], list(range(10)), []])
@pytest.mark.parametrize("block_bytes", [1, 8 << 20])
def test_selected_documents(selected, block_bytes):
    tokens_TD, lengths_B = documents(48)
    rows = torch.tensor(selected, dtype=torch.int64)
    scores = maxsim(queries(48), packed(tokens_TD, lengths_B), rows=rows, block_bytes=block_bytes)
    torch.testing.assert_close(scores, oracle(queries(48), tokens_TD, lengths_B)[:, rows])


def test_masked_query_tokens_contribute_nothing():
    tokens_TD, lengths_B = documents(48)
    query_MD = queries(48, [6])[0]
    mask_M = torch.tensor([True, False, True, False, False, True])
    expected = oracle([query_MD], tokens_TD, lengths_B, query_mask_M=mask_M)
    torch.testing.assert_close(maxsim([query_MD[mask_M]], packed(tokens_TD, lengths_B)), expected)


def test_score_of_empty_query_is_zero():
    tokens_TD, lengths_B = documents(48, [2, 0, 1])
    empty = torch.empty(0, 48)
    expected = [0.0, -torch.inf, 0.0]
    assert maxsim([empty], packed(tokens_TD, lengths_B)).tolist() == [expected]
    both = maxsim([empty, *queries(48, [3])], packed(tokens_TD, lengths_B))
    assert both[0].tolist() == expected
    torch.testing.assert_close(both[1:], oracle(queries(48, [3]), tokens_TD, lengths_B))


def test_no_documents_or_queries():
    tokens_TD, lengths_B = documents(48, [])
    assert maxsim(queries(48), packed(tokens_TD, lengths_B)).shape == (3, 0)
    assert maxsim([], packed(*documents(48))).shape == (0, len(LENGTHS))


def test_scores_do_not_depend_on_positions():
    """Ties are broken by id, so scores must not depend on the position in a block."""
    tokens_TD, _ = documents(384, [37])
    other_TD, _ = documents(384, [1001], seed=2)
    copies = torch.cat([tokens_TD, other_TD[:500], tokens_TD, other_TD[500:], tokens_TD])
    lengths_B = torch.tensor([37, 500, 37, 501, 37])
    for size in (1, 5, 32):
        scores = maxsim(queries(384, [size]), packed(copies, lengths_B), block_bytes=1 << 20)[0]
        assert scores[0] == scores[2] == scores[4]


def test_random_shapes_equal_oracle():
    generator = np.random.default_rng(7)
    for _ in range(40):
        dim = int(generator.choice([3, 17, 64]))
        lengths = generator.integers(0, 30, generator.integers(1, 40)).tolist()
        tokens_TD, lengths_B = documents(dim, lengths, seed=int(generator.integers(1 << 30)))
        query_tokens = queries(dim, generator.integers(1, 9, generator.integers(1, 6)).tolist())
        block_bytes = int(generator.integers(1, 40000))
        scores = maxsim(query_tokens, packed(tokens_TD, lengths_B), block_bytes=block_bytes)
        torch.testing.assert_close(scores, oracle(query_tokens, tokens_TD, lengths_B))


@pytest.mark.parametrize("block_bytes", [1, 6000, 8 << 20])
@pytest.mark.parametrize("selected", [None, [0, 1, 6, 8], [1], []])
def test_best_tokens_equal_the_oracle(block_bytes, selected):
    tokens_TD, lengths_B = documents(48)
    tokens_TD[5] = tokens_TD[9] = tokens_TD[6]  # ties resolve to the first token
    query_MD = torch.cat(queries(48))
    padded, mask = pad(tokens_TD.numpy(), lengths_B.numpy(), fill=99.0)
    _, expected = maxsim_oracle(query_MD, padded, mask)
    rows = None if selected is None else torch.tensor(selected, dtype=torch.int64)
    expected = expected if rows is None else expected[rows]
    options = {"rows": rows, "block_bytes": block_bytes}
    end = 0
    for first, sim_bM, token_bM in best_tokens(query_MD, packed(tokens_TD, lengths_B), **options):
        assert first == end
        end += len(token_bM)
        assert token_bM.tolist() == expected[first:end].tolist()
        assert torch.isneginf(sim_bM).equal(token_bM < 0)
    assert end == len(expected)
