"""Names of the scores, shared by search, evaluation, HTTP and the command line."""

from __future__ import annotations

from typing import Literal, get_args

Score = Literal["maxsim", "single_vector", "hybrid", "fused"]
SCORES: tuple[Score, ...] = get_args(Score)
#: Scores that need no BM25.
VECTOR_SCORES: tuple[Score, ...] = ("maxsim", "single_vector", "hybrid")
