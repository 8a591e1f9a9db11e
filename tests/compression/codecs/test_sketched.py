"""Int8 vectors with sketches."""

import numpy as np
import torch

from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.int8 import Int8
from pipeline.compression.codecs.sketched import SKETCH, Sketched
from pipeline.search.packed import PackedVectors, Segment


def test_columns_contain_both_codes():
    vectors = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    artefact = Bits.fit(Bits.Spec(), vectors.numpy())
    codec, int8 = Sketched(Sketched.Spec(), artefact), Int8(Int8.Spec())
    bits = Bits(Bits.Spec(), artefact)
    assert codec.token_bytes(20) == int8.token_bytes(20) + bits.token_bytes(20) == 24 + 7
    parts, lengths = codec.unpack(codec.encode_rows(vectors, np.array([3, 0, 4])), 20)
    assert lengths.tolist() == [3, 0, 4]
    stored = {name: torch.from_numpy(part) for name, part in parts.items()}
    for prefix, expected in (("", int8.quantise(vectors)), (SKETCH, bits.quantise(vectors))):
        for name, part in expected.items():
            assert stored[prefix + name].equal(part)
    assert codec.dequantise(stored, 20).equal(int8.dequantise(int8.quantise(vectors), 20))
    packed = PackedVectors([Segment(codec, 20, stored, torch.from_numpy(lengths))])
    for part, other in ((packed.part(codec.vectors), int8), (packed.part(bits, SKETCH), bits)):
        assert part.item(2).equal(other.dequantise(other.quantise(vectors[3:]), 20))
