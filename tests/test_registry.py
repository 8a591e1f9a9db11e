"""Names of fields that are read from source code, against the spec classes themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import registry
from pipeline.config import UnknownField
from pipeline.registry import Registry, check_fields, field_names
from tests.conftest import ROOT

REGISTRIES = [value for value in vars(registry).values() if isinstance(value, Registry)]
#: Components that inherit their spec. Their fields are checked after the import.
UNKNOWN = {"PrecomputedText", "PrecomputedSpeech"}
SPECS = sorted((ROOT / "jobs/specs").rglob("*.yaml"))


@pytest.mark.parametrize("components", REGISTRIES, ids=lambda components: components.kind)
def test_names_are_those_of_the_spec_classes(components: Registry[Any]):
    for name, path in components._entries.items():
        spec_class = components.spec_class(name)
        if path.partition(":")[2] in UNKNOWN:
            with pytest.raises(LookupError):
                field_names(path)
        else:
            assert field_names(path) == list(spec_class.model_fields), name
            assert spec_class.unknown_field_note("x") == "", name


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_have_known_fields(path: Path):
    check_fields(yaml.safe_load(path.read_text("utf-8")))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"encoder": {"name": "minilm", "layerr": 3}}, "'layerr' in encoder; did you mean 'layer'"),
        ({"encoder": {"name": "colpali", "modl": "m"}}, "'modl' in encoder; did you mean 'model'"),
        ({"source": {"name": "text", "pth": "a"}}, "'pth' in source; did you mean 'path'"),
        ({"source": [{"name": "images"}, {"name": "combined", "sorces": []}]}, "in source[1];"),
        (
            {"encoder": {"name": "transcript", "ocr": {"name": "rapidocr", "widht": 1}}},
            "'widht' in encoder.ocr; ",
        ),
        (
            {"representations": [{"compressor": {"name": "hpool", "num_vector": 4}}]},
            "'num_vector' in representations[0].compressor; did you mean 'num_vectors'",
        ),
        ({"source": {"name": "vectors", "paht": "a"}}, "'paht' in source; did you mean 'path'"),
        ({"data": {"name": "pairs", "paht": "p"}}, "'paht' in data; "),
    ],
)
def test_unknown_fields_are_named(spec, message):
    with pytest.raises(UnknownField) as caught:
        check_fields(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"encoder": "minilm"},
        {"encoder": {"name": "plugin", "size": 1}},
        {"encoder": {"name": ["minilm"], "layerr": 1}},
        {"encoder": {"layerr": 1}},
        {"encoder": None, "source": [3]},
        {"sweep": {"compressor": {"name": "adaptive", "method.num_vectors": [8, 16]}}},
    ],
)
def test_other_specs_are_left_to_validation(spec):
    check_fields(spec)


@pytest.mark.parametrize("verb", ["index", "plan"])
def test_jobs_report_unknown_fields_before_slow_imports(tmp_path, verb):
    (tmp_path / "spec.yaml").write_text("encoder: {name: colpali, modl: x}", "utf-8")
    code = f"""
import sys
import jobs, jobs.{verb}
try:
    jobs.run(jobs.{verb}.main, [{str(tmp_path / "spec.yaml")!r}])
finally:
    print(sorted({{"torch", "transformers", "ray", "lance"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert "error: unknown field 'modl' in encoder; did you mean 'model'?" in done.stderr
