"""Units with items that a stage cannot process."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.decode import Unreadable
from pipeline.index.stage import Processed, Stage, Unit, run_stage
from pipeline.index.stages import ColumnCollector
from pipeline.schema import ITEM, Item

ERRORS = {
    "thin": Unreadable("not supported"),
    "long": MemoryError("too many tokens"),
    "broken": ValueError("no such token"),
}


class Failing(Stage):
    """Adds columns for the fields of items, rejects empty ones and fails for others."""

    name = "encode"

    def process(self, items: pa.Table) -> Processed:
        ids = items["item_id"].to_pylist()
        for item_id in ids:
            if error := ERRORS.get(item_id.rstrip("0123456789")):
                raise error
        collector = ColumnCollector()
        for field, prefix in (("content", "good"), ("caption", "captioned")):
            rows = np.array([i for i, name in enumerate(ids) if name.startswith(prefix)], int)
            collector.add(field, rows, pa.table({f"{field} vectors": [1.0] * len(rows)}))
        return Processed(*collector.join(items, ["content", "caption"], "nothing"))


@pytest.mark.parametrize(
    "names",
    [
        "thin1 thin2",
        "long1 long2",
        "thin1 good thin2",
        "thin1 blank",
        "blank good long1",
        "good blank broken1",
        "long1 good captioned",
        "good captioned broken1",
        "captioned thin1 blank broken1",
        "thin1",
        "broken1",
    ],
)
def test_rejects_only_items_that_fail(names):
    ids = names.split()
    rows = [Item(name, name, "test", "text", "r1", text="text").row() for name in ids]
    unit = run_stage(Failing(), Unit("000000", pa.Table.from_pylist(rows, schema=ITEM)))
    accepted = [name for name in ids if name.startswith(("good", "captioned"))]
    assert unit.items["item_id"].to_pylist() == accepted
    assert sorted(unit.rejects["item_id"].to_pylist()) == sorted(set(ids) - set(accepted))
    for field, prefix in (("content", "good"), ("caption", "captioned")):
        if any(name.startswith(prefix) for name in accepted):
            values = [1.0 if name.startswith(prefix) else None for name in accepted]
            assert unit.items[f"{field} vectors"].to_pylist() == values


def test_error_of_all_items_is_an_error_of_the_stage():
    rows = [Item(name, name, "test", "text", "r1").row() for name in ("broken1", "broken2")]
    unit = Unit("000000", pa.Table.from_pylist(rows, schema=ITEM))
    with pytest.raises(ValueError, match="no such token"):
        run_stage(Failing(), unit)
