"""Optional dependencies: the packages of each extra, and the error that asks for a missing one."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Package(NamedTuple):
    """A package that only some users need.

    Attributes:
        name: Name under which it is installed.
        extra: Extra of this project that installs it.
        purpose: What needs it, as the subject of a sentence.
    """

    name: str
    extra: str
    purpose: str


#: Packages of extras, by the name under which they are imported.
PACKAGES = {
    "accelerate": Package("accelerate", "gpu", "spreading a model over GPUs"),
    "bm25s": Package("bm25s", "report", "comparing with BM25"),
    "jinja2": Package("Jinja2", "report", "writing reports"),
    "matplotlib": Package("matplotlib", "report", "drawing figures"),
    "maxsim_cpu": Package("maxsim-cpu", "bench", "comparing with maxsim-cpu"),
    "mteb": Package("mteb", "mteb", "evaluating with MTEB"),
    "onnxruntime": Package("onnxruntime", "ocr", "recognising text with rapidocr"),
    "peft": Package("peft", "training", "training or loading LoRA adapters"),
    "pocketsphinx": Package("pocketsphinx", "asr", "recognising speech with pocketsphinx"),
    "pypdfium2": Package("pypdfium2", "pdf", "reading PDF files"),
    "rapidocr": Package("rapidocr", "ocr", "recognising text with rapidocr"),
    "s3fs": Package("s3fs", "s3", "reading and writing s3:// URIs"),
    "sentence_transformers": Package(
        "sentence-transformers", "bench", "comparing with sentence-transformers"
    ),
    "Stemmer": Package("PyStemmer", "report", "comparing with BM25"),
}


class MissingExtra(ImportError):
    """A package of an extra is not installed. Jobs print it as one sentence and exit with code 2.

    >>> str(MissingExtra("pypdfium2"))
    'reading PDF files needs pypdfium2; install it with: pip install "maxray[pdf]"'
    """

    def __init__(self, module: str):
        package = PACKAGES[module]
        command = f'pip install "maxray[{package.extra}]"'
        sentence = f"{package.purpose} needs {package.name}; install it with: {command}"
        super().__init__(sentence, name=module)

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str]]:  # crosses processes in Ray
        return MissingExtra, (self.name or "",)


def require(*modules: str) -> None:
    """Raises `MissingExtra` if one of the modules cannot be found; imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(module)


def require_storage(uri: str) -> None:
    """Raises `MissingExtra` if the URI is in a storage whose package is not installed."""
    if uri.startswith("s3://"):
        require("s3fs")


def explained(error: ModuleNotFoundError) -> ImportError:
    """Returns `MissingExtra` for a failed import of an extra's module, and `error` for others."""
    module = (error.name or "").partition(".")[0]
    return MissingExtra(module) if module in PACKAGES else error
