import torch

from pipeline.compression.none import Uncompressed


def test_keeps_every_token_at_unit_length_with_its_position(ragged, unit_items):
    batch = ragged([4, 0, 6], boxes=True)
    result = Uncompressed(Uncompressed.Spec()).compress(batch)
    assert result.support is None
    assert result.lengths.tolist() == [4, 0, 6]
    for i, expected in enumerate(unit_items(batch)):
        kept = result.mask[i]
        torch.testing.assert_close(result.vectors[i, kept].double().numpy(), expected)
        torch.testing.assert_close(result.extents[i, kept], batch.extents[i, batch.mask[i]])
