"""Tests of the settings of the server."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config import SpecError, parse
from pipeline.serve.settings import ServeSpec

INDEXES = {"texts": {"uri": "x"}}


@pytest.mark.parametrize(
    ("settings", "field", "name"),
    [
        ({"seconds": {"search": 5}}, "seconds", "timeouts"),
        ({"timeouts": {"search": 5}}, "timeouts.search", "search_s"),
        ({"timeouts": {"reload": 5}}, "timeouts.reload", "reload_interval_s"),
        ({"limits": {"body_bytes": 5}}, "limits.body_bytes", "max_body_bytes"),
        ({"limits": {"in_flight": 5}}, "limits.in_flight", "max_in_flight_requests"),
        ({"searcher": {"replicas": 2}}, "searcher.replicas", "num_replicas"),
        ({"evaluations": {"keep": 2}}, "evaluations.keep", "max_finished"),
    ],
)
def test_error_for_renamed_field_names_new_field(settings: dict[str, Any], field: str, name: str):
    with pytest.raises(SpecError, match=name) as error:
        parse(ServeSpec, {"indexes": INDEXES, **settings})
    assert error.value.field == field


def test_rejects_max_replicas_below_num_replicas():
    with pytest.raises(SpecError, match="num_replicas, 3"):
        parse(ServeSpec, {"indexes": INDEXES, "searcher": {"num_replicas": 3, "max_replicas": 2}})
