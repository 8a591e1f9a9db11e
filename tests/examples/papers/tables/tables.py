"""A small table, whose steps need no data."""

from __future__ import annotations

from typing import Any

from examples.papers.tables.plan import Folders
from examples.papers.tables.spec import TableSpec
from pipeline import config
from tests.conftest import ROOT

FOLDERS = Folders("/data", "/out", str(ROOT))


def fields(**changes: Any) -> dict[str, Any]:
    """Returns the fields of a table of two methods on two data sets."""
    return {
        "title": "A table",
        "source": "A paper, table 1",
        "variables": {
            "method": {
                "full": None,
                "hpool": {
                    "values": {"run": "hpool_${budget}", "budget": "8"},
                    "steps": {
                        "index": {
                            "representations": [
                                {"compressor": {"name": "hpool", "num_vectors": "${budget}"}}
                            ]
                        }
                    },
                },
            },
            "dataset": {
                "one": {"values": {"run": "full"}},
                "two": {"values": {"run": "full"}, "requires": ["beir_${dataset}"]},
            },
        },
        "groups": {"dataset": {"both": ["one", "two"]}},
        "steps": {
            "index": {
                "base": "jobs/specs/cranfield.yaml",
                "set": {
                    "index": "out/${dataset}/${run}",
                    "source.path": "data/${dataset}",
                    "sweep": [],
                },
            },
            "evaluate": {
                "base": "jobs/specs/cranfield_evaluate.yaml",
                "set": {
                    "index": "out/${dataset}/${run}",
                    "output": "out/${dataset}/${run}_results",
                },
            },
        },
        "labels": {"both": "average"},
        "columns": [{"dataset": ["both", "one"], "measure": ["R@1"]}],
        "rows": [
            {
                "label": "full",
                "at": {"method": "full", "representation": "full"},
                "paper": [50, 60],
            },
            {
                "label": "hpool",
                "at": {"method": "hpool", "representation": "hpool_${budget}"},
                "paper": [40, None],
            },
        ],
        "miniature": {
            "values": {"budget": "2"},
            "steps": {"index": {"source.path": "jobs/data/cranfield"}},
        },
        **changes,
    }


def table(**changes: Any) -> TableSpec:
    """Returns the spec of the table with changed fields."""
    return config.parse(TableSpec, fields(**changes))
