"""Every field of every route under schemathesis: no request is answered by a 5xx."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402 - only where schemathesis is
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
#: What is there, in the place of what is drawn: else most requests would end at an unknown index.
REAL = {"index": "texts", "item_id": "wing/1", "representation": "hpool_2"}


def _with_what_is_there(case: schemathesis.Case, real: dict[str, Any], how_much: int) -> None:
    """Puts names of this server into a request; `how_much`: all, only the index, or nothing."""
    names = list(real)[: {0: len(real), 1: 1}.get(how_much, 0)]
    if how_much == 0 and isinstance(case.body, dict):  # what is rarely valid by chance
        case.body |= {"k": 3} if "k" in case.body else {}
        for name in ("filter", "rerank", "weights"):
            case.body.pop(name, None)
    for part in (case.path_parameters, case.query, case.body):
        if isinstance(part, dict):
            for name in names:
                if name in part or (name == "index" and part is not case.path_parameters):
                    part[name] = real[name]


def test_no_request_is_too_much(url):
    statuses = ask_everything(url, REAL)
    assert statuses["/v1/search", 200] and statuses["/v1/search", 422]


def ask_everything(url: str, real: dict[str, Any]) -> Counter[tuple[str, int]]:
    """How often each route answered with each status.

    Args:
        real: what is there, by field, the index first.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.update(base_url=url)
    statuses: Counter[tuple[str, int]] = Counter()
    how = settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for found in schema.get_all_operations():
        operation = found.ok()

        @how
        @given(operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            _with_what_is_there(case, real, len(repr(case.body)) % 3)
            headers = {**(case.headers or {}), "Authorization": "Bearer mr_all"}
            response = case.call(headers=headers, timeout=60)
            statuses[case.path, response.status_code] += 1
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400 and "/v1/" in case.path:
                assert set(response.json()) == {"error"}

        ask()
    print(*(f"{path} {status}: {n}" for (path, status), n in sorted(statuses.items())), sep="\n")
    assert statuses.total() > 15 * CASES / 2
    return statuses
