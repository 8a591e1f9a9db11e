"""Shared fixtures and helpers: a Ray cluster per session, small collections, and jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from pipeline.config import JobError, parse
from pipeline.index import EXECUTOR, ITEMS
from pipeline.index.columns import Representation, encoder_fields, representation_fields
from pipeline.index.info import EncoderInfo
from pipeline.index.positions import encode_positions
from pipeline.index.stages import Compress, Encode, Represent
from pipeline.registry import ENCODERS
from pipeline.schema import ITEM, Item, with_metadata
from pipeline.serve.environment import PROXY_ENV
from tests.chaos.network import Network, Port

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests must not access the hub
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
os.environ.setdefault("RAY_worker_niceness", "0")  # as in local clusters of jobs
os.environ |= PROXY_ENV  # before Ray Serve is imported or a cluster starts
os.environ["MAXRAY_HEADER_SECONDS"] = "2"

torch.set_num_threads(1)  # threads slow down small operations

ROOT = Path(__file__).parents[1]
CRANFIELD = ROOT / "jobs/data/cranfield"
#: Tests that train models or start processes. Together with those that use the Ray cluster, they
#: are marked as slow.
SLOW = [
    ROOT / "tests" / name
    for name in ("examples", "jobs", "train", "test_examples.py", "test_extras.py", "test_jobs.py")
]


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the order of files; pytest-xdist would start with those of the most tests."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a missing GPU, and marks those that `make test-fast` omits.

    A test process runs whole files, and one runs all files that use servers, which share
    applications. Slow files come first, so that several processes end at about the same time.
    """
    slow_groups = set()
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        fixtures = getattr(item, "fixturenames", ())
        group = "serve" if "serving" in fixtures else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
        if "cluster" in fixtures or any(item.path.is_relative_to(path) for path in SLOW):
            item.add_marker("slow")
            slow_groups.add(group)
    items.sort(key=lambda item: _group(item) not in slow_groups)
    items.sort(key=lambda item: _group(item) != "serve")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names bytes after their argument: archives contain the time when a process made them."""
    return argname if isinstance(val, bytes) else None


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return marker.args[0]


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory) -> Iterator[Path]:
    """Cache folder of the session, which jobs and Ray workers use as well."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAXRAY_CACHE", str(folder))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        yield folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Address of the Ray cluster of the session, to which the test process is connected."""
    import ray
    import ray.data

    context = ray.init(
        num_cpus=4,  # logical CPUs; most tasks in tests wait
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=1 << 30,
    )
    # Actors would start processes in each job. Jobs that tests start as processes use Ray.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EXECUTOR, "process")
        yield context.address_info["gcs_address"]
    ray.shutdown()


@contextlib.contextmanager
def actor_pools() -> Iterator[None]:
    """Runs jobs on the Ray cluster of the session instead of in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EXECUTOR, "ray")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """Function that returns the folder of a family's tiny checkpoint, written once per session."""
    from tests.tiny.checkpoints import FAMILIES

    folder, paths = tmp_path_factory.mktemp("checkpoints"), {}

    def checkpoint_path(family: str) -> str:
        if family not in paths:
            with torch.random.fork_rng():
                torch.manual_seed(0)  # independent of the order of tests
                paths[family] = str(FAMILIES[family](folder / family))
        return paths[family]

    return checkpoint_path


