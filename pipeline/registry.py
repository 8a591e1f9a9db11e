"""Registries of the components that can be selected by name in a spec.

To add a component, write a module and add an entry to this file. Other packages can register
components through entry points in the group `maxray.<kind>`, for example `maxray.compressors`.
Modules are imported when their component is first used.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, SerializeAsAny

from pipeline.config import MissingField, Spec, SpecError, UnknownField, digest, parse, within
from pipeline.extras import as_missing_extra

if TYPE_CHECKING:  # Components are imported on first use.
    from pipeline.compression import Compressor
    from pipeline.compression.codecs import Codec
    from pipeline.config import ComponentSpec
    from pipeline.data.base import Source
    from pipeline.data.recognise import Recogniser
    from pipeline.encoders import Encoder
    from pipeline.eval import Benchmark
    from pipeline.search.generators.bm25 import Bm25
    from pipeline.search.generators.ivf import Ivf
    from pipeline.search.rerankers import Reranker
    from pipeline.train.data.base import TrainingData
    from pipeline.train.learner import Learner
else:
    ComponentSpec = Spec  # Specs of components in other packages may derive from Spec directly.

T = TypeVar("T")
#: Import path of a class, with a colon between the module and the class.
IMPORT_PATH = re.compile(r"\w+(\.\w+)*:\w+")


def short_name(name: str) -> str:
    """Returns the name of a component for columns, tables and plots.

    >>> short_name("hpool"), short_name("my_module:Method")
    ('hpool', 'Method')
    """
    return name.rpartition(":")[2]


class Registry(Generic[T]):
    """Registry that maps names to component classes of one kind.

    Every component class has a nested class `Spec` for its options.

    Args:
        kind: Kind of the components, which is also the suffix of the entry point group.
        entries: Import path of each component in the form `module:Class`.
        former: Advice about components that no longer exist, by name.

    Instead of a registered name, a spec can give the import path of a component of another package:
    `class: my_module:Method`. Modules are also found in the working directory. In Python, a value
    of a spec can also be the class itself, or an instance of it.
    """

    def __init__(self, kind: str, entries: dict[str, str], former: Mapping[str, str] | None = None):
        self.kind, self._entries, self._former = kind, entries, former or {}

    @functools.cached_property
    def _all(self) -> dict[str, str]:
        plugins = {e.name: e.value for e in entry_points(group=f"maxray.{self.kind}")}
        return {**plugins, **self._entries}

    def names(self) -> list[str]:
        """Returns the names of the components that users can select, in alphabetical order."""
        return sorted(self._all)

    def _path(self, name: str) -> str:
        """Returns the import path of a component, given its name or this path."""
        if IMPORT_PATH.fullmatch(name):
            return name
        if name not in self._all:
            raise SpecError.unknown_name("name", name, self.names(), self._former.get(name))
        return self._all[name]

    def load(self, name: str) -> type[T]:
        """Imports a component by its name or import path and returns its class.

        Raises:
            MissingExtra: The component needs an extra that is not installed.
            SpecError: The name is unknown, the package that provides the component cannot be
                imported, or it is not a component.
        """
        module, _, attribute = self._path(name).partition(":")
        if name not in self._all and (folder := os.getcwd()) not in sys.path:
            sys.path.append(folder)
        try:
            component: Any = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if (missing := as_missing_extra(error)) is not error:
                raise missing from None
            problem = f"needs the missing module {error.name!r}"
            raise SpecError("name", name, "an installed component", problem) from error
        if not hasattr(component, "Spec"):
            rule, problem = "the import path of a component", "is not a class with a Spec"
            raise SpecError("name", name, rule, problem)
        return component

    def spec_class(self, name: str) -> type[ComponentSpec]:
        """Returns the spec class of the component that is registered as `name`."""
        component: Any = self.load(name)
        fields = component.Spec.model_fields
        if name not in self._all and ("name" not in fields or fields["name"].annotation is not str):
            rule = "a class whose Spec inherits the field `name` of pipeline.config.ComponentSpec"
            raise SpecError("class", name, rule)
        return component.Spec

    def class_name(self, component: type) -> str:
        """Returns the registered name of a component class, or its import path."""
        path = f"{component.__module__}:{component.__qualname__}"
        name = next((name for name, entry in self._all.items() if entry == path), path)
        if name == path and (path.startswith("__main__:") or not IMPORT_PATH.fullmatch(path)):
            note = "; move it to a file such as methods.py, and import it"
            problem = "other processes cannot import"
            raise SpecError("class", path, "a class of a module", problem, note)
        return name

    def fields(self, value: Any) -> dict[str, Any]:
        """Returns a component as a mapping with a `name`.

        Args:
            value: A name; a mapping with a `name` or a `class`; or a component or its class.

        Raises:
            SpecError: The value is none of these.
        """
        if isinstance(spec := getattr(value, "spec", None), Spec):
            value = {**dict(spec), "name": type(value)}
        value = {"name": value} if isinstance(value, str | type) else value
        if isinstance(value, Mapping) and "class" in value:
            if "name" in value:
                raise SpecError("class", value["class"], "omitted if there is a name")
            value = {"name" if key == "class" else key: item for key, item in value.items()}
        if isinstance(value, Mapping) and "name" not in value:
            raise MissingField("name", None, f"one of {', '.join(self.names())}")
        if isinstance(value, Mapping) and isinstance(value["name"], type):
            value = {**value, "name": self.class_name(value["name"])}
        if not isinstance(value, Mapping) or not isinstance(value["name"], str):
            raise SpecError("name", value, f"one of {', '.join(self.names())}")
        return dict(value)

    def resolve(self, value: Any) -> ComponentSpec:
        """Returns the spec of a component from a spec or a value as in `fields`."""
        if isinstance(value, ComponentSpec):
            return value
        fields = self.fields(value)
        return parse(self.spec_class(fields["name"]), fields)

    def check_fields(self, component: Mapping[str, Any]) -> None:
        """Checks the names of the fields of a component of this package without importing it.

        Raises:
            UnknownField: The component has no field of that name.
        """
        try:
            fields = field_names(self._path(component.get("class", component.get("name"))))
        except (LookupError, OSError, TypeError, SpecError):  # `resolve` checks it
            return
        for key, value in component.items():
            if key not in ("class", *fields) and "." not in str(key):  # sweeps have dotted keys
                raise UnknownField(str(key), value, ", ".join(fields))

    def code(self, name: str) -> str | None:
        """Returns a hash of the code of a component that is not registered, without comments."""
        component: Any = self.load(name)
        return None if name in self._all else _code(component)

    def build(self, spec: ComponentSpec, *args: Any, **kwargs: Any) -> T:
        """Constructs the component that `spec.name` selects."""
        component: Any = self.load(spec.name)
        return component(spec, *args, **kwargs)


@functools.cache  # a class keeps its code if its file is edited and not imported again
def _code(component: type) -> str | None:
    """Returns a hash of the module of a class, or None for one without source code."""
    try:
        source = inspect.getsource(importlib.import_module(component.__module__))
    except (OSError, TypeError):
        return None
    return digest(ast.unparse(ast.parse(source)))


ENCODERS: Registry[Encoder[Any]] = Registry(
    "encoders",
    {
        "colbert": "pipeline.encoders.colbert:ColBERT",
        "colpali": "pipeline.encoders.colpali:ColPali",
        "dual": "pipeline.encoders.dual:Dual",
        "http": "pipeline.encoders.http:Http",
        "jina_v4": "pipeline.encoders.jina_v4:JinaV4",
        "minilm": "pipeline.encoders.minilm:MiniLM",
        "precomputed": "pipeline.encoders.precomputed:Precomputed",
        "qwen_omni": "pipeline.encoders.qwen_omni:QwenOmni",
        "qwen_vl": "pipeline.encoders.qwen_vl:QwenVL",
        "sentence_transformers": "pipeline.encoders.sentence_transformers:SentenceTransformers",
        "smart": "pipeline.encoders.smart:Smart",
        "transcript": "pipeline.encoders.transcript:Transcript",
    },
)
COMPRESSORS: Registry[Compressor[Any]] = Registry(
    "compressors",
    {
        "adaptive": "pipeline.compression.adaptive:Adaptive",
        "adaptive_eos": "pipeline.compression.adaptive_eos:AdaptiveEos",
        "agc": "pipeline.compression.agc:AGC",
        "attention_clustering": "pipeline.compression.attention_clustering:AttentionClustering",
        "cluster": "pipeline.compression.cluster:SemanticCluster",
        "eos": "pipeline.compression.eos:Eos",
        "hpc": "pipeline.compression.hpc:HPC",
        "hpool": "pipeline.compression.hpool:HPool",
        "kcenter": "pipeline.compression.kcenter:KCenter",
        "memtok": "pipeline.compression.memtok:MemTok",
        "none": "pipeline.compression.none:Uncompressed",
        "random": "pipeline.compression.random:Random",
        "samer": "pipeline.compression.samer:SaMer",
        "sap": "pipeline.compression.sap:Sap",
        "seqresize": "pipeline.compression.seqresize:SeqResize",
        "spatial": "pipeline.compression.spatial:Spatial",
    },
)
SOURCES: Registry[Source[Any]] = Registry(
    "sources",
    {
        "audio": "pipeline.data.audio:Audio",
        "combined": "pipeline.data.combined:Combined",
        "folder": "pipeline.data.folder:Folder",
        "imagecode": "pipeline.datasets.imagecode:Items",
        "images": "pipeline.data.images:Images",
        "ir_datasets": "pipeline.datasets.ir_datasets:Items",
        "karpathy": "pipeline.datasets.karpathy:Items",
        "mmeb": "pipeline.datasets.mmeb:Items",
        "msrvtt": "pipeline.datasets.msrvtt:Items",
        "mteb": "pipeline.datasets.mteb:Items",
        "multivent": "pipeline.datasets.multivent:Items",
        "pages": "pipeline.data.pages:Pages",
        "text": "pipeline.data.text:Text",
        "vectors": "pipeline.data.vectors:Vectors",
        "video": "pipeline.data.video:Video",
    },
)
OCR: Registry[Recogniser[Any]] = Registry(
    "ocr",
    {
        "precomputed": "pipeline.data.recognise.precomputed:PrecomputedText",
        "rapidocr": "pipeline.data.recognise.rapid:Rapid",
    },
)
SPEECH: Registry[Recogniser[Any]] = Registry(
    "speech",
    {
        "pocketsphinx": "pipeline.data.recognise.sphinx:Sphinx",
        "precomputed": "pipeline.data.recognise.precomputed:PrecomputedSpeech",
        "whisper": "pipeline.data.recognise.whisper:Whisper",
    },
)
CODECS: Registry[Codec[Any]] = Registry(
    "codecs",
    {
        "bits": "pipeline.compression.codecs.bits:Bits",
        "float16": "pipeline.compression.codecs.floats:Float16",
        "float32": "pipeline.compression.codecs.floats:Float32",
        "int8": "pipeline.compression.codecs.int8:Int8",
        "residual": "pipeline.compression.codecs.residual:Residual",
    },
    {"binary": "was replaced by bits: add the representation again with that codec"},
)
CANDIDATES: Registry[Ivf | Bm25] = Registry(
    "candidates",
    {
        "bm25": "pipeline.search.generators.bm25:Bm25",
        "ivf": "pipeline.search.generators.ivf:Ivf",
    },
    {
        "bits": "was removed, because it is slower than exact scores: use ivf",
        "centroids": "was replaced by ivf: add candidates with that generator",
        "lemur": "was replaced by ivf: add candidates with that generator",
        "pq": "was removed, because it is slower than exact scores: use ivf",
    },
)
RERANKERS: Registry[Reranker[Any]] = Registry(
    "rerankers",
    {
        "blip": "pipeline.search.rerankers.blip:Blip",
        "cross_encoder": "pipeline.search.rerankers.cross_encoder:TextCrossEncoder",
        "edje": "pipeline.search.rerankers.edje:Edje",
        "http": "pipeline.search.rerankers.http:HttpReranker",
        "jina_m0": "pipeline.search.rerankers.jina_m0:JinaM0",
        "monoqwen2_vl": "pipeline.search.rerankers.monoqwen2_vl:MonoQwen2VL",
        "qwen3_vl": "pipeline.search.rerankers.qwen3_vl:Qwen3VL",
    },
)
BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmarks",
    {
        "beir": "pipeline.datasets.beir:Queries",
        "imagecode": "pipeline.datasets.imagecode:Queries",
        "ir_datasets": "pipeline.datasets.ir_datasets:Queries",
        "karpathy": "pipeline.datasets.karpathy:Queries",
        "mmeb": "pipeline.datasets.mmeb:Queries",
        "moments": "pipeline.datasets.moments:Queries",
        "msrvtt": "pipeline.datasets.msrvtt:Queries",
        "mteb": "pipeline.datasets.mteb:Queries",
        "multivent": "pipeline.datasets.multivent:Queries",
        "npy": "pipeline.eval.npy:Npy",
        "vidore": "pipeline.datasets.vidore:Queries",
    },
)
LEARNERS: Registry[Learner] = Registry(
    "learners",
    {
        "contrastive": "pipeline.train.contrastive:Contrastive",
        "edje": "pipeline.train.edje:EdjeLearner",
    },
)
TRAINING_DATA: Registry[TrainingData] = Registry(
    "training data",
    {
        "captions": "pipeline.datasets.karpathy:Rows",
        "colpali_train": "pipeline.train.data.pairs:ColPaliTrain",
        "msrvtt": "pipeline.datasets.msrvtt:Rows",
        "multivent": "pipeline.datasets.multivent:Rows",
        "pairs": "pipeline.train.data.pairs:Pairs",
        "webdataset": "pipeline.train.data.webdataset:WebDataset",
    },
)


#: Registries by the names of the spec fields whose values are components.
FIELDS: dict[str, Registry[Any]] = {
    "benchmark": BENCHMARKS,
    "codec": CODECS,
    "compressor": COMPRESSORS,
    "data": TRAINING_DATA,
    "encoder": ENCODERS,
    "generator": CANDIDATES,
    "learner": LEARNERS,
    "ocr": OCR,
    "source": SOURCES,
    "sources": SOURCES,
    "speech": SPEECH,
}


def check_fields(value: Any, registry: Registry[Any] | None = None) -> None:
    """Checks the names of the fields of components in a spec without importing the components.

    Args:
        value: The spec before validation, or a value in it.
        registry: Registry of `value`, if it is a component or a list of components.

    Raises:
        UnknownField: A component has no field of that name.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            with within(f"[{number}]"):
                check_fields(item, registry)
    elif isinstance(value, Mapping):
        if registry is not None:
            registry.check_fields(value)
        for key, item in value.items():
            with within(str(key)):
                check_fields(item, FIELDS.get(key))


