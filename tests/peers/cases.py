"""Specs of ours for the checkpoints of other libraries, and those that do not load yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LATE = "the engine's late-interaction checkpoints have no encoder yet"

ADAPTER = "names of adapters trained without a language modelling head are not renamed"


@dataclass(frozen=True)
class Case:
    """A checkpoint of another library, as a spec of ours names it.

    Attributes:
        family: Manifest and vectors, in `data`.
        variant: Prefix of the expected vectors.
        spec: Encoder; `{folder}` is the folder of the family's checkpoints.
        pooled: Compare the single vectors instead of the token vectors.
        pending: Why the vectors are not equal yet.
    """

    family: str
    variant: str
    spec: dict[str, Any]
    pooled: bool = False
    pending: str | None = None

    @property
    def name(self) -> str:
        """Family and folders of the spec."""
        model, adapter = (
            str(self.spec.get(key, "")).removeprefix("{folder}/") for key in ("model", "adapter")
        )
        return f"{self.family}-{model}" + (f"-with-{adapter}" if adapter else "")


def late(
    family: str,
    model: str,
    variant: str = "",
    adapter: str = "",
    pending: str | None = LATE,
    **more: Any,
) -> Case:
    """Returns the case of a late-interaction checkpoint."""
    spec = {"name": "colpali", "model": f"{{folder}}/{model}", **more}
    if adapter:
        spec["adapter"] = f"{{folder}}/{adapter}"
    return Case(family, variant or adapter or model, spec, pending=pending)


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
    late("colpali", "base", adapter="adapter"),
    late("colqwen2", "base"),
    late("colqwen2", "adapter"),
    late("colqwen2", "adapter_old_names", "adapter"),
    late("colqwen2", "base", adapter="adapter"),
    late("colqwen2", "dora"),
    late("colqwen2", "rslora"),
    late("colqwen2", "sharded", "base"),
    late("colqwen2", "bf16"),
    late("colqwen2_5", "base"),
    late("colqwen2_5", "adapter"),
    late("colqwen2_5", "adapter_old_names", "adapter"),
    late("colqwen2_5", "base", adapter="adapter"),
    late("colqwen3", "base"),
    late("colqwen3", "adapter"),
    late("colqwen3", "base", adapter="adapter"),
    late("colpali", "hf", pending=None),
    late("colqwen2", "hf"),
    *(late("colidefics3", name) for name in ("base", "adapter")),
    late("colidefics3", "base", adapter="adapter"),
    *(late("colqwen_omni", name) for name in ("base", "adapter")),
    late("colqwen_omni", "misnamed", "base"),
    late("colqwen_omni", "base", adapter="adapter"),
    dense("biqwen2_5", "base"),
    dense("biqwen2_5", "adapter", pending=ADAPTER),
    dense("biqwen2_5", "base", "adapter", pending=ADAPTER),
    dense("biqwen2_5", "base", "adapter_old_names", "adapter", pending=ADAPTER),
]
