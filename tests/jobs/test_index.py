"""The jobs that write and describe an index, from their command lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jobs import index, recompress, status
from pipeline.config import SpecError
from pipeline.index.reader import Index
from pipeline.index.writer import IndexWriter
from tests.conftest import start_job


@pytest.fixture
def spec(tmp_path, collection) -> Callable[..., str]:
    """Writes a spec of two documents and a quick encoder: `spec(unit_items=2)` -> its path."""

    def write(**fields: object) -> str:
        given = {
            "index": str(tmp_path / "index"),
            "source": {"name": "text", "path": str(collection(a="one", b="two words"))},
            "encoder": {"name": "sleeping", "seconds": 0.0, "num_tokens": 6, "dim": 8},
            "representations": [{"compressor": "none"}],
            **fields,
        }
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
        return str(tmp_path / "spec.yaml")

    return write


def finish(*arguments: str, address: str | None = None) -> tuple[int, str, str]:
    """Runs a job as a user does: its exit code, standard output and standard error."""
    process = start_job(*arguments, address=address)
    output, error = process.communicate(timeout=120)
    return process.returncode, output, error


# -- what the user got wrong -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "source.pathh=x",
            "source.pathh: 'x' stands under an unknown key; legal: name, path, collection,"
            " id_field, text_field, title_field, passages",
        ),
        (
            "sources=x",
            "sources: 'x' stands under an unknown key; legal: index, source, encoder,"
            " representations, sweep, keep_positions, keep_taps, rerank, unit_items,"
            " fragment_items, commit_items, commit_seconds, fit",
        ),
        (
            "representations=[{compressor: {name: hpool, num_vectors: 0}}]",
            "representations.0.compressor.num_vectors: 0 is not legal;"
            " legal: greater than or equal to 1",
        ),
        (
            "representations.0.compressor=squeeze",
            "representations.0.compressor.name: 'squeeze' is not one of the compressors;"
            " legal: adaptive, adaptive_eos, agc, cluster, eos, hpc, hpool, light_colpali, none,"
            " random, samer, sap, spatial",
        ),
        (
            "representations=[]",
            "representations: [] is not legal; legal: at least one, here or in `sweep`",
        ),
        (
            "sweep={compressor: [none]}",
            "representations: 'full' is named twice; legal: a different `id` for each",
        ),
        (
            "sweep={compressor: []}",
            "sweep.compressor: [] is not legal; legal: a value or a list of at least one value",
        ),
        (
            "representations.3.id=x",
            "override: 'representations.3.id=x' is not legal; legal: an index below 1 at '3'",
        ),
        ("source", "override: 'source' is not legal; legal: dotted.field=value"),
        ("index=", "index: None is not legal; legal: a valid string"),
        ("index=''", "index: '' is empty; legal: a path or URI"),
        (
            "unit_items=0",
            "unit_items: 0 is not legal; legal: greater than or equal to 1",
        ),
        ("unit_items=true", "unit_items: True is not legal; legal: a number"),
        (
            "source.path={tmp}/nowhere",
            "source.path: '{tmp}/nowhere' does not exist; legal: an existing file or folder",
        ),
        (
            "source.path={tmp}/empty",
            "source.path: '{tmp}/empty' holds none; legal: a folder that holds .txt, .md, .jsonl,"
            " .jsonl.gz files",
        ),
        (
            "representations.0.id=text",
            "representations.0.id: 'text' is the name of another column; legal: none of item_id,",
        ),
        (
            "representations.0.id=minilm_pooled",
            "representations.0.id: 'minilm_pooled' is the name of another column; legal: none of",
        ),
        (
            "representations.0.id=vectors",
            "representations.0.id: 'vectors' is the name of another column; legal: none of",
        ),
        (
            "representations.0.id=_rowid",
            "representations.0.id: '_rowid' is not legal; legal: lower-case letters, digits and _,"
            " a letter first",
        ),
        ("1=2", "1: 2 stands under an unknown key; legal: index,"),
        ("unit_items=9999999", "unit_items: 9999999 is not legal; legal: less than or equal to"),
        (
            "representations=[{compressor: {name: hpool, num_vectors: 70000}}]",
            "representations.0.compressor.num_vectors: 70000 is not legal; legal: less than or",
        ),
        (
            "encoder={name: precomputed, dim: 8, label: x}",
            "encoder: 'precomputed' reads vectors; legal: an encoder of item_id or text, which the"
            " source text gives",
        ),
        ("index=~nobody-of-that-name/x", "index: '~nobody-of-that-name/x' names no user's home"),
        (
            "encoder={name: sleeping, name: minilm}",
            "encoder: '{name: sleeping, name: minilm}' cannot",
        ),
        ("commit_seconds=-1", "commit_seconds: -1 is not legal; legal: greater than 0"),
        (
            "index=nosuch://host/index",
            "index: 'nosuch://host/index' has the scheme nosuch; legal: a local path, or a URI with"
            " one of the schemes file, s3, gs, az",
        ),
        (
            "index={tmp}/spec.yaml",
            "index: '{tmp}/spec.yaml' is a file; legal: the path of a folder",
        ),
        (
            "index={tmp}/spec.yaml/index",
            "index: '{tmp}/spec.yaml/index' lies under the file {tmp}/spec.yaml; legal: a path"
            " under folders",
        ),
        (
            "index={tmp}",
            "index: '{tmp}' holds something else; legal: an index, or a new or empty folder",
        ),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry"])
def test_a_spec_that_is_not_legal(tmp_path, spec, override, sentence, dry):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError) as error:
        index.main([spec(), *dry, override.replace("{tmp}", str(tmp_path))])
    assert str(error.value).startswith(sentence.replace("{tmp}", str(tmp_path)))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        (None, "resources: '{path}' does not exist; legal: the path of an existing YAML file"),
        (
            "encode: {num_cpus: -1}",
            "encode.num_cpus: -1 is not legal; legal: greater than or equal",
        ),
        ("encode: {num_gpus: 1.5}", "encode.num_gpus: 1.5 is not legal; legal: a share of one GPU"),
        ("read: {min_actors: 3}", "read.max_actors: 1 is not legal; legal: at least min_actors, 3"),
        ("write: {max_actors: 0}", "write.max_actors: 0 is not legal; legal: greater than 0"),
        ("object_store_bytes: 1000", "object_store_bytes: 1000 is not legal; legal: greater than"),
    ],
)
def test_a_profile_that_is_not_legal(tmp_path, spec, profile, sentence):
    path = tmp_path / "profile.yaml"
    if profile:
        path.write_text(profile)
    with pytest.raises(SpecError) as error:
        index.main([spec(), "--resources", str(path)])
    assert str(error.value).startswith(sentence.replace("{path}", str(path)))
    assert not (tmp_path / "index").exists()


def test_a_missing_model_folder(tmp_path, spec):
    with pytest.raises(SpecError) as error:
        index.main([spec(encoder={"name": "minilm", "model": str(tmp_path / "model")})])
    assert re.match(rf"encoder\.model: '{tmp_path}/model' .*; legal: ", str(error.value))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "spec: '{path}' does not exist; legal: the path of an existing YAML file"),
        ("", "spec: '{path}' holds no mapping; legal: a YAML mapping of fields to values"),
        ("- a list", "spec: '{path}' holds no mapping; legal: a YAML mapping of fields to values"),
        ("a: [1", "spec: '{path}' is not legal; legal: a readable YAML file (while parsing"),
        (b"\xff\xfe\xfa", "spec: '{path}' is not legal; legal: a readable YAML file ("),
        ("index: a\nindex: b", "spec: '{path}' is not legal; legal: a readable YAML file (the key"),
        ("encoder: minilm", "index: None is missing; legal: a value (the field is required)"),
    ],
)
@pytest.mark.parametrize("job", [index, recompress])
def test_a_spec_file_that_cannot_be_read(tmp_path, content, sentence, job):
    path = tmp_path / "spec.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if job is recompress and content == "encoder: minilm":
        sentence = "encoder: 'minilm' stands under an unknown key; legal: index, source,"
    with pytest.raises(SpecError) as error:
        job.main([str(path)])
    assert str(error.value).startswith(sentence.replace("{path}", str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--limit", "0"], "argument --limit: '0' is not legal; legal: an integer >= 1"),
        (["--limit", "few"], "argument --limit: 'few' is not legal; legal: an integer >= 1"),
        (["--limit", "1", "--remove-missing"], "--remove-missing needs the whole listing"),
    ],
)
def test_options_that_are_not_legal(spec, arguments, complaint, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        index.main([spec(), *arguments])
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("verb", "override", "sentence"),
    [
        (
            "index",
            "sweep={compressor.name: [hpool], compressor.num_vectors: [4, 0]}",
            "sweep.compressor.num_vectors: 0 is not legal; legal: greater than or equal to 1",
        ),
        ("index", "index=/proc/index", "index: '/proc/index' cannot be written; legal: a writable"),
        ("index", "index=[", "index: '[' cannot be read; legal: a value in YAML's form ("),
        ("recompress", "source=full", "index: '"),  # before the fields of the spec
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    cluster, tmp_path, spec, verb, override, sentence
):
    code, output, error = finish(f"jobs.{verb}", spec(), override, address=cluster)
    assert code == 2
    assert error.startswith(f"error: {sentence}") and error.count("\n") == 1
    assert output == ""
    assert not (tmp_path / "index").exists()


# -- what a run says -------------------------------------------------------------------------


def test_overrides_sweep_and_limit(cluster, tmp_path, spec, capsys):
    index.main(
        [
            spec(sweep={"compressor.name": ["hpool", "random"], "compressor.num_vectors": [6]}),
            "encoder.num_tokens=5",
            "--limit",
            "1",
            "sweep.compressor.num_vectors=[3, 2]",
        ]
    )
    assert "listed 1 = indexed 1 (1 new, 0 replaced, 0 as before) + rejected 0" in (
        capsys.readouterr().out
    )
    (row,) = Index(str(tmp_path / "index")).dataset.to_table().to_pylist()
    lengths = {name: len(row[name]) for name in row if re.fullmatch(r"full|\w+_\d", name)}
    assert lengths == {"full": 5, "hpool_3": 3, "hpool_2": 2, "random_3": 3, "random_2": 2}


def test_a_dry_run_prints_the_spec_and_writes_nothing(cluster, tmp_path, spec, capsys):
    index.main([spec(), "--dry-run"])
    printed = capsys.readouterr().out
    resolved, _, said = printed.partition("\n\n")
    assert yaml.safe_load(resolved)["encoder"]["num_tokens"] == 6
    assert yaml.safe_load(resolved)["unit_items"] == 64
    assert "listed 2 items, of which 0 cannot be read" in said
    assert re.search(r"full +\d+ bytes an item", said)
    assert not (tmp_path / "index").exists()


def test_indexing_as_a_user_does(cluster, tmp_path, spec):
    """Two runs on a cluster that is there already; a rejected item is tried again when asked."""
    (tmp_path / "collection").mkdir()
    (tmp_path / "collection/corpus.jsonl").touch()
    path = spec()
    lines = [{"_id": "a", "text": "one"}, {"_id": "b", "text": " "}]
    (tmp_path / "collection/corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, output, error = finish("jobs.index", path, address=cluster)
    assert (code, error) == (0, "")
    assert "listed 2 = indexed 1 (1 new, 0 replaced, 0 as before) + rejected 1" in output

    _, output, _ = finish("jobs.index", path, address=cluster)
    assert "listed 2 items in 1 shards" in output
    assert "0 new, 0 changed, 1 indexed before, 1 rejected before" in output

    job = ["jobs.index", path, "--retry-rejects", "empty text"]
    _, output, _ = finish(*job, address=cluster)
    assert "0 new, 0 changed, 1 indexed before, 0 rejected before" in output
    assert Index(str(tmp_path / "index")).rejects()["item_id"].to_pylist() == ["b"]


def test_status_as_text_and_as_json(cluster, tmp_path, spec, capsys):
    uri = str(tmp_path / "index")
    index.main(
        [
            spec(
                representations=[
                    {"compressor": "none"},
                    {"compressor": {"name": "hpool", "num_vectors": 3}},
                ]
            )
        ]
    )
    capsys.readouterr()
    holder = IndexWriter(uri, "the-holder")
    status.main([uri, "--json"])
    there = json.loads(capsys.readouterr().out)
    assert there["index"] == uri
    assert there["version"] == Index(uri).version
    assert (there["items"], there["fragments"], there["rejects"]) == (2, 1, {})
    assert re.fullmatch(r"the-holder on .*, process \d+", there["lease"])
    assert [encoder["name"] for encoder in there["encoders"]] == ["sleeping"]
    full = there["representations"]["full"]
    assert (full["method"], full["vectors"], full["filled"]) == ("none", 6.0, 1.0)
    assert full["bytes_vectors"] == full["bytes_all"] == 6 * 8 * 2
    (hpool,) = (r for r in there["representations"].values() if r["method"] == "hpool")
    assert hpool["bytes_all"] == hpool["bytes_vectors"] + 6 * 2  # the support
    (job,) = there["jobs"]
    assert (job["kind"], job["state"], job["new"], job["indexed"]) == ("index", "done", 2, 2)

    holder.release()
    status.main([uri])
    printed = capsys.readouterr().out
    assert re.search(r"^items +2$", printed, re.M)
    assert re.search(r"^writer +nobody$", printed, re.M)
    assert re.search(r"^full +none +all +float16 +6.0 +96 +96 +100.0%$", printed, re.M)
    assert re.search(rf"^index +{job['job']}  done ", printed, re.M)


def test_status_before_the_first_row_and_with_a_job_that_left_no_summary(tmp_path, capsys):
    uri = str(tmp_path / "index")
    IndexWriter(uri, "died").release()
    Path(uri, "jobs/died").mkdir(parents=True)
    status.main([uri])
    printed = capsys.readouterr().out
    assert re.search(r"^items +0$", printed, re.M)
    with pytest.raises(SpecError, match="holds no index; legal: the URI of an index made by"):
        status.main([str(tmp_path / "elsewhere")])
