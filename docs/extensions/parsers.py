"""The commands of the command line, with their argument parsers and the specs that they read."""

from __future__ import annotations

import argparse
import importlib
from unittest import mock

import jobs
from jobs.__main__ import forms, verbs
from jobs.bench.__main__ import BENCHES
from pipeline.config import Spec
from pipeline.eval.spec import EvaluateSpec
from pipeline.index.recompress import RecompressResources, RecompressSpec
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.candidates_job import CandidatesResources
from pipeline.serve.settings import ServeSpec
from pipeline.synthetic.binding_table import TableSpec
from pipeline.train.ray import Workers
from pipeline.train.study import StudySpec

#: The spec that a command reads.
SPECS: dict[str, type[Spec]] = {
    "index": IndexSpec,
    "add tokens": IndexSpec,
    "plan": IndexSpec,
    "add representations": RecompressSpec,
    "evaluate": EvaluateSpec,
    "train": StudySpec,
    "draw positions": StudySpec,
    "serve": ServeSpec,
    "binding": TableSpec,
}
#: The resources profile that a command reads.
PROFILES: dict[str, type[Spec]] = {
    "index": IndexResources,
    "add tokens": IndexResources,
    "plan": IndexResources,
    "add representations": RecompressResources,
    "add candidates": CandidatesResources,
    "train": Workers,
}


class _Captured(Exception):
    """Carries a parser out of the `main` of a command."""


def commands() -> list[tuple[str, ...]]:
    """Returns all commands: the verbs, their forms, and the benches."""
    found: list[tuple[str, ...]] = []
    for verb in verbs():
        found.append((verb,))
        names = BENCHES if verb == "bench" else forms(verb)
        found += [(verb, name) for name in names]
    return found


def parser(command: tuple[str, ...]) -> argparse.ArgumentParser:
    """Returns the argument parser of a command.

    Every command builds its parser in `main`, which is interrupted when it starts to parse.
    """

    def capture(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Captured(parser)

    verb, *rest = command
    module, arguments = f"jobs.{verb}", rest
    if verb == "bench":
        module, arguments = f"jobs.bench.{rest[0] if rest else '__main__'}", []
    with (
        mock.patch.object(jobs.Parser, "parse", capture),
        mock.patch.object(jobs.SpecParser, "parse", capture),
        mock.patch.object(jobs.Parser, "parse_args", capture),
    ):
        try:
            importlib.import_module(module).main(arguments)
        except _Captured as captured:
            found: argparse.ArgumentParser = captured.args[0]
            found.prog = " ".join(["maxray", *command])
            return found
    raise RuntimeError(f"{module} parses no arguments")
