"""Encodes, compresses and scores five texts in one process, without Ray and without an index.

`pipeline.encoders`, `pipeline.compression` and `pipeline.search.maxsim` depend on neither Ray nor
Lance, so they can be used in any other program.

    python examples/core_without_ray.py
"""

import pyarrow as pa
import torch

from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors
from pipeline.search.query import Queries
from pipeline.tokens import flat_rows

TEXTS = [
    "The boundary layer of a flat plate becomes turbulent at high Reynolds numbers.",
    "Late interaction compares every query token with every document token.",
    "A wing with a swept leading edge delays the rise of drag near the speed of sound.",
    "Farthest-point sampling picks the point that is farthest from all chosen points.",
    "Heat transfer to a blunt body in hypersonic flow is largest at the stagnation point.",
]
QUERY = "why do fast aircraft have swept wings"
NUM_VECTORS = 4


def main() -> None:
    """Prints the texts in the order of their MaxSim scores, uncompressed and compressed."""
    encoder = ENCODERS.build(ENCODERS.resolve("minilm"))
    items = pa.table({"item_id": [str(i) for i in range(len(TEXTS))], "text": TEXTS})
    query = Queries.from_encoded(encoder.encode_queries([QUERY]))

    for name in ("none", "hpool"):
        options = {} if name == "none" else {"num_vectors": NUM_VECTORS}
        compressor = COMPRESSORS.build(COMPRESSORS.resolve({"name": name, **options}))
        scores = torch.zeros(len(TEXTS))
        num_vectors = 0
        for rows, batch in encoder.encode(items):
            compressed = compressor.compress(batch)
            vectors, lengths = flat_rows(compressed.vectors, compressed.mask)
            packed = PackedVectors.from_values(vectors, torch.from_numpy(lengths))
            tokens = [compressor.transform_queries(query.tokens[0])]
            scores[torch.from_numpy(rows)] = maxsim(tokens, packed)[0]
            num_vectors += len(vectors)
        print(f"{name}: {num_vectors} vectors")
        for row in scores.argsort(descending=True).tolist():
            print(f"  {scores[row]:7.4f}  {TEXTS[row]}")


if __name__ == "__main__":
    main()