def _resolve_source(value: Any) -> ComponentSpec:
    """Resolves the spec of a source. A list of sources is converted to the source `combined`."""
    if value == []:
        raise SpecError("", [], "a source or a non-empty list of sources")
    if not isinstance(value, list):
        return SOURCES.resolve(value)
    try:
        return SOURCES.resolve({"name": "combined", "sources": value})
    except SpecError as error:
        raise error.at(error.field.removeprefix("sources")) from None


def _resolve_rerankers(values: Any) -> list[ComponentSpec]:
    """Resolves the specs of rerankers: one, or a list."""
    if not isinstance(values, list):
        return [RERANKERS.resolve(values)]
    specs = []
    for number, value in enumerate(values):
        with within(f"[{number}]"):
            specs.append(RERANKERS.resolve(value))
    return specs


def _or_none(registry: Registry[Any]) -> Callable[[Any], ComponentSpec | None]:
    return lambda value: None if value is None else registry.resolve(value)


EncoderSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(ENCODERS.resolve)]
CompressorSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(COMPRESSORS.resolve)]
SourceSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(_resolve_source)]
#: Recognition of text in images, or of speech, is disabled if the value is None.
OcrSpec = Annotated[SerializeAsAny[ComponentSpec] | None, BeforeValidator(_or_none(OCR))]
SpeechSpec = Annotated[SerializeAsAny[ComponentSpec] | None, BeforeValidator(_or_none(SPEECH))]
CodecSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(CODECS.resolve)]
GeneratorSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(CANDIDATES.resolve)]
LearnerSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(LEARNERS.resolve)]
TrainingDataSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(TRAINING_DATA.resolve)]
#: Rerankers, given as one or a list. They are applied one after another.
RerankerSpecs = Annotated[list[SerializeAsAny[ComponentSpec]], BeforeValidator(_resolve_rerankers)]
BenchmarkSpec = Annotated[SerializeAsAny[ComponentSpec], BeforeValidator(BENCHMARKS.resolve)]


