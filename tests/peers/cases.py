"""Specs of ours for the checkpoints of other libraries, and those that do not load yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEAN = "no encoder returns the mean of ModernVBERT"


@dataclass(frozen=True)
class Case:
    """A checkpoint of another library, as a spec of ours names it.

    Attributes:
        family: Manifest and vectors, in `data`.
        variant: Prefix of the expected vectors.
        spec: Encoder; `{folder}` is the folder of the family's checkpoints.
        pooled: Compare the single vectors instead of the token vectors.
        note: Ending of the name.
        instruction: Instruction of queries; `{instruction}` is that of the inputs.
        pending: Why the vectors are not equal yet.
    """

    family: str
    variant: str
    spec: dict[str, Any]
    pooled: bool = False
    instruction: str = ""
    note: str = ""
    pending: str | None = None

    @property
    def name(self) -> str:
        """Family and folders of the spec."""
        model, adapter = (
            str(self.spec.get(key, "")).removeprefix("{folder}/") for key in ("model", "adapter")
        )
        variant = self.variant if self.variant not in (model, adapter) else ""
        words = (self.family, model, adapter and f"with-{adapter}", variant, self.note)
        return "-".join(word for word in words if word)


def late(
    family: str,
    model: str,
    variant: str = "",
    adapter: str = "",
    pooled: bool = False,
    pending: str | None = None,
    **more: Any,
) -> Case:
    """Returns the case of a late-interaction checkpoint."""
    spec = {"name": "colpali", "model": f"{{folder}}/{model}", **more}
    if adapter:
        spec["adapter"] = f"{{folder}}/{adapter}"
    return Case(family, variant or adapter or model, spec, pooled, pending=pending)


def dense(family: str, model: str, adapter: str = "", variant: str = "", **more: Any) -> Case:
    """Returns the case of a single-vector model of the engine, with the engine's prompts."""
    spec = {
        "name": "qwen_vl",
        "model": f"{{folder}}/{model}",
        "document_prompt": "<|im_start|>user\n{content}Describe the image.<|im_end|><|endoftext|>",
        "query_prompt": "{content}" + "<|endoftext|>" * 10,
    }
    if adapter:
        spec["adapter"] = f"{{folder}}/{adapter}"
    return Case(family, variant or adapter or model, spec, pooled=True, **more)


CASES = [
    late("colpali", "base"),
    late("colpali", "adapter"),
    late("colpali", "adapter_old_names", "adapter"),
    late("colpali", "base_old_names", "base"),
    late("colpali", "base", adapter="adapter"),
    late("colqwen2", "base"),
    late("colqwen2", "adapter"),
    late("colqwen2", "adapter_old_names", "adapter"),
    late("colqwen2", "base_old_names", "base"),
    late("colqwen2", "base", adapter="adapter"),
    late("colqwen2", "dora"),
    late("colqwen2", "rslora"),
    late("colqwen2", "sharded", "base"),
    late("colqwen2", "bf16"),
    late("colqwen2_5", "base"),
    late("colqwen2_5", "adapter"),
    late("colqwen2_5", "adapter_old_names", "adapter"),
    late("colqwen2_5", "base_old_names", "base"),
    late("colqwen2_5", "base", adapter="adapter"),
    late("colqwen3", "base"),
    late("colqwen3", "adapter"),
    late("colqwen3", "base", adapter="adapter"),
    late("colpali", "hf"),
    late("colqwen2", "hf"),
    late("colidefics3", "base"),
    late("colidefics3", "adapter"),
    late("colidefics3", "base", adapter="adapter"),
    *(late("colqwen_omni", name) for name in ("base", "adapter")),
    late("colqwen_omni", "misnamed", "base"),
    late("colqwen_omni", "base", adapter="adapter"),
    *(late("colqwen3_5", name) for name in ("base", "adapter")),
    *(late("colgemma3", name) for name in ("base", "adapter")),
    *(late("colmodernvbert", name) for name in ("base", "adapter", "hf")),
    late("colmodernvbert", "misnamed", "base"),
    *(late("bimodernvbert", name, pooled=True, pending=MEAN) for name in ("base", "adapter")),
    dense("biqwen2_5", "base"),
    dense("biqwen2_5", "adapter"),
    dense("biqwen2_5", "base", "adapter"),
    dense("biqwen2_5", "base", "adapter_old_names", "adapter"),
]

CASES += [
    Case("pylate", "model", {"name": encoder, "model": "{folder}/model"}, note=encoder)
    for encoder in ("colbert", "sentence_transformers")
]


def qwen(
    family: str, variant: str, prompt: str = "", query: str = "", model: str = "model", **more: Any
) -> Case:
    """Returns the case of an embedder on Qwen-VL."""
    spec: dict[str, Any] = {"name": "qwen_vl", "model": f"{{folder}}/{model}"}
    for name in ("adapter", "min_pixels", "max_pixels", "preprocessing"):
        if name in more:
            spec[name] = more.pop(name)
    spec |= {"document_prompt": prompt, "query_prompt": query} if prompt else {}
    return Case(family, variant, spec, pooled=True, **more)


GME_PROMPT = (
    "<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n"
    "<|im_start|>assistant\n<|endoftext|>"
)
GME_ITEM = GME_PROMPT.replace("{instruction}", "You are a helpful assistant.")
VLM2VEC = {
    "prompt": "{content} Represent the given image.",
    "query": "{content}",
    "preprocessing": "vlm2vec",
}
QWEN3_LIMITS = {"min_pixels": 4096, "max_pixels": 1843200}
DEFAULT = "Represent the user's input."
CASES += [
    qwen("gme", "texts", GME_ITEM, GME_ITEM),
    qwen("gme", "instructed", GME_ITEM, GME_PROMPT, instruction="{instruction}."),
    qwen("gme", "grid_images", GME_ITEM, GME_ITEM, preprocessing="gme"),
    qwen("gme", "images", GME_ITEM, GME_ITEM, preprocessing="gme"),
    qwen("vlm2vec", "queries", **VLM2VEC, model="base", adapter="{folder}/adapter"),
    qwen("vlm2vec", "queries", **VLM2VEC, model="adapter"),
    qwen("vlm2vec", "queries", **VLM2VEC, model="adapter_old_names"),
    qwen(
        "vlm2vec",
        "queries",
        **VLM2VEC,
        model="base",
        adapter="{folder}/adapter_old_names",
    ),
    qwen(
        "vlm2vec",
        "images",
        **VLM2VEC,
        model="base",
        adapter="{folder}/adapter",
    ),
    qwen(
        "vlm2vec",
        "video",
        "{content} Understand the content of the provided video.",
        "{content}",
        preprocessing="vlm2vec",
        model="base",
        adapter="{folder}/adapter",
    ),
    qwen("qwen3_vl_embedding", "default", **QWEN3_LIMITS, instruction=DEFAULT),
    qwen("qwen3_vl_embedding", "large_video", **QWEN3_LIMITS),
    qwen("qwen3_vl_embedding", "instructed", **QWEN3_LIMITS, instruction="{instruction}."),
    qwen(
        "qwen3_vl_embedding",
        "instructed",
        **QWEN3_LIMITS,
        instruction="{instruction}",
        note="without-stop",
    ),
    qwen("qwen3_vl_embedding", "empty", **QWEN3_LIMITS),
    qwen("qwen3_vl_embedding", "video", **QWEN3_LIMITS),
]
