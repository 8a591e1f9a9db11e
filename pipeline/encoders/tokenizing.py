"""Token ids, kinds and names, and prompts around text without special tokens."""

from __future__ import annotations

import re
from typing import Any

import torch

from pipeline.encoders.model_inputs import ModelInput
from pipeline.tokens import SPECIAL, TEXT, VISUAL


def token_names(tokenizer: Any, read: ModelInput) -> list[str]:
    """Returns a name for each kept position of a query: its text, or the location of its patch.

    The name of a patch is the centre of its cell, x and y in hundredths of the image.
    """
    names = []
    ids = read.sequence["input_ids"].tolist()
    for number, kind, kept, box in zip(ids, read.kind, read.keep, read.extents, strict=True):
        if not kept:
            continue
        if kind == VISUAL:
            x, y = (50 * (box[0] + box[2])).round(), (50 * (box[1] + box[3])).round()
            names.append(f"[{x:.0f},{y:.0f}]" if torch.isfinite(x) else "[]")
        else:
            names.append(tokenizer.decode([number]).strip() or tokenizer.decode([number]))
    return names


def text_kinds(tokenizer: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns `SPECIAL` for special tokens and `TEXT` for all others, (L,) int8."""
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)), dtype=ids.dtype)
    return torch.where(torch.isin(ids, special), SPECIAL, TEXT)


def ids_between(tokenizer: Any, before: str, text: str, after: str) -> torch.Tensor:
    """Returns the token ids of a text between two parts of a prompt, (L,).

    The prompt may contain special tokens; those spelled out in the text are plain text.
    """
    names = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, names)) or "(?!)")
    begin = max((found.end() for found in special.finditer(before)), default=0)
    found = special.search(after)
    end = found.start() if found else len(after)
    # Plain text of the prompt is tokenised with the text: a token may span both.
    own = before[begin:] + text + after[:end]
    ids = []
    for part, is_own in ((before[:begin], False), (own, True), (after[end:], False)):
        options = {"add_special_tokens": False, "split_special_tokens": is_own, "verbose": False}
        ids += tokenizer(part, **options)["input_ids"]
    whole, plain = (tokenizer("a", add_special_tokens=both)["input_ids"] for both in (True, False))
    start = whole.index(plain[0])
    return torch.tensor(whole[:start] + ids + whole[start + len(plain) :])