def field_names(component: str) -> list[str]:
    """Returns the names of the fields of a component's spec, read from its source code.

    Importing an encoder imports torch and transformers, which takes seconds.

    Raises:
        LookupError: The definition of the spec cannot be found.
        OSError: The component belongs to another package.

    >>> field_names("pipeline.compression.random:Random")
    ['name', 'num_vectors', 'ratio', 'rounding', 'seed']
    """
    module, _, name = component.partition(":")
    fields = (
        ast.unparse(assignment.target)
        for assignment in _assignments(module, f"{name}.Spec")
        if "ClassVar" not in ast.unparse(assignment.annotation)
    )
    return list(dict.fromkeys(fields))  # a subclass may define a field again


def _assignments(module: str, name: str) -> Iterator[ast.AnnAssign]:
    """Yields the annotated assignments of a spec class, after those of its base classes."""
    module, definition = _definition(module, name)
    if (module, definition.name) != ("pipeline.config", "Spec"):
        for base in reversed(definition.bases):
            yield from _assignments(module, ast.unparse(base))
        yield from (node for node in definition.body if isinstance(node, ast.AnnAssign))


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """Finds a class, `Class`, `Class.Spec` or `module.Class`, and the module that defines it."""
    head, _, rest = name.partition(".")
    for node in _body(module):
        if isinstance(node, ast.ImportFrom) and any(head == alias.name for alias in node.names):
            is_module = head.islower()
            source = f"{node.module}.{head}" if is_module else str(node.module)
            return _definition(source, rest if is_module else name)
        if isinstance(node, ast.ClassDef) and node.name == head:
            for inner in [node] if not rest else node.body:
                if isinstance(inner, ast.ClassDef) and inner.name == (rest or head):
                    return module, inner
                if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == rest:
                    return _definition(module, ast.unparse(inner.value))  # `Spec = OtherSpec`
    raise LookupError(f"{module}:{name}")


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body
