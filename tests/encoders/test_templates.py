"""Pinned templates: exact token ids of queries and items, and mismatches with checkpoints.

`golden_ids.json` contains the ids by family; an image token that occurs n times is [id, n].
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from pipeline.config import SpecError
from pipeline.encoders.templates import PROMPTS_FILE, check_special_tokens
from pipeline.registry import ENCODERS
from tests.images import noise, png
from tests.tiny.checkpoints import FAMILIES

#: Families of encoders. Two are rerankers, and miniatures read GTE-ModernBERT as a ColBERT.
OTHERS = ("blip", "cross_encoder", "gte_modernbert")
ENCODER_FAMILIES = [family for family in FAMILIES if family not in OTHERS]
GOLDEN = json.loads((Path(__file__).parent / "golden_ids.json").read_text("utf-8"))
#: Registered name of each family of checkpoints whose name differs.
NAMES = {
    "colqwen2": "colpali",
    "colmodernvbert": "colpali",
    "siglip": "dual",
    "siglip2": "dual",
    "clip": "dual",
    "colbert_bert": "colbert",
    "colbert_modernbert": "colbert",
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen2_5_omni": "qwen_omni",
}
QUERY = "wing lift"

CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
INSTRUCTION = "Retrieve images or text relevant to the user's query."
QWEN = {
    "query": CHAT.format(INSTRUCTION, "{query}"),
    "text": CHAT.format("Represent the user's input.", "{text}"),
    "image": CHAT.format("Represent the user's input.", "<|vision_start|>{image}<|vision_end|>"),
}
DESCRIBE = "<|im_start|>user\n<|vision_start|>{image}<|vision_end|>Describe the image.<|im_end|>"
#: Templates of each family, which are those of the published checkpoints (docs/reference/encoders).
TEMPLATES = {
    "colpali": {
        "query": "<bos>Question: {query}<pad>*10\n",
        "image": "{image}<bos>Describe the image.\n",
    },
    "colqwen2": {
        "query": "Query: {query}<|endoftext|>*10\n",
        "image": f"{DESCRIBE}<|endoftext|>",
    },
    "colmodernvbert": {"query": "{query}<end_of_utterance>*10"},
    "siglip": {"query": "{query} and <pad> up to 16 tokens", "image": "{image}"},
    "siglip2": {"query": "{query} and <pad> up to 16 tokens", "image": "{image}"},
    "clip": {"query": "<start>{query}<end>", "image": "{image}"},
    "colbert_bert": {
        "query": "[CLS] [unused0] {query} [SEP] and [MASK] up to 12 tokens",
        "text": "[CLS] [unused1] {text} [SEP]",
    },
    "colbert_modernbert": {
        "query": "[CLS][Q] {query}[SEP] and [MASK] up to 16 tokens",
        "text": "[CLS][D] {text}[SEP]",
    },
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "qwen2_5_omni": {
        **QWEN,
        "image": CHAT.format("Represent the user's input.", "<|vision_bos|>{image}<|vision_eos|>"),
    },
    "jina_v4": {"query": "Query: {query}", "text": "Passage: {text}", "image": f"{DESCRIBE}\n"},
}


def resolve(family, model, **fields):
    name = NAMES.get(family, family)
    return ENCODERS.resolve({"name": name, "model": str(model), "dtype": "float32", **fields})


def reader(family, model, **fields):
    spec = resolve(family, model, **fields)
    return ENCODERS.load(spec.name).reader(spec)


def golden_ids(family, model):
    """Returns the token ids of a query and of items in the form of the golden file."""
    spec = resolve(family, model)
    encoder_class = ENCODERS.load(spec.name)
    read = encoder_class.reader(spec)
    inputs = encoder_class.supported_inputs(spec)
    found = {"query": read.read_text_query(QUERY)[0].sequence["input_ids"].tolist()}
    if "text" in inputs:
        found["text"] = read.read_item({"text": QUERY})[0].sequence["input_ids"].tolist()
    sequence = read.read_item({"image": png(noise(16, 16))})[0] if "image" in inputs else None
    if sequence is not None and "input_ids" in sequence.sequence:
        groups = itertools.groupby(sequence.sequence["input_ids"].tolist())
        runs = [(number, len(list(group))) for number, group in groups]
        found["image"] = [number if count == 1 else [number, count] for number, count in runs]
    return found


@pytest.fixture
def copy(checkpoint, tmp_path):
    def copy(family):
        return Path(shutil.copytree(checkpoint(family), tmp_path / family))

    return copy


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_token_ids(checkpoint, family):
    assert golden_ids(family, checkpoint(family)) == GOLDEN[family]


def test_token_ids_of_minilm():
    encoder = ENCODERS.build(ENCODERS.resolve("minilm"))
    ids = [encoder.read_queries([QUERY]), encoder.read_items([{"text": QUERY}])]
    assert [windows[0][0].ids.tolist() for windows in ids] == [GOLDEN["minilm"]["query"]] * 2
    templates = encoder.templates()
    assert (templates.query, templates.text) == ("[CLS] {query} [SEP]", "[CLS] {text} [SEP]")


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_templates(checkpoint, family):
    spec = resolve(family, checkpoint(family))
    encoder_class = ENCODERS.load(spec.name)
    templates = encoder_class.reader(spec).templates(encoder_class.supported_inputs(spec))
    expected = TEMPLATES[family]
    assert templates.query == expected["query"] and templates.text == expected.get("text")
    if family == "colmodernvbert":  # one slot per tile, then the downscaled image
        assert templates.image.count("{image}") == 10
        assert templates.image.endswith(
            "{image}<fake_token_around_image>Describe the image.<end_of_utterance>\nAssistant:"
        )
    else:
        assert templates.image == expected.get("image")


def test_instruction_is_part_of_the_template(checkpoint):
    read = reader("qwen2_vl", checkpoint("qwen2_vl")).with_instruction("Find a page.")
    assert read.templates(()).query == CHAT.format("Find a page.", "{query}")


def test_template_of_a_vocabulary_of_words():
    """The probe is an unknown word of the small ColPali."""
    folder = Path(__file__).parents[2] / "jobs/data/models/shapes_colpali"
    read = reader("colpali", folder, query_prefix="", num_augmentation=0)
    assert read.templates(()).query == "<bos>{query}"


# -- mismatches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["colpali", "colqwen2", "colmodernvbert"])
def test_prefix_contradicts_the_processor(checkpoint, family):
    folder = checkpoint(family)
    declared = json.loads((Path(folder) / "processor_config.json").read_text())["query_prefix"]
    message = f"^query_prefix must be {declared!r}, as in processor_config.json of the checkpoint"
    with pytest.raises(SpecError, match=message):
        reader(family, folder, query_prefix="Find: ")
    reader(family, folder, query_prefix=declared)
    reader(family, folder, query_prefix="Find: ", custom_template=True)


def test_default_of_the_processor_class_is_no_declaration(copy):
    """Older checkpoints do not contain a prefix."""
    path = copy("colpali") / "processor_config.json"
    settings = json.loads(path.read_text())
    del settings["query_prefix"]
    path.write_text(json.dumps(settings))
    assert reader("colpali", path.parent).templates(()).query.startswith("<bos>Question: {query}")
    reader("colpali", path.parent, query_prefix="")


@pytest.mark.parametrize(
    ("family", "file", "query", "document"),
    [
        ("colbert_bert", "artifact.metadata", "[unused0]", "[unused1]"),
        ("colbert_modernbert", PROMPTS_FILE, "[Q] ", "[D] "),
    ],
)
def test_prefix_contradicts_colbert(checkpoint, family, file, query, document):
    folder = checkpoint(family)
    for field, declared in (("query_prefix", query), ("document_prefix", document)):
        with pytest.raises(SpecError) as caught:
            reader(family, folder, **{field: "other: "})
        assert str(caught.value) == (
            f"{field} must be {declared!r}, as in {file} of the checkpoint, got 'other: '; "
            "custom_template: true accepts another template"
        )
        reader(family, folder, **{field: declared})
        reader(family, folder, **{field: "other: "}, custom_template=True)


def test_prompts_besides_the_markers_of_colbert(copy):
    """This family does not read them, sentence-transformers does."""
    path = copy("colbert_modernbert") / PROMPTS_FILE
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "prompts": {"query": "[Q] ", "document": ""}}))
    reader("colbert_modernbert", path.parent)
    path.write_text(json.dumps({**settings, "prompts": {"query": "search: "}}))
    message = "^model must be a checkpoint without prompts .* has the prompt 'search: '; use the"
    with pytest.raises(SpecError, match=message):
        reader("colbert_modernbert", path.parent)
    path.write_text(json.dumps({"model_type": "MultiVectorEncoder"}))
    with pytest.raises(SpecError, match="format of sentence-transformers; use the encoder sent"):
        reader("colbert_modernbert", path.parent)


def test_prefix_contradicts_the_prompts_of_a_dense_model(tmp_path):
    default = ENCODERS.load("minilm")
    bundled = default(ENCODERS.resolve("minilm"))
    bundled.save(tmp_path)
    prompts = {"query": "Instruct: Find a page.\nQuery: ", "passage": "passage: "}
    (tmp_path / PROMPTS_FILE).write_text(json.dumps({"prompts": prompts}))

    def check(**fields):
        default.check(ENCODERS.resolve({"name": "minilm", "model": str(tmp_path), **fields}))

    with pytest.raises(SpecError, match="^query_prefix must be 'Instruct: .*, got ''; custom_temp"):
        check()
    slotted = "Instruct: {instruction}\nQuery: "
    with pytest.raises(SpecError, match="^document_prefix must be 'passage: ', as in config_sente"):
        check(query_prefix=slotted)
    check(query_prefix=slotted, document_prefix="passage: ")
    check(custom_template=True)


def test_special_tokens_that_the_tokenizer_lacks(copy, checkpoint):
    """They would be split into pieces."""
    message = r"whose special tokens are in the vocabulary of .*, which contains "
    with pytest.raises(SpecError, match=rf"^query_prompt must be .*{message}<\|system\|>"):
        reader("qwen2_vl", checkpoint("qwen2_vl"), query_prompt="<|system|>{content}")
    with pytest.raises(SpecError, match=rf"^query_prefix must be .*{message}\[Q\]"):
        reader("colbert_bert", checkpoint("colbert_bert"), query_prefix="[Q]", custom_template=True)
    with pytest.raises(SpecError, match=rf"^query_prefix must be .*{message}<query>"):
        reader("colpali", checkpoint("colpali"), query_prefix="<query> ", custom_template=True)
    with pytest.raises(SpecError, match=rf"^document_prefix must be .*{message}\[D\]"):
        ENCODERS.load("minilm").check(
            ENCODERS.resolve({"name": "minilm", "document_prefix": "[D]"})
        )
    # The marker of ColBERT's original code in a checkpoint of another vocabulary.
    folder = copy("colbert_modernbert")
    (folder / PROMPTS_FILE).unlink()
    with pytest.raises(SpecError, match=rf"^query_prefix must be .*{message}\[unused0\]"):
        reader("colbert_modernbert", folder)


def test_plain_brackets_are_no_special_tokens():
    check_special_tokens("query_prefix", "find [1] a < b <|", {}, "model")


def test_custom_template_does_not_change_the_fingerprint(checkpoint):
    for family in ("colpali", "colbert_bert"):
        one, other = (
            ENCODERS.build(resolve(family, checkpoint(family), custom_template=custom))
            for custom in (False, True)
        )
        assert one.fingerprint == other.fingerprint
