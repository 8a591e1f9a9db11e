"""What a representation is held against when it is diagnosed."""

import pytest

from pipeline.eval.diagnose import full_tokens_of
from pipeline.index.reader import Index
from tests.conftest import write_index

HPOOL = {"compressor": {"name": "hpool", "num_vectors": 2}}


@pytest.mark.parametrize(
    "codecs, oracle",
    [
        (["int8", "float32", "float16"], "full"),
        (["binary", "int8", "float32"], "full_float32"),
        (["binary", "int8"], "full_int8"),
        (["binary"], None),
    ],
)
def test_the_oracle_is_the_least_rounded_of_the_full_tokens(tmp_path, codecs, oracle):
    full = [{"compressor": "none", "codec": codec} for codec in codecs]
    write_index(str(tmp_path), [*full, {**HPOOL, "codec": "binary"}, HPOOL])
    index = Index(str(tmp_path))
    assert full_tokens_of(index, "hpool_2") == oracle
    # Signs give scores of another scale.
    assert full_tokens_of(index, "hpool_2_binary") is None
