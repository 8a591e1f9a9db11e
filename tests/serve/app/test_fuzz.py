"""Fuzz tests of all routes with schemathesis: no request causes a 5xx status."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402 - after importorskip
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.heavy

CHECKS = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
CASES = 60
#: Existing names that replace generated ones, because most requests would be rejected otherwise.
EXISTING = {"index": "texts", "item_id": "wing/1", "representation": "hpool_2"}
#: Fields of requests whose generated values are rarely valid together.
RARELY_VALID = ("candidates", "filter", "fusion", "num_candidates", "rerank", "score", "weights")


def _insert_existing_names(case: schemathesis.Case, existing: dict[str, Any], mode: int) -> None:
    """Inserts existing names into a request: all of them (mode 0), only the index (1) or none."""
    names = list(existing)[: {0: len(existing), 1: 1}.get(mode, 0)]
    if mode == 0 and isinstance(case.body, dict):  # generated values are rarely valid
        valid = {"k": 3, "query": "the lift of a wing"}
        case.body |= {name: value for name, value in valid.items() if name in case.body}
        for name in RARELY_VALID:
            case.body.pop(name, None)
    if mode < 2 and case.path.startswith("/v1/indexes/"):
        case.path_parameters["name"] = existing["index"]
    for part in (case.path_parameters, case.query, case.body):
        if isinstance(part, dict):
            for name in names:
                if name in part or (name == "index" and part is not case.path_parameters):
                    part[name] = existing[name]


def test_no_server_errors(url):
    statuses = fuzz(url, EXISTING)
    assert statuses["/v1/search", 200] and statuses["/v1/search", 422]
    assert statuses["/v1/indexes/{name}/facets", 200]


def fuzz(url: str, existing: dict[str, Any]) -> Counter[tuple[str, int]]:
    """Returns the number of responses by route and status.

    Args:
        url: URL of the server.
        existing: Existing names by field, the index first.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.update(base_url=url)
    statuses: Counter[tuple[str, int]] = Counter()
    config = settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for result in schema.get_all_operations():
        operation = result.ok()

        @config
        @given(operation.as_strategy())
        def send(case: schemathesis.Case) -> None:
            _insert_existing_names(case, existing, len(repr(case.body)) % 3)
            headers = {**(case.headers or {}), "Authorization": "Bearer mr_all"}
            response = case.call(headers=headers, timeout=60)
            statuses[case.path, response.status_code] += 1
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400 and "/v1/" in case.path:
                assert set(response.json()) == {"error"}

        send()
    print(*(f"{path} {status}: {n}" for (path, status), n in sorted(statuses.items())), sep="\n")
    assert statuses.total() > 15 * CASES / 2
    return statuses
