"""The uncompressed reference of a representation."""

import pytest

from pipeline.eval.diagnose import uncompressed_representation
from pipeline.index.reader import IndexReader
from tests.conftest import write_index

HPOOL = {"compressor": {"name": "hpool", "num_vectors": 2}}


@pytest.mark.parametrize(
    "codecs, reference",
    [
        (["int8", "float32", "float16"], "full"),
        (["int8", "float32"], "full_float32"),
        (["int8"], "full_int8"),
    ],
)
def test_reference_codec(tmp_path, codecs, reference):
    full = [{"compressor": "none", "codec": codec} for codec in codecs]
    write_index(str(tmp_path), [*full, HPOOL])
    index = IndexReader(str(tmp_path))
    assert uncompressed_representation(index, "hpool_2") == reference
