"""Three small indexes: their columns, and the metrics of their evaluations.

`demo` has the layout of the demo's index: a few abstracts, pages, photos and a clip. `methods` has
all compressors and codecs on texts. `shapes` has scenes that a small ColPali encodes, and the
tokens of an EDJE.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from examples.papers.synthetic.shapes_files import write_collection
from pipeline.index.reader import IndexReader
from pipeline.registry import CANDIDATES, CODECS, COMPRESSORS
from pipeline.schema import column_metadata
from tests.conftest import ROOT
from tests.goldens.files import DIGEST, FOLDER, digest, summary
from tests.index.test_trained import SIZES, write_folder

DATA = ROOT / "jobs/data"
#: Items of the index `demo`, and the judged queries of each collection.
ABSTRACTS = ("184", "29", "31", "5", "144", "90", "401", "552", "1", "2", "3", "4")
PAGES, PHOTOS, CLIPS = ("us-005.pdf", "us-039.pdf"), 4, ("tables.mp4",)
QUERIES = {
    "cranfield": ("1", "3", "5"),
    "pages": ("p15", "p53", "p54"),
    "photos": ("375891", "318722"),
}
#: Options of compressors that select another algorithm.
VARIANTS = {
    "agc_code": {"name": "agc", "reading": "code"},
    "hpool_condensed": {"name": "hpool", "linkage": "condensed"},
    "hpool_rows": {"name": "hpool", "linkage": "rows"},
    "kcenter_progressive": {"name": "kcenter", "output": "progressive"},
    "samer_farthest": {"name": "samer", "seeds": "farthest"},
    "samer_lattice": {"name": "samer", "seeds": "lattice"},
}
#: One thread, because the order of a sum depends on the number of threads.
RESOURCES = {"encode": {"num_cpus": 1, "num_threads": 1}}
#: Columns of `metrics.csv` that depend on the time.
TIMES = ("queries_per_second", "median_ms", "p95_ms")
_FOLDER: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


def folder() -> Path:
    """Returns the folder of all files that the parts write."""
    if not _FOLDER:
        _FOLDER.append(tempfile.TemporaryDirectory(prefix="goldens-"))
    return Path(_FOLDER[0].name)


def inputs(name: str, **more: str) -> Any:
    """Reads a YAML file of this folder, in which names in capital letters are replaced."""
    text = (FOLDER / f"{name}.yaml").read_text("utf-8")
    for placeholder, value in {"ROOT": str(ROOT), "FOLDER": str(folder()), **more}.items():
        text = text.replace(placeholder, value)
    return yaml.safe_load(text)


def job(verb: str, *arguments: Any) -> None:
    """Runs a verb in this process, without its output."""
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f"jobs.{verb}").main([str(argument) for argument in arguments])


def write(name: str, value: Any) -> Path:
    """Writes a YAML or JSON file below the folder."""
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(value) if path.suffix == ".yaml" else json.dumps(value), "utf-8")
    return path


def shipped(name: str) -> dict[str, Any]:
    """Reads a spec of the repository."""
    return yaml.safe_load((ROOT / f"jobs/specs/{name}.yaml").read_text("utf-8"))


def lines(path: Path, ids: tuple[str, ...], copy: Path) -> None:
    """Copies the lines of a JSON lines file with the given ids."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    rows = path.read_text("utf-8").splitlines()
    copy.write_text("\n".join(row for row in rows if json.loads(row)["_id"] in ids), "utf-8")


def run_index(name: str, spec: Mapping[str, Any]) -> str:
    """Runs the index job and returns the URI of the index."""
    uri, resources = str(folder() / name), write("resources.yaml", RESOURCES)
    job("index", write(f"{name}.yaml", {**spec, "index": uri}), "--resources", resources)
    return uri


@functools.cache
def demo() -> str:
    """Creates the index `demo`."""
    spec, data = shipped("demo"), folder() / "data"
    lines(DATA / "cranfield/corpus.jsonl", ABSTRACTS, data / "cranfield/corpus.jsonl")
    for name in [*(f"pages/pdf/{page}" for page in PAGES), *(f"clips/{clip}" for clip in CLIPS)]:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DATA / name, data / name)
    photos = json.loads((DATA / "photos/captions.json").read_text("utf-8"))
    write("data/photos/captions.json", {**photos, "images": photos["images"][:PHOTOS]})
    spec["source"] = [source for source in spec["source"] if source["name"] != "audio"]  # slow
    for source in spec["source"]:
        source["path"] = source["path"].replace("jobs/data", str(data))
        if "images" in source:
            source["images"] = str(ROOT / source["images"])
    spec["encoder"]["text"] = {"dtype": "float32"}
    return run_index("demo", spec)


