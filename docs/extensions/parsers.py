"""The commands of the command line, with their argument parsers and the specs that they read."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Collection
from unittest import mock

import jobs
from examples.papers.__main__ import VERBS
from examples.papers.studies.study import StudySpec
from examples.papers.synthetic.binding_table import TableSpec
from jobs.__main__ import forms as forms_of_verb
from jobs.__main__ import verbs
from pipeline.config import Spec
from pipeline.eval.spec import EvaluateSpec
from pipeline.index.recompress import RecompressResources, RecompressSpec
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.candidates_job import CandidatesResources
from pipeline.serve.settings import ServeSpec
from pipeline.train.ray import Workers
from pipeline.train.spec import TrainSpec
from tests.bench.__main__ import BENCHES

#: The spec that a command reads.
SPECS: dict[str, type[Spec]] = {
    "index": IndexSpec,
    "add tokens": IndexSpec,
    "plan": IndexSpec,
    "add representations": RecompressSpec,
    "evaluate": EvaluateSpec,
    "train": TrainSpec,
    "serve": ServeSpec,
    "examples.papers study": StudySpec,
    "examples.papers positions": StudySpec,
    "examples.papers binding": TableSpec,
}
#: The resources profile that a command reads.
PROFILES: dict[str, type[Spec]] = {
    "index": IndexResources,
    "add tokens": IndexResources,
    "plan": IndexResources,
    "add representations": RecompressResources,
    "add candidates": CandidatesResources,
    "train": Workers,
    "examples.papers study": Workers,
}


class _Captured(Exception):
    """Carries a parser out of the `main` of a command."""


def commands() -> list[tuple[str, ...]]:
    """Returns all commands: the verbs and their forms."""
    found: list[tuple[str, ...]] = []
    for verb in verbs():
        found += [(verb,), *((verb, name) for name in forms(verb))]
    return found


def forms(verb: str) -> Collection[str]:
    """Returns the names of the forms of a verb, or of the verbs of a package that is run."""
    if verb == "tests.bench":
        return BENCHES
    if verb == "examples.papers":
        return VERBS
    return () if "." in verb else forms_of_verb(verb)


def _module(verb: str) -> str:
    """Returns the module of a verb, or the main module of a package."""
    return f"{verb}.__main__" if "." in verb else f"jobs.{verb}"


def parser(command: tuple[str, ...]) -> argparse.ArgumentParser:
    """Returns the argument parser of a command: a verb, or a package that is run, and its form.

    Every command builds its parser in `main`, which is interrupted when it starts to parse.
    """

    def capture(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Captured(parser)

    verb, *rest = command
    module, arguments = _module(verb), rest
    if verb == "tests.bench" and rest:
        module, arguments = f"tests.bench.{rest[0]}", []
    with (
        mock.patch.object(jobs.Parser, "parse", capture),
        mock.patch.object(jobs.SpecParser, "parse", capture),
        mock.patch.object(jobs.Parser, "parse_args", capture),
    ):
        try:
            importlib.import_module(module).main(arguments)
        except _Captured as captured:
            found: argparse.ArgumentParser = captured.args[0]
            found.prog = " ".join(["python -m" if "." in verb else "maxray", *command])
            return found
    raise RuntimeError(f"{module} parses no arguments")
