"""What the tests share: one Ray cluster a run, small collections, and how jobs are run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from pipeline.config import parse
from pipeline.index.columns import Representation, encoder_fields, representation_fields
from pipeline.index.info import EncoderInfo
from pipeline.index.positions import as_stored
from pipeline.index.reader import ITEMS
from pipeline.index.stages import Compress, Encode, Represent
from pipeline.registry import ENCODERS
from pipeline.schema import ITEM, Item, column_metadata, with_metadata
from pipeline.serve.settings import FRONT

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never waits for a hub
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
os.environ |= FRONT  # before a test imports Ray Serve, or starts a cluster
os.environ["MAXRAY_HEADER_SECONDS"] = "2"

torch.set_num_threads(1)  # many small operations: threads that wait for each other cost more

ROOT = Path(__file__).parents[1]
CRANFIELD = ROOT / "jobs/data/cranfield"
#: Tests that train models or start processes. Together with those that use the Ray cluster, they
#: are marked as slow.
SLOW = [
    ROOT / "tests" / name
    for name in ("jobs", "train", "test_examples.py", "test_extras.py", "test_jobs.py")
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a missing GPU, and marks those that `make test-fast` omits."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        uses_ray = "cluster" in getattr(item, "fixturenames", ())
        if uses_ray or any(item.path.is_relative_to(path) for path in SLOW):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory) -> Iterator[Path]:
    """Packed vectors lie in a folder of this test run, also those of jobs and Ray workers."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAXRAY_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of this test run; the test process is connected to it."""
    import ray
    import ray.data

    context = ray.init(
        num_cpus=4,  # logical: most of what runs here waits
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=1 << 30,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """The folder of a family's tiny checkpoint, which is written once a run."""
    from tests.encoders.checkpoints import FAMILIES

    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def of(family: str) -> str:
        if family not in made:
            with torch.random.fork_rng():
                torch.manual_seed(0)  # the same whichever tests ran before
                made[family] = str(FAMILIES[family](folder / family))
        return made[family]

    return of


@pytest.fixture
def collection(tmp_path: Path) -> Callable[..., Path]:
    """Writes a JSON-lines collection: `collection(a="some words")` -> its path."""

    def write(**documents: str) -> Path:
        folder = tmp_path / "collection"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({"_id": i, "text": text}) for i, text in documents.items()]
        (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return folder

    return write


def start_job(*arguments: str, address: str | None = None, **environment: str) -> subprocess.Popen:
    """Starts `python -m jobs...` as a user would; on the given Ray cluster, if one is given."""
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    if address:
        environment["RAY_ADDRESS"] = address
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_jobs(*commands: Sequence[str], **environment: str) -> subprocess.CompletedProcess:
    """Runs jobs one after the other on a cluster of their own, whose workers have `environment`.

    Each command is a verb and its arguments; the first that fails ends the run.
    """
    code = (
        "import importlib, json, sys, jobs\n"
        "with jobs.cluster(1 << 28):\n"
        "    for verb, *arguments in json.loads(sys.argv[1]):\n"
        "        jobs.run(importlib.import_module(f'jobs.{verb}').main, arguments)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", code, json.dumps(commands)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


TEXTS = {
    "wing/1": "The lift of a wing in a propeller slipstream was measured.",
    "wing/2": "Slipstream effects raise the lift over the whole span of the wing, and its drag.",
    "heat/1": "Heat transfer to a blunt body at hypersonic speed.",
    "heat/2": "Laminar boundary layers carry the heat away from the nose of the body.",
    "shell/1": "Thin cylindrical shells buckle under axial compression.",
    "flow": "Supersonic flow past a cone.",
    "bread/1": "Bake the bread until its crust is golden.",
    "bread/2": "Knead flour, water, salt and yeast.",
}
REPRESENTATIONS = [
    {"compressor": {"name": "none"}},
    {"compressor": {"name": "hpool", "num_vectors": 4}},
    {"compressor": {"name": "hpool", "num_vectors": 2}},
    {"compressor": {"name": "random", "num_vectors": 4}},
]


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """The texts of `index_uri` by item id; what stands before the slash is the parent."""
    return TEXTS


@pytest.fixture(scope="session")
def index_uri(tmp_path_factory) -> str:
    """An index of eight texts with four representations, and one for reranking.

    It lies in two fragments, and the last item has no vectors in `hpool_2` yet.
    """
    uri = str(tmp_path_factory.mktemp("index"))
    write_index(uri, REPRESENTATIONS)
    return uri


def write_index(uri: str, representations: list[dict], keep_positions: bool = True) -> None:
    """Encodes and compresses `TEXTS` by the stages of the index job, and writes the rows."""
    spec = ENCODERS.resolve("minilm")
    encoder_info = EncoderInfo.from_encoder(ENCODERS.build(spec), spec)
    parsed = [parse(Representation, fields) for fields in representations]
    own = encoder_fields(encoder_info, keep_positions)
    compress = Compress(encoder_info, parsed, {}, [f.name for f in own])
    stage = Represent(Encode(spec, encoder_info), compress).load()
    items = [
        Item(name, name.split("/")[0], "test", "text", "r1", title=f"On {name}", text=text)
        for name, text in TEXTS.items()
    ]
    table, rejects, _ = stage.process(pa.Table.from_pylist([i.row() for i in items], schema=ITEM))
    assert not rejects

    columns = [*ITEM, *own]
    for representation in parsed:
        columns += representation_fields(representation, encoder_info, None)
    for_rerank = columns[-1].with_name("rerank_tokens").with_type(pa.list_(pa.uint16()))
    columns.append(with_metadata(for_rerank, {**column_metadata(for_rerank), "role": "rerank"}))
    table = table.append_column("rerank_tokens", pa.nulls(len(table), for_rerank.type))
    if "hpool_2" in table.column_names:
        position = table.schema.get_field_index("hpool_2")
        has_vectors = pa.array(np.arange(len(table)) < len(table) - 1)
        without_last = pc.if_else(has_vectors, table["hpool_2"], None)
        table = table.set_column(position, "hpool_2", without_last)
    schema = pa.schema([column for column in columns if column.name in table.schema.names])
    table = as_stored(table.select(schema.names), schema)
    lance.write_dataset(table, f"{uri}/{ITEMS}", max_rows_per_file=5)
