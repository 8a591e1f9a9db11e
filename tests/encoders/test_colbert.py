"""ColBERT, compared with the transformers model followed by a projection."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from pipeline.config import SpecError
from pipeline.registry import ENCODERS
from pipeline.schema import WORD_BOXES, WORD_KINDS, WORD_SPANS
from pipeline.taps import Tap
from pipeline.tokens import AUDIO, PROMPT, SPECIAL, TEXT, normalise

FAMILIES = ["colbert_bert", "colbert_modernbert"]
#: Texts that are shorter than a window (20 and 32 tokens).
TEXTS = ["The lift of a wing.", "drag", "Flow - or wing, lifting"]
LONG = " ".join(f"lift {i} of the wing," for i in range(12))


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(family, **fields):
        given = {"name": "colbert", "model": checkpoint(family), "dtype": "float32"}
        return ENCODERS.build(ENCODERS.resolve({**given, "custom_template": True, **fields}))

    return build


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def encoder(build, family):
    return build(family)


@pytest.fixture(scope="module")
def reference(checkpoint, family):
    """The transformers model and the projection, applied to tokens by name."""
    folder = Path(checkpoint(family))
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    words = AutoTokenizer.from_pretrained(folder)
    projection_folder = folder / "1_Dense" if family == "colbert_modernbert" else folder
    weights = load_file(projection_folder / "model.safetensors")

    @torch.no_grad()
    def run(text, marker, num_masks=0, attended=1):
        tokens = ["[CLS]", marker, *words.tokenize(text), "[SEP]", *["[MASK]"] * num_masks]
        ids = torch.tensor([words.convert_tokens_to_ids(tokens)])
        mask = torch.ones_like(ids)
        mask[:, len(tokens) - num_masks :] = attended
        output = model(ids, attention_mask=mask, output_attentions=True)
        bias = weights.get("linear.bias", 0)
        vectors = normalise(output.last_hidden_state[0] @ weights["linear.weight"].T + bias)
        return tokens, vectors, output.attentions

    return run


@pytest.fixture(scope="module")
def markers(family):
    return {"colbert_bert": ("[unused0]", "[unused1]")}.get(family, ("[Q] ", "[D] "))


@pytest.fixture
def copy(checkpoint, tmp_path):
    def copy(family):
        return Path(shutil.copytree(checkpoint(family), tmp_path / "copy"))

    return copy


def encode_texts(encoder, texts, taps=()):
    """Returns the tokens of each text, in order."""
    found = {
        int(row): batch.take(slice(i, i + 1))
        for rows, batch in encoder.encode(pa.table({"text": texts}), taps)
        for i, row in enumerate(rows)
    }
    return [found[row] for row in sorted(found)]


def names_in(text, batch):
    return [text[a:b] for a, b in batch.spans[0][batch.mask[0]].tolist() if a >= 0]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def check(**fields):
    ENCODERS.load("colbert").check(ENCODERS.resolve({"name": "colbert", **fields}))


def test_documents_match_projected_states(encoder, reference, markers):
    for text, batch in zip(TEXTS, encode_texts(encoder, TEXTS), strict=True):
        tokens, vectors, _ = reference(text, markers[1])
        is_kept = torch.tensor([token not in (".", ",", "-") for token in tokens])
        assert_close(batch.vectors[batch.mask], vectors[is_kept])
        kinds = batch.kind[batch.mask].tolist()
        assert kinds == [SPECIAL, PROMPT, *[TEXT] * (len(kinds) - 3), SPECIAL]


def test_spans(build):
    (batch,) = encode_texts(build("colbert_bert"), ["A lifting - wing."])
    assert names_in("A lifting - wing.", batch) == ["A", "lift", "ing", "wing"]
    (batch,) = encode_texts(build("colbert_modernbert", skiplist=()), ["for the  flow."])
    assert "".join(names_in("for the  flow.", batch)).replace(" ", "") == "fortheflow."
    assert all(
        name == name.strip() or not name.strip() for name in names_in("for the  flow.", batch)
    )


def test_query_augmentation_matches_transformers(encoder, reference, markers, family):
    size, attended = {"colbert_bert": (12, 0)}.get(family, (16, 1))
    queries = encoder.encode_queries(["lift off", "wing"])
    for i, text in enumerate(["lift off", "wing"]):
        tokens, _, _ = reference(text, markers[0])
        tokens, vectors, _ = reference(text, markers[0], size - len(tokens), attended)
        assert_close(queries.tokens.vectors[i], vectors)
        assert len(tokens) == size == len(queries.token_texts[i])
    assert queries.tokens.mask.all()


def test_query_tokens(build):
    def names(text, **fields):
        return build("colbert_bert", **fields).encode_queries([text]).token_texts[0]

    assert names("Lift, drag", query_length=8) == [
        "[CLS]", "[unused0]", "Lift", ",", "drag", "[SEP]", "[MASK]", "[MASK]"
    ]  # fmt: skip
    assert names("lift", augment=False) == ["[CLS]", "[unused0]", "lift", "[SEP]"]
    assert names("lift", query_prefix="wing: ", augment=False)[:4] == ["[CLS]", "wing", ":", "lift"]
    whole = names("lift " * 15)  # longer than query_length = 12
    assert whole == ["[CLS]", "[unused0]", *["lift"] * 15, "[SEP]"]
    with pytest.raises(SpecError, match="at most 64 tokens"):
        names("lift " * 62)
    with pytest.raises(SpecError, match="at least one word"):
        names(" ")


@pytest.mark.parametrize("token", ["[CLS]", "[SEP]", "[MASK]", "[PAD]"])
def test_special_tokens_in_texts_are_plain_text(encoder, token):
    reader = encoder.reader(encoder.spec)
    token_id = reader.tokenizer.convert_tokens_to_ids(token)
    query, _ = reader.read_text_query(f"drag {token}")
    (document,) = reader.read_item({"text": f"drag {token}"})
    for inputs in (query, document):
        spelled = inputs.sequence["input_ids"][inputs.spans[:, 0] >= len("drag ")]
        assert len(spelled) > 1 and token_id not in spelled


def test_attend_to_augmentation(build):
    plain, attending = (
        build("colbert_bert", attend_to_augmentation=on).encode_queries(["lift"]).tokens.vectors
        for on in (False, True)
    )
    bare = build("colbert_bert", augment=False).encode_queries(["lift"]).tokens.vectors
    assert_close(plain[:, :4], bare)
    assert not torch.allclose(attending[:, :4], bare, atol=1e-3)


def test_long_documents_are_split_into_windows(build, reference, markers, family):
    encoder = build(family, skiplist=())
    (batch,) = encode_texts(encoder, [LONG])
    window_size = {"colbert_bert": 17}.get(family, 29)
    words = encoder._reader.tokenizer
    ids = words(LONG, add_special_tokens=False)["input_ids"]
    assert len(ids) > 2 * window_size and len(ids) % window_size
    expected = []
    for start in range(0, len(ids), window_size):
        window = words.convert_ids_to_tokens(ids[start : start + window_size])
        tokens = ["[CLS]", markers[1], *window, "[SEP]"]
        window_ids = torch.tensor([words.convert_tokens_to_ids(tokens)])
        with torch.no_grad():
            states = encoder.model(window_ids).last_hidden_state
            vectors = normalise(encoder._projection(states)[0])
        first = 0 if start == 0 else 2
        last = len(tokens) if start + window_size >= len(ids) else -1
        expected.append(vectors[first:last])
    assert_close(batch.vectors[0], torch.cat(expected))
    assert "".join(names_in(LONG, batch)).replace(" ", "") == LONG.replace(" ", "")
    (truncated,) = encode_texts(build(family, skiplist=(), overlong="truncate"), [LONG])
    assert_close(
        truncated.vectors[0],
        torch.cat([batch.vectors[0, : window_size + 2], truncated.vectors[0, -1:]]),
    )
    assert truncated.lengths[0] == window_size + 3


def test_batching_does_not_change_vectors(build, family):
    texts = [*TEXTS, LONG, "", None, " \n", "!"]
    together = encode_texts(build(family), texts)
    small = encode_texts(build(family, max_batch_tokens=24), texts)
    for text, batch, other in zip(texts, together, small, strict=True):
        (alone,) = encode_texts(build(family), [text])
        assert_close(batch.vectors[batch.mask], alone.vectors[alone.mask])
        assert_close(batch.vectors[batch.mask], other.vectors[other.mask])
    assert [int(batch.lengths[0]) for batch in together[4:6]] == [0, 0]
    assert all(len(batch.pooled or ()) == 0 for batch in together)


@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_attention_matches_eager_attention(build, reference, markers, family, heads, layer):
    encoder = build(family, skiplist=())
    assert type(encoder).attention(encoder.spec) == (("column_sums", "eos_row"), 3)
    taps = [Tap(statistic, heads, str(layer)) for statistic in ("column_sums", "eos_row")]
    reduce_heads = torch.mean if heads == "mean" else torch.amax
    for text, batch in zip(TEXTS, encode_texts(encoder, TEXTS, taps), strict=True):
        _, _, attentions = reference(text, markers[1])
        attention_HNN = attentions[layer][0]
        rows = (attention_HNN[:, 2:-1].sum(dim=1), attention_HNN[:, -1])
        for tap, head_values in zip(taps, rows, strict=True):
            assert_close(batch.taps[tap.name][batch.mask], reduce_heads(head_values, dim=0))


def test_attention_is_scaled_by_window_length(build):
    encoder = build("colbert_bert", skiplist=())
    taps = [Tap("column_sums", layers="1"), Tap("eos_row", layers="1")]
    text = "wing " * 17 + "lift drag flow"  # windows of 20 and 6 tokens
    whole, *separate = encode_texts(encoder, [text, "wing " * 17, "lift drag flow"], taps)
    sums, last = (whole.taps[tap.name][0] for tap in taps)
    part_values = [[part.taps[tap.name][part.mask] for part in separate] for tap in taps]
    assert_close(sums, torch.cat([part_values[0][0][:-1], part_values[0][1][2:]]))
    assert_close(last, torch.cat([part_values[1][0][:-1], part_values[1][1][2:] * 6 / 20]))


def test_skiplist(build):
    text = "lift, wing & drag"

    def names(**fields):
        (batch,) = encode_texts(build("colbert_bert", **fields), [text])
        return names_in(text, batch)

    assert names() == ["lift", "wing", "drag"]
    assert names(skiplist=()) == ["lift", ",", "wing", "&", "drag"]
    assert names(skiplist=("&", "wing", "nowhere")) == ["lift", ",", "drag"]


def test_tokens_have_the_extents_of_their_words(encoder):
    items = pa.table(
        {
            "text": ["lift drag", "wing"],
            "word_spans": pa.array([[[0, 4], [5, 9]], []], WORD_SPANS),
            "word_boxes": pa.array([[[0, 0, 0.5, 1], [0.5, 0, 1, 1]], []], WORD_BOXES),
            "word_kinds": pa.array([[TEXT, AUDIO], []], WORD_KINDS),
        }
    )
    for rows, batch in encoder.encode(items):
        for i, row in enumerate(rows):
            for kind, span, box in zip(
                batch.kind[i], batch.spans[i], batch.extents[i], strict=True
            ):
                start = int(span[0])
                if start < 0 or row == 1:
                    assert box.isnan().all()
                else:
                    assert box[0] == (0.5 if start >= 5 else 0)
                    assert kind == (AUDIO if start >= 5 else TEXT)


def test_replaces_the_projection(build, encoder, family, tmp_path):
    weights = {"weight": torch.randn(6, 32), "bias": torch.randn(6)}
    save_file(weights, tmp_path / "projection.safetensors")
    replaced = build(family, projection=str(tmp_path))
    assert replaced.dim == 6 and replaced.fingerprint != encoder.fingerprint
    ids = replaced._reader.read_item({"text": "lift"})[0].sequence["input_ids"]
    with torch.no_grad():
        states = replaced.model(ids[None]).last_hidden_state[0]
    (batch,) = encode_texts(replaced, ["lift"])
    assert_close(batch.vectors[0], normalise(states @ weights["weight"].T + weights["bias"]))
    check(model=replaced.spec.model, projection=str(tmp_path))


def test_identity_projection_keeps_hidden_states(build, family, tmp_path):
    """Without markers and a skiplist, as for a single-vector model."""
    plain = {"query_prefix": "", "document_prefix": "", "skiplist": (), "projection": "identity"}
    plain |= {"custom_template": True}
    encoder = build(family, query_length=9, **plain)
    assert encoder.dim == encoder.model.config.hidden_size
    check(model=encoder.spec.model, **plain)
    inputs = encoder._reader.read_item({"text": "lift"})[0].sequence["input_ids"]
    names = encoder._reader.tokenizer.convert_ids_to_tokens(inputs.tolist())
    assert names[0] == "[CLS]" and names[-1] == "[SEP]" and "lift" in "".join(names[1:-1])
    with torch.no_grad():
        states = encoder.model(inputs[None]).last_hidden_state[0]
    (batch,) = encode_texts(encoder, ["lift"])
    assert_close(batch.vectors[0], normalise(states))
    assert encoder.encode_queries(["lift"]).tokens.lengths.tolist() == [9]
    raw = build(family, query_length=9, normalise=False, **plain)
    (batch,) = encode_texts(raw, ["lift"])
    assert_close(batch.vectors[0], states)
    assert not batch.normalised and raw.fingerprint != encoder.fingerprint


@pytest.mark.parametrize("projection", [None, "identity"])
def test_saved_model_gives_equal_vectors(build, family, projection, tmp_path):
    encoder = build(family, projection=projection, query_length=9, skiplist=("wing",))
    encoder.save(tmp_path)
    fields = {"model": str(tmp_path), "projection": projection, "dtype": "float32"}
    loaded = ENCODERS.build(ENCODERS.resolve({"name": "colbert", **fields}))
    for one, other in zip(encode_texts(encoder, TEXTS), encode_texts(loaded, TEXTS), strict=True):
        assert torch.equal(one.vectors[one.mask], other.vectors[other.mask])
    one, other = (e.encode_queries(["the wing"]).tokens for e in (encoder, loaded))
    assert torch.equal(one.vectors, other.vectors)


def test_projection_of_several_layers(build, copy):
    folder = copy("colbert_modernbert")
    shutil.copytree(folder / "1_Dense", folder / "2_Dense")
    second = torch.randn(8, 16)
    save_file({"linear.weight": second}, folder / "2_Dense" / "model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({**modules[1], "idx": 2, "name": "2", "path": "2_Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    encoder = build("colbert_modernbert", model=str(folder))
    assert encoder.dim == 8
    first = load_file(folder / "1_Dense" / "model.safetensors")
    ids = encoder._reader.read_item({"text": "lift"})[0].sequence["input_ids"]
    with torch.no_grad():
        states = encoder.model(ids[None]).last_hidden_state[0]
    middle = states @ first["linear.weight"].T + first["linear.bias"]
    (batch,) = encode_texts(encoder, ["lift"])
    assert_close(batch.vectors[0], normalise(middle @ second.T))


def test_default_usage(build, copy):
    folder = copy("colbert_bert")
    (folder / "artifact.metadata").unlink()
    usage = build("colbert_bert", model=str(folder))._reader.usage
    assert (usage.query_length, usage.document_length, usage.augment) == (32, 180, True)
    assert usage.query_prefix == "[unused0]" and "!" in usage.skiplist
    (folder / "artifact.metadata").write_text('{"mask_punctuation": false}')
    assert build("colbert_bert", model=str(folder))._reader.usage.skiplist == ()


def test_fingerprints(build, encoder, family):
    same = {"document_length": 16, "overlong": "truncate", "skiplist": (), "max_batch_tokens": 64}
    assert build(family, **same).fingerprint == encoder.fingerprint
    length = encoder._reader.usage.query_length
    assert build(family, query_length=length).fingerprint == encoder.fingerprint
    for change in ({"query_length": 5}, {"augment": False}, {"query_prefix": "q"}):
        assert build(family, **change).fingerprint != encoder.fingerprint


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"query_length": 65}, "query_length", "from 1 to 64"),
        ({"document_length": 65}, "document_length", "from 4 to 64"),
        ({"document_length": 3}, "document_length", "from 4 to 64"),
        ({"projection": "/nowhere"}, "projection", "has no projection"),
    ],
)
def test_check_rejects_unsupported_settings(checkpoint, fields, field, message):
    with pytest.raises(SpecError, match=message) as caught:
        check(model=checkpoint("colbert_bert"), **fields)
    assert caught.value.field == field


def test_check_rejects_other_model_types(checkpoint):
    with pytest.raises(SpecError, match="is a colpali"):
        check(model=checkpoint("colpali"))


@pytest.mark.parametrize(
    ("family", "missing", "message"),
    [
        ("colbert_bert", "tokenizer*", "one of tokenizer.json, vocab.txt"),
        ("colbert_bert", "*.safetensors", "has no safetensors file"),
        ("colbert_modernbert", "1_Dense/*.safetensors", "has no projection in 1_Dense"),
        ("colbert_modernbert", "modules.json", "has no projection"),
    ],
)
def test_missing_files(copy, family, missing, message):
    folder = copy(family)
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(SpecError, match=message):
        check(model=str(folder))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("1_Dense/config.json", '{"activation_function": "torch.nn.Tanh"}', "projection is linear"),
        ("1_Dense/config.json", '{"use_residual": true}', "projection is linear"),
        ("1_Dense/model.safetensors", "none", "cannot be read"),
        ("config_sentence_transformers.json", "{", "a valid config_sentence_transformers.json"),
    ],
)
def test_check_rejects_invalid_files(copy, name, text, message):
    folder = copy("colbert_modernbert")
    (folder / name).write_text(text)
    with pytest.raises(SpecError, match=message):
        check(model=str(folder))


def test_check_rejects_projection_of_another_width(checkpoint, tmp_path):
    save_file({"weight": torch.zeros(4, 8)}, tmp_path / "projection.safetensors")
    with pytest.raises(
        SpecError, match="a projection of vectors of width 32, got .*, which has the shape 4 x 8"
    ):
        check(model=checkpoint("colbert_bert"), projection=str(tmp_path))


def test_empty_table_yields_no_batches(encoder):
    assert list(encoder.encode(pa.table({"text": pa.array([], pa.string())}))) == []
    assert np.concatenate([rows for rows, _ in encoder.encode(pa.table({"text": TEXTS}))]).size == 3
