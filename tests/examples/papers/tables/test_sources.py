"""Sources of the values in the specs of papers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from examples.papers.verbs.run import PAPERS

#: Fields whose values have a comment with their source.
FIELDS = re.compile(
    r"(.*\.)?(min_pixels|max_pixels|num_frames|max_frames|audio_rate|temperature|epochs"
    r"|learning_rate|\w+_(prompt|prefix)|\w*instruction)"
)
#: A part of the paper, a file of public code, or the mark of values that neither reports.
SOURCE = re.compile(
    r"\b(section|table|appendix) \w|\b[\w/-]+\.(py|sh|yaml|json|md)\b|\bnot reported\b", re.I
)
#: Small studies, whose values are not those of a paper.
STUDIES = re.compile(r"(shapes|cranfield|pages).*\.yaml")
TRAINING = PAPERS.parents[1] / "jobs/specs/training"
SPECS = [
    *(path for path in sorted(PAPERS.glob("*/_*.yaml"))),
    *(path for path in sorted(PAPERS.glob("agc/specs/*.yaml")) if not STUDIES.match(path.name)),
    *(TRAINING / f"{name}.yaml" for name in ("edje", "flickr30k_samer", "msrvtt_smart")),
    *(TRAINING / f"{name}.yaml" for name in ("colpali_light", "multivent_adapter")),
]


def fields(node: yaml.Node) -> Iterator[tuple[str, int]]:
    """Yields the fields of a file with the numbers of their lines, except those of miniatures."""
    if isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            yield from fields(inner)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value != "miniature":
                # A null, a mapping or a placeholder has no value of its own.
                if isinstance(value, yaml.ScalarNode) and not re.search(r"^$|\$\{", value.value):
                    yield key.value, key.start_mark.line
                yield from fields(value)


def comment(lines: list[str], number: int, others: set[int]) -> str:
    """Returns the comment in a line, or the one above it and `others` directly before it."""
    if " #" in lines[number]:
        return lines[number].partition(" #")[2]
    while number - 1 in others and " #" not in lines[number - 1]:
        number -= 1
    above = []
    for line in reversed(lines[:number]):
        if not line.lstrip().startswith("#"):
            break
        above.append(line.strip("# "))
    return " ".join(reversed(above))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_values_name_their_source(path: Path):
    lines = path.read_text("utf-8").splitlines()
    values = fields(yaml.compose("\n".join(lines)))
    found = {(name, number) for name, number in values if FIELDS.fullmatch(name)}
    numbers = {number for _, number in found}
    without = [
        f"{path}:{number + 1}: {name} has no source; name a section, table or file, or not reported"
        for name, number in sorted(found, key=lambda field: field[1])
        if not SOURCE.search(comment(lines, number, numbers))
    ]
    assert not without, "\n".join(without)


def test_marks_are_searched():
    assert len(SPECS) == 23
    lines = ["a: {max_pixels: 1}", "b:  # table 2", "  epochs: 3", "miniature: {epochs: 1}"]
    node = yaml.compose("\n".join(lines))
    assert list(fields(node)) == [("max_pixels", 0), ("epochs", 2)]
    assert not SOURCE.search(comment(lines, 2, {0, 2})) and SOURCE.search(comment(lines, 1, set()))
