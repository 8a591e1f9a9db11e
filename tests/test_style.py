"""Tests of the style checks."""

from __future__ import annotations

import pytest

from tests.style import check_markdown, check_python, check_yaml, files


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('"""What a row has."""', "What"),
        ('raise ValueError("8 is not legal")', "legal"),
        ('message = f"{count} pictures"', "pictures"),
        ("total = 1  # the job goes on", "goes on"),
        ("own = 1", "own"),
        ("def search(how): ...", "how"),
        ('"""Sets the color of a bar."""', "color"),
    ],
)
def test_python(line: str, word: str):
    assert [word in v.problem for v in check_python(line)] == [True]


def test_code_in_prose_is_not_checked():
    assert not list(check_python('"""Passes `color` to ``center`` of matplotlib."""'))
    assert not list(check_markdown("See [the page](pictures.md)\n\n```\nlegal pictures\n```\n"))


def test_identifiers_of_libraries_are_not_checked():
    assert not list(check_python('axis.plot(x, color="red")\nbins = {"color": 1}'))


@pytest.mark.parametrize("width", [100, 101])
def test_markdown_width(width: int):
    text = "ok\n" + ("word " * 30)[: width - 1] + ".\n"
    assert [v.line for v in check_markdown(text)] == [2] * (width - 100)
    assert not list(check_markdown("| a |\n| " + "b " * 100 + "|\n"))


def test_comments_of_specs():
    assert [v.line for v in check_yaml("a: 1\nb: 2  # is no number\n")] == [2]


def test_checks_all_files_of_project():
    assert {"README.md", "pipeline/config.py", "jobs/specs/demo.yaml"} <= set(files())