@pytest.fixture
def collection(tmp_path: Path) -> Callable[..., Path]:
    """Function that writes a collection and returns its path, as `collection(a="some words")`."""

    def write(**documents: str) -> Path:
        folder = tmp_path / "collection"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({"_id": i, "text": text}) for i, text in documents.items()]
        (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def blank_figures(monkeypatch) -> None:
    """Writes figures of reports without drawing them, which takes half a second each."""
    from matplotlib.figure import Figure

    def save(figure: Figure, file, *, format: str, **options) -> None:
        file.write(b"\x89PNG" if format == "png" else "<svg></svg>")

    monkeypatch.setattr(Figure, "savefig", save)


@pytest.fixture
def network() -> Iterator[Network]:
    """Network without nodes."""
    try:
        network = Network()
    except JobError as error:
        pytest.skip(str(error))
    yield network
    network.close()


def start_job(
    *arguments: str, address: str | None = None, port: Port | None = None, **environment: str
) -> subprocess.Popen:
    """Starts `maxray ..`.

    Args:
        *arguments: Module and arguments.
        address: Ray cluster to run it on.
        port: Connection to a network through which it communicates.
        **environment: Additional environment variables.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", EXECUTOR)}
    environment = {**inherited, **environment, "PYTHONPATH": str(ROOT)}
    if address:
        environment["RAY_ADDRESS"] = address
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(
        port.command(command) if port else command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_jobs(*commands: Sequence[str], **environment: str) -> subprocess.CompletedProcess:
    """Runs jobs in sequence in a process, or on a cluster of their own for the executor `ray`.

    Args:
        *commands: Command names with their arguments; execution stops at the first failure.
        **environment: Additional environment variables, which the workers have as well.
    """
    context = "jobs.cluster(1 << 28)" if environment.get(EXECUTOR) == "ray" else "nullcontext()"
    code = (
        "from contextlib import nullcontext\n"
        "import importlib, json, sys, jobs\n"
        f"with {context}:\n"
        "    for verb, *arguments in json.loads(sys.argv[1]):\n"
        "        jobs.run(importlib.import_module(f'jobs.{verb}').main, arguments)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), EXECUTOR: "process", **environment}
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


#: Compressor with nested vectors, without its budget.
NESTED = {"name": "kcenter", "output": "progressive"}
NESTED_REPRESENTATIONS = [
    {"compressor": {"name": "none"}},
    {"compressor": {"name": "hpool", "num_vectors": 4}},
    *(
        {"compressor": {**NESTED, "num_vectors": k}, "codec": codec, "id": f"nested_{k}{suffix}"}
        for k in (8, 3)
        for codec, suffix in (("float16", ""), ("int8", "_int8"))
    ),
    {"compressor": {**NESTED, "ratio": 0.5}, "id": "nested_half"},
]


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Texts of `index_uri` by item id; the prefix before the slash is the parent id."""
    return TEXTS


@pytest.fixture(scope="session")
def index_uri(tmp_path_factory) -> str:
    """Index of eight texts with four representations and tokens for reranking.

    It has two fragments, and the last item has no vectors in `hpool_2`.
    """
    uri = str(tmp_path_factory.mktemp("index"))
    write_index(uri, REPRESENTATIONS)
    return uri


@pytest.fixture(scope="session")
def lexical_uri(cluster, index_uri, tmp_path_factory) -> str:
    """Copy of `index_uri` with the candidate generator `bm25`."""
    from jobs import add

    uri = tmp_path_factory.mktemp("lexical") / "index"
    shutil.copytree(index_uri, uri)
    add.main(["candidates", str(uri), "bm25"])
    return str(uri)


@pytest.fixture(scope="session")
def nested_uri(tmp_path_factory) -> str:
    """Index of the same texts with representations whose vectors are nested, and others.

    `nested_3` has the first three vectors of `nested_8`.
    """
    uri = str(tmp_path_factory.mktemp("nested"))
    write_index(uri, NESTED_REPRESENTATIONS)
    return uri


def write_index(uri: str, representations: list[dict], keep_positions: bool = True) -> None:
    """Encodes and compresses `TEXTS` with the stages of the index job and writes the rows."""
    import lance  # tests of kernels and models need neither Lance nor Ray

    spec = ENCODERS.resolve("minilm")
    encoder_info = EncoderInfo.from_encoder(ENCODERS.build(spec), spec)
    parsed = [parse(Representation, fields) for fields in representations]
    encoder_columns = encoder_fields(encoder_info, keep_positions)
    compress = Compress(encoder_info, parsed, {}, [f.name for f in encoder_columns])
    stage = Represent(Encode(spec, encoder_info), compress).load()
    items = [
        Item(name, name.split("/")[0], "test", "text", "r1", title=f"On {name}", text=text)
        for name, text in TEXTS.items()
    ]
    table, rejects, _ = stage.process(pa.Table.from_pylist([i.row() for i in items], schema=ITEM))
    assert not rejects

    columns = [*ITEM, *encoder_columns]
    for representation in parsed:
        columns += representation_fields(representation, encoder_info, None)
    for_rerank = pa.field("rerank_tokens", pa.list_(pa.uint16()))
    adapter = {"encoder": {"name": "dual"}, "adapter": {"fingerprint": "unknown"}, "dim": 1}
    columns.append(with_metadata(for_rerank, {"role": "rerank", **adapter}))
    table = table.append_column("rerank_tokens", pa.nulls(len(table), for_rerank.type))
    if "hpool_2" in table.column_names:
        position = table.schema.get_field_index("hpool_2")
        has_vectors = pa.array(np.arange(len(table)) < len(table) - 1)
        without_last = pc.if_else(has_vectors, table["hpool_2"], None)
        table = table.set_column(position, "hpool_2", without_last)
    for name in {"nested_3", "nested_3_int8"} & set(table.column_names):
        field = table.schema.field(name)
        first = pc.list_slice(table[name.replace("3", "8", 1)], 0, 3).cast(field.type)
        table = table.set_column(table.schema.get_field_index(name), field, first)
    schema = pa.schema([column for column in columns if column.name in table.schema.names])
    table = encode_positions(table.select(schema.names), schema)
    lance.write_dataset(table, f"{uri}/{ITEMS}", max_rows_per_file=5)
