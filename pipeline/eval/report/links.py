"""Links from a report to the search page of a server."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pipeline.eval.examples import Example
from pipeline.eval.results import Evaluation

#: Scores of rows that the side-by-side view can show. Unequal weights are not among them.
SHOWN_SCORES = ("maxsim", "hybrid", "fused")


def side_by_side(evaluation: Evaluation, example: Example) -> str | None:
    """Returns the URL that shows a query with both rows of an example in the search page.

    Returns None if the evaluation has no `search_page`, or if a row has another score than MaxSim,
    hybrid with equal weights, or fused. The fields are those of `pipeline/serve/page/state.js`.
    """
    page = evaluation.spec.get("search_page")
    rows = [evaluation.row(name) for name in example.hits]
    if not page or any(row.label not in SHOWN_SCORES for row in rows):
        return None
    left, right = (rows * 2)[:2]
    fields = {"view": "compare", "q": example.query, "rep": left.representation}
    fields["rep2"] = right.representation
    if left.score != "maxsim":
        fields["score"] = left.score
    if right.score != left.score:
        fields["score2"] = right.score
    parts = urlsplit(page)
    query = urlencode([*parse_qsl(parts.query), *fields.items()])
    return urlunsplit(parts._replace(query=query))
