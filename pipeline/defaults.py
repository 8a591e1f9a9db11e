"""Default representation of the items of an index, and default score of a search.

They are chosen on one half of the queries of the open collection and tested on the other half:
docs/results/defaults.md has the rule, and docs/results/defaults.csv the table that they come from.
"""

from __future__ import annotations

from typing import Any, Literal

#: Compressor of the representation besides the uncompressed one.
COMPRESSOR: dict[str, Any] = {"name": "kcenter", "num_vectors": 32}
#: Codec of all representations.
CODEC = "int8"
#: Score.
SCORE: Literal["maxsim", "hybrid"] = "maxsim"
