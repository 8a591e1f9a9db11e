"""Tokenises texts inside prompts and determines the kinds and names of tokens."""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any, NamedTuple

import torch

from pipeline.encoders.model_inputs import ModelInput
from pipeline.tokens import AUDIO, SPECIAL, TEXT, VISUAL

#: Held during each call of a tokenizer, and of a processor that contains one. A fast tokenizer
#: stores the truncation, the padding and the treatment of special tokens of the current call, so
#: that a call of another thread would change them (as when queries are encoded for a validation
#: while the next training batch is read).
TOKENIZER_LOCK = threading.RLock()


def token_names(tokenizer: Any, inputs: ModelInput) -> list[str]:
    """Returns the name of each kept position of a query: its text, its patch or its time.

    A patch is named by the coordinates x and y of its centre, in percent of the image size, and an
    audio token by its start in seconds.
    """
    names = []
    ids = inputs.sequence["input_ids"].tolist()
    for number, kind, keep, box in zip(ids, inputs.kind, inputs.keep, inputs.extents, strict=True):
        if not keep:
            continue
        if kind == VISUAL:
            x, y = (50 * (box[0] + box[2])).round(), (50 * (box[1] + box[3])).round()
            names.append(f"[{x:.0f},{y:.0f}]" if torch.isfinite(x) else "[]")
        elif kind == AUDIO:
            names.append(f"[{box[4]:.2f} s]")
        else:
            names.append(tokenizer.decode([number]).strip() or tokenizer.decode([number]))
    return names


def text_kinds(tokenizer: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns `SPECIAL` for special tokens and `TEXT` for all others, (L,) int8."""
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)), dtype=ids.dtype)
    return torch.where(torch.isin(ids, special), SPECIAL, TEXT)


def ids_between(tokenizer: Any, before: str, text: str, after: str) -> torch.Tensor:
    """Returns the token ids (L,) of a text between the two parts of a prompt.

    The prompt may contain special tokens. Special tokens spelled out in the text are plain text.
    """
    special = _special_tokens(tokenizer)
    begin = max((found.end() for found in special.pattern.finditer(before)), default=0)
    found = special.pattern.search(after)
    end = found.start() if found else len(after)
    # Plain text of the prompt is tokenised together with the text, because a token may span both.
    plain_text = before[begin:] + text + after[:end]
    ids = []
    for part, is_plain in ((before[:begin], False), (plain_text, True), (after[end:], False)):
        if part:
            ids += _token_ids(tokenizer, part, split_special_tokens=is_plain)
    return torch.tensor(special.first_ids + ids + special.last_ids)


class _SpecialTokens(NamedTuple):
    """Special tokens of a tokenizer."""

    pattern: re.Pattern[str]
    first_ids: list[int]
    last_ids: list[int]


#: A tokenizer with a thousand added tokens, such as that of ColPali, takes milliseconds to list
#: them.
_cache: weakref.WeakKeyDictionary[Any, _SpecialTokens] = weakref.WeakKeyDictionary()


def _special_tokens(tokenizer: Any) -> _SpecialTokens:
    """Returns the special tokens of a tokenizer, which must not change after the first call."""
    if tokenizer not in _cache:
        names = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        whole, plain = (_token_ids(tokenizer, "a", add_special_tokens=b) for b in (True, False))
        start = whole.index(plain[0])
        pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        _cache[tokenizer] = _SpecialTokens(pattern, whole[:start], whole[start + len(plain) :])
    return _cache[tokenizer]


def _token_ids(tokenizer: Any, text: str, **options: bool) -> list[int]:
    options = {"add_special_tokens": False, "verbose": False, **options}
    with TOKENIZER_LOCK:
        return tokenizer(text, **options)["input_ids"]
