"""Names of the scores, shared by search, evaluation, HTTP and the command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from pipeline.config import RenamedValue

ScoreName = Literal["maxsim", "single_vector", "hybrid", "fused"]
SCORES: tuple[ScoreName, ...] = get_args(ScoreName)
#: Scores that need no BM25.
VECTOR_SCORES: tuple[ScoreName, ...] = ("maxsim", "single_vector", "hybrid")
#: Present names of scores by former name.
RENAMED: dict[str, ScoreName] = {"late": "maxsim", "single": "single_vector"}


def reject_former_name(score: Any) -> Any:
    """Returns a score unless it is a former name.

    Raises:
        RenamedValue: The score is a former name.

    >>> reject_former_name("late")
    Traceback (most recent call last):
    ...
    pipeline.config.RenamedValue: score: 'late' was renamed to 'maxsim'
    """
    if isinstance(score, str) and score in RENAMED:
        raise RenamedValue("score", score, RENAMED[score])
    return score


def _validate(score: Any) -> Any:
    try:
        return reject_former_name(score)
    except RenamedValue as error:
        raise error.at("") from None  # pydantic names the field


#: Score as a field of specs and requests.
Score = Annotated[ScoreName, BeforeValidator(_validate)]
