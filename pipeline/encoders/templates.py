"""Templates of queries and items: the text and tokens that an encoder adds to its inputs.

A wrong template silently degrades retrieval, so templates that contradict the checkpoint are errors
and evaluations report the templates that they used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import Spec, SpecError

#: Slot of a query template that is replaced by the instruction of a task.
INSTRUCTION_SLOT = "{instruction}"
#: Instruction of queries without a task.
DEFAULT_INSTRUCTION = "Retrieve images or text relevant to the user's query."
#: File of sentence-transformers and PyLate with the prompts of a checkpoint.
PROMPTS_FILE = "config_sentence_transformers.json"
#: Names of the prompt for documents, in the order of sentence-transformers.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")

#: Text that occurs in no template, and that tokenizers without upper case preserve.
PROBE = "zq"
#: Number of equal tokens from which a template shows their number.
MIN_RUN = 4
#: Texts that are special tokens of a tokenizer: <|im_start|>, <bos>, [Q], [unused0].
SPECIAL_TOKEN = re.compile(r"<\|[^<>|\s]+\|>|<[a-z_]+>|\[(?:[A-Z]\w*|unused\d+)\]")


@dataclass(frozen=True)
class Templates:
    """Templates of an encoder, with the special tokens that the tokenizer adds.

    Attributes:
        query: Template of text queries, with the slot `{query}`.
        text: Template of texts of items, with the slot `{text}`, or None without texts.
        image: Template of images, with the slot `{image}`, or None without images.
    """

    query: str
    text: str | None = None
    image: str | None = None


class TemplateSpec(Spec):
    """Base of the specs of encoders whose template can be changed."""

    custom_template: bool = False
    """Accept a template that contradicts the checkpoint, such as another query prefix."""


def fill_template(template: str, instruction: str = DEFAULT_INSTRUCTION) -> str:
    """Replaces the slot of a query template by an instruction.

    >>> fill_template("Instruct: {instruction} Query: ", "Find a page.")
    'Instruct: Find a page. Query: '
    """
    return template.replace(INSTRUCTION_SLOT, instruction)


def text_template(
    slot: str, tokenise: Callable[[str], Sequence[int]], decode: Callable[[list[int]], str]
) -> str:
    """Derives a template from the token ids of a probe text, which the slot replaces.

    >>> names = {1: "<bos>", 2: "Query: ", 3: PROBE, 4: "<pad>", 5: "."}
    >>> decode = lambda ids: "".join(names[i] for i in ids)
    >>> text_template("{query}", lambda text: [1, 2, *[3] * len(text.split()), 5], decode)
    '<bos>Query: {query}.'
    >>> text_template("{query}", lambda text: [1, *[3] * len(text.split()), 4, 4, 4][:4], decode)
    '<bos>{query} and <pad> up to 4 tokens'
    """
    ids, longer = list(tokenise(PROBE)), list(tokenise(f"{PROBE} {PROBE}"))
    padding = ""
    if len(ids) == len(longer):
        pad = ids[-1]
        padding = f" and {decode([pad])} up to {len(ids)} tokens"
        while ids and ids[-1] == pad:
            ids.pop()
    template = _decode_runs(ids, decode)
    if PROBE not in template:  # unknown to a tokenizer of whole words
        same = (one == other for one, other in zip(ids, longer, strict=False))
        stop = sum(itertools.takewhile(bool, same))
        start = stop - (len(longer) - len(ids))
        return f"{_decode_runs(ids[:start], decode)}{slot}{_decode_runs(ids[stop:], decode)}"
    return template.replace(PROBE, slot) + padding


def image_template(
    slot: str, ids: Sequence[int], is_visual: Sequence[bool], decode: Callable[[list[int]], str]
) -> str:
    """Derives a template from the token ids of an image, whose visual tokens the slot replaces."""
    parts = []
    for visual, group in itertools.groupby(zip(is_visual, ids, strict=True), lambda pair: pair[0]):
        parts.append(slot if visual else _decode_runs([number for _, number in group], decode))
    return "".join(parts)


def _decode_runs(ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Returns the text of ids, in which `<pad>*10` denotes ten equal tokens."""
    parts: list[str] = []
    pending: list[int] = []
    for number, group in itertools.groupby(ids):
        length = len(list(group))
        if length < MIN_RUN:
            pending += [number] * length
            continue
        parts += [decode(pending)] * bool(pending) + [f"{decode([number])}*{length}"]
        pending = []
    return "".join([*parts, *([decode(pending)] if pending else [])])


def check_special_tokens(
    field: str, template: str, vocabulary: Mapping[str, int], model: str
) -> None:
    """Checks that the special tokens in a template are tokens of the checkpoint (`SpecError`).

    Otherwise the tokenizer would split their names into pieces.
    """
    # PyLate's marker tokens end with a space, such as "[Q] ".
    if template in vocabulary:
        return
    for token in SPECIAL_TOKEN.findall(template):
        if token not in vocabulary:
            rule = f"a template whose special tokens are in the vocabulary of {model}"
            raise SpecError(field, template, rule, f"contains {token}")


def prompt_texts(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the prompts of queries and documents in `config_sentence_transformers.json`.

    >>> prompt_texts({"prompts": {"query": "query: ", "passage": "passage: "}})
    ('query: ', 'passage: ')
    >>> prompt_texts({})
    ('', '')
    """
    prompts = settings.get("prompts") or {}
    document = next((prompts[name] for name in DOCUMENT_PROMPTS if prompts.get(name)), "")
    return prompts.get("query") or "", document


def check_declared(
    spec: TemplateSpec, field: str, value: str | None, declared: str | None, origin: str
) -> None:
    """Checks that a template does not contradict the one that the checkpoint declares.

    The slot `{instruction}` matches any text. If `value` is None, the declared template is used; if
    `declared` is None, there is none. `origin` describes where it is declared, for messages.
    """
    if value is None or declared is None or spec.custom_template:
        return
    pattern = re.escape(value).replace(re.escape(INSTRUCTION_SLOT), ".*")
    if not re.fullmatch(pattern, declared, re.DOTALL):
        note = "; custom_template: true accepts another template"
        raise SpecError(field, value, f"{declared!r}, as in {origin} of the checkpoint", note=note)
