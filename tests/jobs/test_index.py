"""Command-line tests of the jobs index, add and status."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jobs import add, index, status
from pipeline.config import SpecError
from pipeline.index.reader import IndexReader
from pipeline.index.writer import IndexWriter
from tests.conftest import start_job
from tests.tiny import SLEEPING


@pytest.fixture
def spec(tmp_path, collection) -> Callable[..., str]:
    """Returns a function that writes a spec with changed fields and returns its path."""

    def write(**fields: object) -> str:
        given = {
            "index": str(tmp_path / "index"),
            "source": {"name": "text", "path": str(collection(a="one", b="two words"))},
            "encoder": {
                "class": SLEEPING,
                "seconds": 0.0,
                "num_tokens": 6,
                "dim": 8,
            },
            "representations": [{"compressor": "none"}],
            **fields,
        }
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
        return str(tmp_path / "spec.yaml")

    return write


def finish(*arguments: str, address: str | None = None) -> tuple[int, str, str]:
    """Runs a job as a process and returns its exit code, standard output and standard error."""
    process = start_job(*arguments, address=address)
    output, error = process.communicate(timeout=120)
    return process.returncode, output, error


# -- invalid input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "source.pathh=x",
            "unknown field 'pathh' in source; did you mean 'path'? valid fields: name, path,"
            " collection, id_field, text_field, title_field, passages",
        ),
        (
            "sources=x",
            "unknown field 'sources'; did you mean 'source'? valid fields: index, source, encoder,"
            " see, representations, sweep, keep_positions, keep_taps, rerank, unit_items,",
        ),
        (
            "representations=[{compressor: {name: hpool, num_vectors: 0}}]",
            "representations[0].compressor.num_vectors must be greater than or equal to 1, got 0",
        ),
        (
            "representations.0.compressor=squeeze",
            "representations[0].compressor.name must be one of"
            " adaptive, adaptive_eos, agc, attention_clustering, cluster, eos, hpc, hpool, kcenter,"
            " memtok, none, random, samer, sap, seqresize, spatial, got 'squeeze'",
        ),
        (
            "representations=[]",
            "representations must be a non-empty list, unless `sweep` has representations, got []",
        ),
        (
            "sweep={compressor: [none]}",
            "representations must be unique (set a different `id`), got 'full', which occurs twice",
        ),
        (
            "sweep={compressor: []}",
            "sweep.compressor must be a value or a list of at least one value, got []",
        ),
        (
            "representations.3.id=x",
            "override must be of the form dotted.field=value, got 'representations.3.id=x', which"
            " has '3' where the spec has a list of 1",
        ),
        ("source", "override must be of the form dotted.field=value, got 'source'"),
        ("index=", "index must have at least 1 character, got ''"),
        (
            "unit_items=0",
            "unit_items must be greater than or equal to 1, got 0",
        ),
        ("unit_items=true", "unit_items must be a number, got True"),
        (
            "source.path={tmp}/nowhere",
            "source.path must be an existing file or folder, got '{tmp}/nowhere', which does not"
            " exist",
        ),
        (
            "source.path={tmp}/empty",
            "source.path must be a folder with .txt, .md, .jsonl, .jsonl.gz files, got"
            " '{tmp}/empty', which contains no such files",
        ),
        (
            "representations.0.id=text",
            "representations[0].id must be a name other than item_id, ",
        ),
        (
            "representations.0.id=minilm_pooled",
            "representations[0].id must be a name other than item_id, ",
        ),
        (
            "representations.0.id=vectors",
            "representations[0].id must be a name other than item_id, ",
        ),
        (
            "representations.0.id=_rowid",
            "representations[0].id must be lower-case letters, digits and _, starting with a"
            " letter,"
            " got '_rowid'",
        ),
        ("1=2", "unknown field '1'; valid fields: index,"),
        ("unit_items=9999999", "unit_items must be less than or equal to 1000000, got 9999999"),
        (
            "representations=[{compressor: {name: hpool, num_vectors: 70000}}]",
            "representations[0].compressor.num_vectors must be less than or equal to",
        ),
        (
            "encoder={name: precomputed, dim: 8, label: x}",
            "encoder must be an encoder that reads item_id or text, which the source text provides,"
            " got 'precomputed', which reads vectors",
        ),
        (
            "index=~no-such-user/x",
            "index must be a path whose ~ can be expanded, got '~no-such-user/x'",
        ),
        (
            "encoder={name: sleeping, name: minilm}",
            "encoder must be a YAML value, got '{name: sleeping, name: minilm}', which cannot",
        ),
        ("commit_seconds=-1", "commit_seconds must be greater than 0, got -1"),
        (
            "index=nosuch://host/index",
            "index must be a local path, or a URI with one of the schemes file, s3, gs, az, got"
            " 'nosuch://host/index', which has the scheme nosuch",
        ),
        (
            "index={tmp}/spec.yaml",
            "index must be the path of a folder that can be written, got '{tmp}/spec.yaml',"
            " which is a file",
        ),
        (
            "index={tmp}/spec.yaml/index",
            "index must be the path of a folder that can be written, got '{tmp}/spec.yaml/index',"
            " which is below the"
            " file {tmp}/spec.yaml",
        ),
        (
            "index={tmp}",
            "index must be an index, or a new or empty folder, got '{tmp}', which has other"
            " contents",
        ),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry"])
def test_invalid_spec(tmp_path, spec, override, message, dry):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError) as error:
        index.main([spec(), *dry, override.replace("{tmp}", str(tmp_path))])
    assert str(error.value).startswith(message.replace("{tmp}", str(tmp_path)))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            None,
            "resources must be a YAML file with a mapping of fields to values, got '{path}', which"
            " does not exist",
        ),
        (
            "encode: {num_cpus: -1}",
            "encode.num_cpus must be greater than or equal to 0, got -1",
        ),
        (
            "encode: {num_gpus: 1.5}",
            "encode.num_gpus must be a whole number or less than 1, got 1.5",
        ),
        ("read: {min_actors: 3}", "read.max_actors must be at least min_actors=3, got 1"),
        ("write: {max_actors: 0}", "write.max_actors must be greater than 0, got 0"),
        (
            "object_store_bytes: 1000",
            "object_store_bytes must be greater than or equal to 78643200, got 1000",
        ),
    ],
)
def test_invalid_profile(tmp_path, spec, profile, message):
    path = tmp_path / "profile.yaml"
    if profile:
        path.write_text(profile)
    with pytest.raises(SpecError) as error:
        index.main([spec(), "--resources", str(path)])
    assert str(error.value).startswith(message.replace("{path}", str(path)))
    assert not (tmp_path / "index").exists()


def test_missing_model_folder(tmp_path, spec):
    with pytest.raises(SpecError) as error:
        index.main([spec(encoder={"name": "minilm", "model": str(tmp_path / "model")})])
    assert re.match(rf"encoder\.model must be .*, got '{tmp_path}/model', which ", str(error.value))
    assert not (tmp_path / "index").exists()


YAML_FORM = "spec must be a YAML file with a mapping of fields to values, got '{path}'"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"{YAML_FORM}, which does not exist"),
        ("", YAML_FORM),
        ("- a list", YAML_FORM),
        ("a: [1", f"{YAML_FORM}, which cannot be read (while parsing"),
        ("a: " + "[" * 9_999, f"{YAML_FORM}, which cannot be read ("),
        (b"\xff\xfe\xfa", f"{YAML_FORM}, which cannot be read ("),
        ("index: a\nindex: b", f"{YAML_FORM}, which cannot be read (duplicate"),
        ("encoder: minilm", "field 'index' is required"),
    ],
)
@pytest.mark.parametrize("columns", [[], ["representations"]])
def test_unreadable_spec_file(tmp_path, content, message, columns):
    path = tmp_path / "spec.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if columns and content == "encoder: minilm":
        message = "unknown field 'encoder'; valid fields: index, source,"
    with pytest.raises(SpecError) as error:
        (add if columns else index).main([*columns, str(path)])
    assert str(error.value).startswith(message.replace("{path}", str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "argument --limit: must be an integer >= 1, got '0'"),
        (["--limit", "few"], "argument --limit: must be an integer >= 1, got 'few'"),
        (["--limit", "1", "--remove-missing"], "--remove-missing cannot be combined with --limit"),
    ],
)
def test_invalid_options(spec, arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        index.main([spec(), *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("verb", "override", "message"),
    [
        (
            "index",
            "sweep={compressor.name: [hpool], compressor.num_vectors: [4, 0]}",
            "sweep.compressor.num_vectors must be greater than or equal to 1, got 0",
        ),
        (
            "index",
            "index=/proc/index",
            "index must be the path of a folder that can be written, got '/proc/index', which ",
        ),
        ("index", "fit={", "fit must be a YAML value, got '{', which cannot"),
        (
            "add representations",
            "source=full",
            "index must be ",
        ),  # checked before the fields of the spec
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(
    cluster, tmp_path, spec, verb, override, message
):
    module, *columns = f"jobs.{verb}".split()
    code, output, error = finish(module, *columns, spec(), override, address=cluster)
    assert code == 2
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert output == ""
    assert not (tmp_path / "index").exists()


# -- output ----------------------------------------------------------------------------------


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
    assert "listed 1 = indexed 1 (1 new, 0 replaced, 0 unchanged) + rejected 0" in (
        capsys.readouterr().out
    )
    (row,) = IndexReader(str(tmp_path / "index")).dataset.to_table().to_pylist()
    lengths = {name: len(row[name]) for name in row if re.fullmatch(r"full|\w+_\d", name)}
    assert lengths == {"full": 5, "hpool_3": 3, "hpool_2": 2, "random_3": 3, "random_2": 2}


def test_dry_run_prints_the_spec_and_writes_nothing(cluster, tmp_path, spec, capsys):
    index.main([spec(), "--dry-run"])
    printed = capsys.readouterr().out
    resolved, _, estimate = printed.partition("\n\n")
    assert yaml.safe_load(resolved)["encoder"]["num_tokens"] == 6
    assert yaml.safe_load(resolved)["unit_items"] == 64
    assert "listed 2 items, 0 unreadable" in estimate
    assert re.search(r"full +\d+ bytes per item", estimate)
    assert not (tmp_path / "index").exists()


@pytest.mark.heavy
def test_repeated_runs_and_retry_rejects(cluster, tmp_path, spec, capsys):
    """The second run on the same cluster skips rejects, the third retries them."""
    (tmp_path / "collection").mkdir()
    (tmp_path / "collection/corpus.jsonl").touch()
    path = spec()
    lines = [{"_id": "a", "text": "one"}, {"_id": "b", "text": " "}]
    (tmp_path / "collection/corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, output, error = finish("jobs.index", path, address=cluster)
    assert (code, error) == (0, "")
    assert "listed 2 = indexed 1 (1 new, 0 replaced, 0 unchanged) + rejected 1" in output

    index.main([path])
    output = capsys.readouterr().out
    assert "listed 2 items in 1 shards" in output
    assert "0 new, 0 changed, 1 already indexed, 1 already rejected" in output

    capsys.readouterr()
    status.main([str(tmp_path / "index"), "--rejects"])
    assert capsys.readouterr().out.startswith("empty text (1)\n  b")
    status.main([str(tmp_path / "index"), "--rejects", "--json"])
    (reject,) = json.loads(capsys.readouterr().out)
    assert (reject["reason"], reject["item_id"], reject["stage"]) == ("empty text", "b", "list")
    index.main([path, "--retry-rejects", "empty text"])
    output = capsys.readouterr().out
    assert "0 new, 0 changed, 1 already indexed, 0 already rejected" in output
    assert IndexReader(str(tmp_path / "index")).rejects()["item_id"].to_pylist() == ["b"]


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
    summary = json.loads(capsys.readouterr().out)
    assert summary["index"] == uri
    assert summary["version"] == IndexReader(uri).version
    assert (summary["items"], summary["fragments"], summary["rejects"]) == (2, 1, {})
    assert re.fullmatch(r"the-holder on .*, process \d+", summary["lease"])
    assert [encoder["name"] for encoder in summary["encoders"]] == [SLEEPING]
    full = summary["representations"]["full"]
    assert (full["method"], full["vectors"], full["filled"]) == ("none", 6.0, 1.0)
    assert full["bytes_vectors"] == full["bytes_all"] == 6 * 8 * 2
    (hpool,) = (r for r in summary["representations"].values() if r["method"] == "hpool")
    assert hpool["bytes_all"] == hpool["bytes_vectors"] + 6 * 2  # the token assignment
    (job,) = summary["jobs"]
    assert (job["kind"], job["state"], job["new"], job["indexed"]) == ("index", "done", 2, 2)

    holder.release()
    status.main([uri])
    printed = capsys.readouterr().out
    assert re.search(r"^items +2$", printed, re.M)
    assert re.search(r"^writer +none$", printed, re.M)
    assert re.search(r"^full +none +all +float16 +6.0 +-?[01].\d\d +96 +96 +100.0%$", printed, re.M)
    assert re.search(rf"^index +{job['job']}  done ", printed, re.M)


def test_status_of_an_empty_index_and_a_job_without_summary(tmp_path, capsys):
    uri = str(tmp_path / "index")
    IndexWriter(uri, "died").release()
    Path(uri, "jobs/died").mkdir(parents=True)
    status.main([uri])
    printed = capsys.readouterr().out
    assert re.search(r"^items +0$", printed, re.M)
    with pytest.raises(
        SpecError,
        match="index must be the URI of an index .*, got .*elsewhere', which does not exist",
    ):
        status.main([str(tmp_path / "elsewhere")])