@functools.cache
def methods() -> str:
    """Creates the index `methods`: every compressor, every codec, every candidate generator.

    Its rows are in the order of the file. Those of `demo` are in the order in which the units are
    done, on which the sample depends that generators are fitted to.
    """
    path = folder() / "methods-data/corpus.jsonl"
    lines(DATA / "cranfield/corpus.jsonl", ABSTRACTS, path)
    trained = write_folder(folder() / "trained")
    representations: list[dict[str, Any]] = []
    for name in COMPRESSORS.names():
        fields = COMPRESSORS.spec_class(name).model_fields
        compressor = {"name": name}
        if name == "seqresize":
            compressor |= {**SIZES, "weights": trained}
        elif "num_vectors" in fields and name != "memtok":  # as many as there are trained tokens
            compressor["num_vectors"] = 4
        elif "ratio" in fields:
            compressor["ratio"] = 0.3
        key = "full" if name == "none" else name
        representations.append({"id": key, "compressor": compressor})
    for name, compressor in VARIANTS.items():
        representations.append({"id": name, "compressor": {**compressor, "num_vectors": 4}})
    for name in CODECS.names():
        codec = {"name": name, **({"num_centroids": 8} if name == "residual" else {})}
        compressor = {"name": "hpool", "num_vectors": 4}
        representations.append({"id": f"codec_{name}", "compressor": compressor, "codec": codec})
    spec = {
        "source": {"name": "text", "path": str(path.parent)},
        "encoder": {"name": "minilm", "dtype": "float32", "appended_tokens": trained},
        "representations": representations,
        "keep_taps": ["eos_row/mean/last"],
    }
    uri = run_index("methods", spec)
    for name in CANDIDATES.names():
        job("add", "candidates", uri, name)
    return uri


@functools.cache
def shapes() -> str:
    """Creates the index `shapes`."""
    scenes, spec = folder() / "shapes-data", shipped("shapes")
    write_collection(scenes, 12)
    spec["source"]["path"] = str(scenes / "images")
    for owner, name in ((spec["encoder"], "model"), (spec, "rerank")):
        owner[name] = str(ROOT / owner[name])
    return run_index("shapes", spec)


INDEXES = {"demo": demo, "methods": methods, "shapes": shapes}


def canonical(array: pa.Array) -> Iterator[bytes]:
    """Yields bytes that depend on the values only, not on offsets, chunks or null slots."""
    yield array.is_valid().to_numpy(zero_copy_only=False).tobytes()
    if pa.types.is_struct(array.type):
        for field in array.flatten():
            yield from canonical(field)
    elif pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        yield pc.fill_null(pc.list_value_length(array), 0).to_numpy().tobytes()
        yield from canonical(pc.list_flatten(array))
    elif pa.types.is_primitive(array.type) and not pa.types.is_boolean(array.type):
        yield array.drop_null().to_numpy().tobytes()
    else:
        yield repr(array.to_pylist()).encode()


def numbers(array: pa.Array) -> pa.Array:
    """Returns the numbers in nested lists."""
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        array = pc.list_flatten(array)
    return array.drop_null()


def columns() -> dict[str, Any]:
    """Returns the digests and the metadata of all columns, in the order of the item ids."""
    found: dict[str, Any] = {}
    for index, create in INDEXES.items():
        dataset = IndexReader(create()).dataset
        table = dataset.to_table().sort_by("item_id").combine_chunks()
        found[index] = {"items": table["item_id"].to_pylist()}
        for field in table.schema:
            array = table[field.name].combine_chunks()
            values, described = numbers(array), digest(*canonical(array))
            entry = {"type": str(field.type), DIGEST: described}
            if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
                entry |= {**summary(values.to_numpy()), DIGEST: described}
            found[index][field.name] = {**entry, "metadata": column_metadata(field)}
    return found


def write_benchmarks() -> None:
    """Copies the judgments of a few queries of each collection."""
    for name, ids in QUERIES.items():
        copy = folder() / "benchmarks" / name
        lines(DATA / name / "queries.jsonl", ids, copy / "queries.jsonl")
        (copy / "qrels").mkdir()
        rows = (DATA / name / "qrels/test.tsv").read_text("utf-8").splitlines()
        judged = [row for row in rows if row.split("\t")[0] in ("query-id", *ids)]
        (copy / "qrels/test.tsv").write_text("\n".join(judged), "utf-8")


def metrics() -> dict[str, Any]:
    """Returns the rows of `metrics.csv` of each evaluation."""
    for create in INDEXES.values():
        create()
    write_benchmarks()
    found: dict[str, Any] = {}
    for name, spec in inputs("evaluations").items():
        output = folder() / "evaluations" / name
        job("evaluate", write(f"{name}_evaluate.yaml", {**spec, "output": str(output)}))
        found[name] = {}
        with (output / "metrics.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                key = f"{row.pop('representation')} {row.pop('score')}"
                found[name][key] = {k: number(v) for k, v in row.items() if k not in TIMES}
    return found


def number(text: str) -> float | str:
    """Returns the value of a cell of a table."""
    try:
        return float(text)
    except ValueError:
        return text
