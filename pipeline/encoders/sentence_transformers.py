"""Multi-vector and dense models that the library sentence-transformers loads.

The library reads the formats of ColBERT's original code, PyLate, the visual retrieval models of
transformers (ColPali, ColQwen2, ColModernVBert) and its own. The families of this package that read
the same checkpoints compute equal vectors; they also provide token positions, attention statistics
and training, and do not truncate texts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pydantic import Field

from pipeline import config, extras
from pipeline.config import SpecError, reading
from pipeline.encoders import EncodedQueries, check_query_size, check_query_texts
from pipeline.encoders.batching import PartsEncoder, join_parts
from pipeline.encoders.images import item_images
from pipeline.encoders.loading import (
    MODEL_RULE,
    SETTINGS,
    WEIGHTS,
    ModelName,
    hash_files,
    load_json,
)
from pipeline.encoders.templates import (
    PROBE,
    PROMPTS_FILE,
    Templates,
    TemplateSpec,
    check_declared,
    check_special_tokens,
    fill_template,
    image_template,
    prompt_texts,
    text_template,
)
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.runtime.checkpoint import (
    LOAD_ERRORS,
    check_folder,
    check_safetensors,
    find_checkpoint,
    find_pickles,
)
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

#: Files of a checkpoint, including those of its modules in subfolders.
FILES = [
    *SETTINGS,
    *WEIGHTS,
    PROMPTS_FILE,
    *("modules.json", "sentence_bert_config.json", "artifact.metadata"),
    *("*/config.json", "*/*.safetensors"),
]
#: Modules that may be part of a checkpoint. Other classes would be imported and executed.
MODULES = re.compile(r"sentence_transformers\.[\w.]+|pylate\.models\.Dense\.Dense")
MULTI_VECTOR = "multi_vector"
PROBE_IMAGE = Image.new("RGB", (64, 64))
#: Fields that do not affect query vectors, or whose files are hashed instead.
NOT_IN_FINGERPRINT = (
    *("model", "revision", "documents", "document_prefix", "batch_size", "custom_template"),
    "trust_remote_code",
)


class SentenceTransformers(PartsEncoder["SentenceTransformers.Spec"]):
    """Encoder that runs a model with the library sentence-transformers.

    Documents that exceed the maximum length of the model are truncated by the library. Queries that
    exceed it are rejected. Items without content have no tokens.
    """

    class Spec(TemplateSpec, config.ComponentSpec):
        """Checkpoint, the vectors that are used as token vectors, and the templates."""

        name: Literal["sentence_transformers"] = "sentence_transformers"
        model: ModelName
        """Hub name, or local folder."""
        revision: str | None = None
        """Branch, tag or commit of a model on the hub."""
        vectors: Literal["multi_vector", "states", "pooled"] = "multi_vector"
        """Token vectors of an item: those of a multi-vector model; the hidden `states` of a dense
        model without its special tokens, whose single vector is the pooled vector; or only the
        single vector of a dense model (`pooled`).
        """
        documents: Literal["text", "images"] = "text"
        """Content of an item that is encoded. ColPali-type models encode "images", one at a time.
        """
        query_prefix: str | None = None
        """Prefix of each query. If null, the checkpoint's prompt for queries is used.
        `{instruction}` is replaced with the instruction of the benchmark's task."""
        document_prefix: str | None = None
        """Prefix of the text of each item. If null, the checkpoint's prompt for documents is used.
        """
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
        """Dtype of the weights and activations."""
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
        """Attention implementation. `flash_attention_2` needs the package flash-attn and a GPU."""
        batch_size: int = Field(32, ge=1)
        """Number of items per forward pass."""
        trust_remote_code: Literal[False] = False
        """Always false: code in checkpoints is never executed."""

    def __init__(self, spec: Spec):
        self.spec = spec
        folder = find_checkpoint(spec.model, spec.revision, FILES, MODEL_RULE)
        _check_files(spec, folder)
        self._model = model = _load(spec, folder)
        if not model.supports("image" if spec.documents == "images" else "text"):
            rule = "the type of content that the model encodes"
            raise SpecError("documents", spec.documents, rule, "is not supported by the model")
        if spec.documents == "images" and "input_ids" not in model.preprocess([PROBE_IMAGE]):
            rule = "a model for which sentence-transformers adds the prompt of images"
            note = "; use the encoder of its family"
            raise SpecError("model", spec.model, rule, "is none", note)
        prompts = prompt_texts({"prompts": model.prompts})
        self._prompts = dict(zip(("query", "document"), prompts, strict=True))
        self._check_prefixes()
        if spec.vectors == MULTI_VECTOR:
            self._check_lengths()
        self.dim = model.get_embedding_dimension()
        self.pooled_dim = None if spec.vectors == MULTI_VECTOR else self.dim
        settings = config.dump(spec, exclude=NOT_IN_FINGERPRINT)
        if spec.query_prefix is None:
            settings["query_prefix"] = self._prompts["query"]
        self.fingerprint = config.digest({"files": hash_files(folder, FILES), "settings": settings})

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks the files of the checkpoint. Weights are not loaded."""
        extras.require("sentence_transformers")
        is_local = Path(spec.model).is_dir()
        files = [name for name in FILES if is_local or not name.endswith(".safetensors")]
        folder = find_checkpoint(spec.model, spec.revision, files, MODEL_RULE)
        _check_files(spec, folder, with_weights=is_local)

    # -- items -------------------------------------------------------------------------------------

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes texts or images, batching those of similar size."""
        inputs = [self._read_item(item) for item in items.to_pylist()]
        rows = np.argsort([sum(map(_size, parts)) for parts in inputs], kind="stable")
        for start in range(0, len(rows), self.spec.batch_size):
            batch_rows = rows[start : start + self.spec.batch_size]
            parts = [part for row in batch_rows for part in inputs[row]]
            outputs = self._run(parts, "document", self.spec.document_prefix)
            yield batch_rows, self._batch(outputs, [len(inputs[row]) for row in batch_rows])

    def _read_item(self, item: Mapping[str, Any]) -> list[Any]:
        if self.spec.documents == "images":
            return [image for image, _, _ in item_images(item)]
        text = item.get("text") or ""
        return [text] if text.strip() else []

    # -- queries -----------------------------------------------------------------------------------

    def templates(self) -> Templates:
        """Returns the templates, derived from the inputs of the model."""
        decode = functools.partial(self._model.tokenizer.decode, clean_up_tokenization_spaces=False)

        def ids(part: Any, task: str, prefix: str | None) -> list[int]:
            prompt = self._prompt(task, prefix)
            return self._model.preprocess([part], prompt=prompt, task=task)["input_ids"][0].tolist()

        text = image = None
        if self.spec.documents == "text":
            prefix = self.spec.document_prefix
            text = text_template("{text}", lambda t: ids(t, "document", prefix), decode)
        else:
            tokens = ids(PROBE_IMAGE, "document", None)
            visual = self._model.processor.image_token_id
            image = image_template("{image}", tokens, [i == visual for i in tokens], decode)
        query_ids = functools.partial(ids, task="query", prefix=self._query_prefix)
        return Templates(text_template("{query}", query_ids, decode), text, image)

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order."""
        check_query_texts(texts)
        for text in texts:
            self._check_length(text)
        return self._encode_queries(texts, self._query_prefix)

    def _encode_opened(self, images: Sequence[Image.Image]) -> EncodedQueries:
        """Encodes image queries, in order."""
        return self._encode_queries(images, None)

    @property
    def _query_prefix(self) -> str | None:
        prefix = self.spec.query_prefix
        return None if prefix is None else fill_template(prefix, self._instruction)

    def _check_prefixes(self) -> None:
        """Checks that the prefixes neither contradict the checkpoint nor contain unknown tokens."""
        spec, vocabulary = self.spec, self._model.tokenizer.get_vocab()
        for task, declared in self._prompts.items():
            field = f"{task}_prefix"
            prefix = getattr(spec, field)
            check_declared(spec, field, prefix, declared or None, PROMPTS_FILE)
            template = declared if prefix is None else prefix
            check_special_tokens(field, template, vocabulary, spec.model)

    def _check_lengths(self) -> None:
        """Checks that token vectors have unit length, which scores and indexes assume."""
        (output,) = self._run([PROBE], "query", self._query_prefix)
        longest = float(output["token_embeddings"][self._mask(output)].float().norm(dim=1).max())
        if abs(longest - 1) > 0.01:
            rule = "a multi-vector model whose vectors have unit length"
            note = '; add a module to it that normalises "token_embeddings"'
            problem = f"has vectors of length {longest:.3g}"
            raise SpecError("model", self.spec.model, rule, problem, note)

    def _check_length(self, text: str) -> None:
        """Checks the length of a query, which the library would truncate."""
        transformer = self._model[0]
        expansion = getattr(transformer, "query_expansion", None)
        limit = transformer.max_seq_length
        if self.spec.vectors == MULTI_VECTOR:
            limit = getattr(transformer, "query_length", None) or limit
            if expansion is not None and expansion["strategy"] == "fixed":
                limit = expansion["length"]
        prompt = self._prompt("query", self._query_prefix)
        with TOKENIZER_LOCK:
            size = len(self._model.tokenizer(prompt + text, verbose=False)["input_ids"])
        check_query_size(text, size, limit, " with its prefix")

    def _encode_queries(self, parts: Sequence[Any], prefix: str | None) -> EncodedQueries:
        task = "query" if isinstance(parts[0], str) else "document"
        outputs = [
            output
            for start in range(0, len(parts), self.spec.batch_size)
            for output in self._run(parts[start : start + self.spec.batch_size], task, prefix)
        ]
        if self.spec.vectors == "pooled":
            names = [[str(part)] for part in parts]
        else:
            decode = self._model.tokenizer.decode
            names = [
                [decode([i]).strip() or decode([i]) for i in ids.tolist()]
                for ids in (output["input_ids"][self._mask(output)] for output in outputs)
            ]
        return EncodedQueries(self._batch(outputs, [1] * len(parts)), names)

    # -- the model ---------------------------------------------------------------------------------

    def _prompt(self, task: str, prefix: str | None) -> str:
        return self._prompts[task] if prefix is None else prefix

    def _run(self, parts: Sequence[Any], task: str, prefix: str | None) -> list[dict[str, Any]]:
        if not parts:
            return []
        run: Callable[..., Any] = getattr(self._model, f"encode_{task}")
        options: dict[str, Any] = {"batch_size": len(parts), "output_value": None}
        options["show_progress_bar"] = False
        if isinstance(parts[0], str):
            # Always given, because version 6.2 ignores the prompts `passage` and `corpus`.
            options["prompt"] = self._prompt(task, prefix)
        with TOKENIZER_LOCK:
            return run(list(parts), **options)

    def _mask(self, output: Mapping[str, Any]) -> torch.Tensor:
        """Returns the mask of the tokens whose vectors are used."""
        mask = output["attention_mask"].bool()
        if self.spec.vectors == MULTI_VECTOR:
            return mask
        tokenizer = self._model.tokenizer
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        is_special = torch.isin(
            output["input_ids"], torch.tensor(sorted(special), device=mask.device)
        )
        return mask & ~is_special

    def _batch(self, outputs: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> TokenBatch:
        """Returns the tokens of items from the outputs of all parts, `counts` per item."""
        pooled = None
        if self.pooled_dim:
            pooled = [output["sentence_embedding"].float() for output in outputs]
        if pooled is not None and self.spec.vectors == "pooled":
            parts = [vector_D[None] for vector_D in pooled]
        else:
            parts = [output["token_embeddings"][self._mask(output)].float() for output in outputs]
        return join_parts(parts, counts, self.dim, pooled)


def _size(part: Any) -> int:
    """Returns the number of characters of a text, or of pixels of an image."""
    return len(part) if isinstance(part, str) else part.width * part.height


def _load(spec: SentenceTransformers.Spec, folder: Path) -> Any:
    extras.require("sentence_transformers")
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    model_class = MultiVectorEncoder if spec.vectors == MULTI_VECTOR else SentenceTransformer
    options = {
        "dtype": getattr(torch, spec.dtype),
        "attn_implementation": spec.attention,
        "use_safetensors": True,
    }
    rule = f"a checkpoint that {model_class.__name__} can load"
    with reading("model", spec.model, rule, *LOAD_ERRORS, problem="cannot be loaded"):
        model = model_class(
            str(folder), trust_remote_code=False, local_files_only=True, model_kwargs=options
        )
    return model.eval()


def check_modules(parts: Sequence[Mapping[str, str]], model: str) -> None:
    """Raises `SpecError` for modules of other packages, which would be imported and executed."""
    for part in parts:
        if part["type"] and not MODULES.fullmatch(part["type"]):
            rule = "a checkpoint whose modules are part of sentence-transformers"
            raise SpecError("model", model, rule, f"has the module {part['type']}")


def _check_files(spec: SentenceTransformers.Spec, folder: Path, with_weights: bool = True) -> None:
    """Checks that a checkpoint has no code and no pickled weights, and is of the right type."""
    check_folder(spec.model, folder)
    settings = load_json(folder / "config.json", spec.model)
    if settings is None and not (folder / "modules.json").is_file():
        rule = "a checkpoint with a config.json or modules.json"
        raise SpecError("model", spec.model, rule, "has neither")
    parts = load_json(folder / "modules.json", spec.model) or [{"path": "", "type": ""}]
    check_modules(parts, spec.model)
    for part in parts:
        path = folder / part["path"]
        if with_weights and (find_pickles(path) or any(path.glob("*.safetensors"))):
            check_safetensors(spec.model, path)
    library = load_json(folder / PROMPTS_FILE, spec.model) or {}
    architecture = ((settings or {}).get("architectures") or [""])[0]
    is_multi_vector = (
        library.get("model_type") in ("ColBERT", "MultiVectorEncoder")
        or any("pylate" in part["type"] for part in parts)
        or (architecture == "HF_ColBERT" and library.get("model_type") is None)
        or (architecture.endswith("ForRetrieval") and library.get("model_type") is None)
    )
    if is_multi_vector != (spec.vectors == MULTI_VECTOR):
        kind = "multi-vector" if is_multi_vector else "dense"
        rule = "multi_vector" if is_multi_vector else "states or pooled"
        raise SpecError("vectors", spec.vectors, f"{rule} (the model is {kind})")
