"""Tests of the columns of an index and of warnings about their settings."""

import lance
import pyarrow as pa

from pipeline.index.columns import Representation, compressor_remarks, representation_fields
from pipeline.index.info import EncoderInfo
from pipeline.index.positions import EXTENTS, STORED_EXTENTS, encode_positions
from tests.compression.test_seeds import grid_extents


def test_degenerate_seed_placement_is_reported_once(tmp_path):
    """One warning covers all affected representations; it is based on the stored extents."""
    encoder_info = EncoderInfo(
        spec={"name": "colpali"},
        dim=4,
        pooled_dim=None,
        normalised=True,
        has_spans=False,
        has_extents=True,
        fingerprint="0",
        prefix="colpali",
        num_layers=None,
        query_kinds=("text",),
    )
    representations = [
        Representation(compressor={"name": name, "num_vectors": budget, **seeds})
        for name in ("samer", "spatial")
        for budget, seeds in ((8, {}), (9, {}), (8, {"seeds": "lattice"}))
    ]
    fields = [
        field for r in representations for field in representation_fields(r, encoder_info, None)
    ]
    rows = pa.array([None, grid_extents(14, 14).tolist()], EXTENTS)
    schema = pa.schema([pa.field("colpali_extents", STORED_EXTENTS)])
    table = encode_positions(pa.table({"colpali_extents": rows}), schema)
    for field in fields:
        table = table.append_column(field, pa.nulls(2, field.type))
    dataset = lance.write_dataset(table, str(tmp_path / "index"))
    assert compressor_remarks(dataset, representations) == [
        "samer_8, spatial_8: all 8 seeds are in 2 of the 14 columns of the 14 x 14 tokens;"
        " set seeds to lattice or farthest, or choose another budget"
    ]
    assert compressor_remarks(dataset, representations[1:3]) == []
