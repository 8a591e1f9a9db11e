import torch

from pipeline.compression.none import Uncompressed


def test_keeps_all_tokens_with_unit_length_and_extents(ragged, unit_items):
    batch = ragged([4, 0, 6], boxes=True)
    result = Uncompressed(Uncompressed.Spec()).compress(batch)
    assert result.assignment is None
    assert result.lengths.tolist() == [4, 0, 6]
    for i, expected in enumerate(unit_items(batch)):
        mask = result.mask[i]
        torch.testing.assert_close(result.vectors[i, mask].double().numpy(), expected)
        torch.testing.assert_close(result.extents[i, mask], batch.extents[i, batch.mask[i]])
