"""MiniLM, compared with transformers and sentence-transformers on real texts and weights."""

import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, T5Config

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.loading import BUNDLED, bundled_folder
from pipeline.encoders.minilm import CPU_PASS_TOKENS, MiniLM
from pipeline.encoders.templates import DEFAULT_INSTRUCTION
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, SPECIAL, TEXT

FOLDER = bundled_folder()
CORPUS = Path(__file__).parents[2] / "jobs/data/cranfield/corpus.jsonl"


@pytest.fixture(scope="module")
def abstracts() -> list[str]:
    with CORPUS.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in itertools.islice(file, 24)]


@pytest.fixture(scope="module")
def long_text(abstracts) -> str:
    """About 1,500 tokens with accents, CJK and an out-of-vocabulary emoji."""
    return "Café Zürich 日本語 🙂 — naïve. " + " ".join(abstracts)[:8000]


@pytest.fixture(scope="module")
def encoder() -> MiniLM:
    return build()


@pytest.fixture(scope="module")
def plain():
    """Tokenizer and model of transformers."""
    return AutoTokenizer.from_pretrained(FOLDER), AutoModel.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """A random BERT of 2 layers, width 48 and 128 positions, with the bundled vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=128,
        )
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    return folder


def build(**fields) -> MiniLM:
    return MiniLM(config.parse(MiniLM.Spec, fields))


def table(texts) -> pa.Table:
    return pa.table({"text": pa.array(texts, pa.string())})


def encode(encoder: MiniLM, texts) -> list[dict]:
    """Returns the tokens of each text, in order."""
    results = {}
    for rows, batch in encoder.encode(table(texts)):
        for i, row in enumerate(rows):
            mask = batch.mask[i]
            assert row not in results
            results[row] = {
                "vectors": batch.vectors[i][mask],
                "spans": batch.spans[i][mask],
                "kind": batch.kind[i][mask],
                "pooled": None if batch.pooled is None else batch.pooled[i],
            }
    return [results[row] for row in range(len(texts))]


def test_pooled_vector_matches_sentence_transformers(encoder, abstracts):
    reference = SentenceTransformer(str(FOLDER), device="cpu")
    assert reference.max_seq_length == encoder.spec.window == 256
    num_tokens = [len(reference.tokenizer(text)["input_ids"]) for text in abstracts]
    whole = [text for text, n in zip(abstracts, num_tokens, strict=True) if n <= 256]
    assert len(whole) > 10
    ours = torch.stack([item["pooled"] for item in encode(encoder, whole)])
    theirs = torch.from_numpy(reference.encode(whole))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layer", [-1, 6, 3, -3, 0])
def test_token_vectors_match_transformers(plain, abstracts, layer):
    tokenizer, model = plain
    inputs = tokenizer(abstracts[0], return_tensors="pt", truncation=True, max_length=256)
    hidden_states = model(**inputs, output_hidden_states=True).hidden_states
    expected = torch.nn.functional.normalize(hidden_states[layer][0, 1:-1], dim=-1)
    ours = encode(build(layer=layer), abstracts[:1])[0]
    torch.testing.assert_close(ours["vectors"], expected.detach(), atol=1e-6, rtol=0)
    raw = encode(build(layer=layer, normalise=False), abstracts[:1])[0]
    expected = hidden_states[layer][0, 1:-1].detach()
    torch.testing.assert_close(raw["vectors"], expected, atol=1e-5, rtol=0)


def test_concatenates_several_layers(plain, abstracts):
    tokenizer, model = plain
    inputs = tokenizer(abstracts[0], return_tensors="pt", truncation=True, max_length=256)
    hidden_states = model(**inputs, output_hidden_states=True).hidden_states
    layers = [-1, 3, 0]
    layer_vectors = [
        torch.nn.functional.normalize(hidden_states[n][0, 1:-1], dim=-1) for n in layers
    ]
    expected = torch.cat(layer_vectors, dim=-1).detach() / 3**0.5
    several = build(layer=layers)
    assert (several.dim, several.num_states, several.pooled_dim) == (3 * 384, 3, 384)
    ours, empty = encode(several, [abstracts[0], ""])
    torch.testing.assert_close(ours["vectors"], expected, atol=1e-6, rtol=0)
    assert empty["vectors"].shape == (1, 3 * 384)
    torch.testing.assert_close(empty["vectors"].norm(), torch.tensor(1.0))
    torch.testing.assert_close(
        encode(build(layer=[6]), abstracts[:1])[0]["vectors"],
        encode(build(), abstracts[:1])[0]["vectors"],
    )


def test_batching_does_not_change_vectors(encoder, abstracts):
    texts = abstracts[:6]
    together = encode(encoder, texts)
    alone = [encode(encoder, [text])[0] for text in texts]
    small = encode(build(max_batch_tokens=256), texts)
    again = encode(encoder, texts)
    for a, b, c, d in zip(together, alone, small, again, strict=True):
        for field in ("vectors", "pooled"):
            torch.testing.assert_close(a[field], b[field], atol=1e-5, rtol=0)
            torch.testing.assert_close(a[field], c[field], atol=1e-5, rtol=0)
            assert torch.equal(a[field], d[field])


def test_batches_respect_the_token_budget(encoder, abstracts, long_text):
    budget = 1024
    texts = [*abstracts, long_text]
    small = build(max_batch_tokens=budget)
    sizes = []
    small.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    batches = list(small.encode(table(texts)))
    assert max(sizes) <= budget
    assert len(sizes) > len(batches) > 5  # the long text needs several passes
    assert sorted(np.concatenate([rows for rows, _ in batches])) == list(range(len(texts)))


def test_batches_have_little_padding(tiny_folder, abstracts):
    """The short last window of an abstract is not padded to the length of the others."""
    small = build(model=str(tiny_folder), window=64, overlap_tokens=16)
    masks = []
    small.model.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    list(small.encode(table(abstracts)))
    assert max(mask.numel() for mask in masks) <= CPU_PASS_TOKENS
    num_padded = sum(mask.numel() for mask in masks)
    assert num_padded < 1.2 * sum(int(mask.sum()) for mask in masks)


@pytest.mark.parametrize("overlap_tokens", [0, 1, 63, 64, 128])
def test_long_text_has_each_token_once_in_order(encoder, plain, long_text, overlap_tokens):
    tokenizer, _ = plain
    whole = tokenizer(
        long_text, add_special_tokens=False, truncation=False, return_offsets_mapping=True
    )
    item = encode(build(overlap_tokens=overlap_tokens), [long_text])[0]
    assert len(whole["input_ids"]) > 1500
    assert item["spans"].tolist() == [list(span) for span in whole["offset_mapping"]]
    assert (item["spans"][1:, 0] >= item["spans"][:-1, 1]).all()
    assert set(item["kind"].tolist()) == {TEXT}
    for (start, end), token in zip(
        item["spans"].tolist(), tokenizer.convert_ids_to_tokens(whole["input_ids"]), strict=True
    ):
        piece = long_text[start:end].lower()
        stripped = piece.replace("é", "e").replace("ü", "u").replace("ï", "i")
        assert stripped == token.removeprefix("##") or (piece, token) in {
            ("🙂", "[UNK]"),
            ("語", "[UNK]"),
        }


@pytest.mark.parametrize(("window", "overlap_tokens"), [(256, 64), (33, 7), (32, 16)])
def test_merges_windows_far_from_their_edges(plain, long_text, window, overlap_tokens):
    """Compares with a slow merge that takes each token from the window with the widest margin."""
    tokenizer, model = plain
    text = long_text[:2500]
    ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    max_content = window - 2
    best = [(-1.0, torch.empty(0))] * len(ids)
    sums, num_tokens = torch.zeros(384), 0
    for start in range(0, len(ids), max_content - overlap_tokens):
        stop = min(start + max_content, len(ids))
        inputs = torch.tensor([[101, *ids[start:stop], 102]])
        with torch.no_grad():
            states = model(inputs, attention_mask=torch.ones_like(inputs)).last_hidden_state[0]
        sums, num_tokens = sums + states.sum(dim=0), num_tokens + len(states)
        for position in range(start, stop):
            left = position - start if start else math.inf
            right = stop - 1 - position if stop < len(ids) else math.inf
            if min(left, right) > best[position][0]:
                best[position] = (min(left, right), states[1 + position - start])
        if stop == len(ids):
            break
    expected = torch.nn.functional.normalize(torch.stack([state for _, state in best]), dim=-1)
    item = encode(build(window=window, overlap_tokens=overlap_tokens), [text])[0]
    torch.testing.assert_close(item["vectors"], expected, atol=1e-5, rtol=0)
    pooled = torch.nn.functional.normalize(sums / num_tokens, dim=-1)
    torch.testing.assert_close(item["pooled"], pooled, atol=1e-5, rtol=0)


def test_long_text_has_special_tokens_once(encoder, long_text):
    with_special = encode(build(keep_special=True), [long_text])[0]
    dropped = encode(encoder, [long_text])[0]
    assert with_special["kind"][[0, -1]].tolist() == [SPECIAL, SPECIAL]
    assert with_special["spans"][[0, -1]].tolist() == [[-1, -1], [-1, -1]]
    assert torch.equal(with_special["vectors"][1:-1], dropped["vectors"])
    assert torch.equal(with_special["pooled"], dropped["pooled"])


def test_keeps_out_of_vocabulary_text(encoder):
    item = encode(encoder, ["🙂 [SEP] lift"])[0]
    assert item["spans"].tolist() == [[0, 1], [2, 7], [8, 12]]
    assert item["kind"].tolist() == [TEXT, TEXT, TEXT]


@pytest.mark.parametrize("text", ["", "  \n", None])
def test_empty_text_has_only_its_pooled_vector(encoder, text):
    item, other = encode(encoder, [text, "lift and drag"])
    assert item["kind"].tolist() == [SPECIAL] and item["spans"].tolist() == [[-1, -1]]
    torch.testing.assert_close(item["vectors"][0], item["pooled"])
    assert len(other["vectors"]) == 3
    assert len(encode(build(pooling="none"), [text])[0]["vectors"]) == 0
    assert len(encode(build(keep_special=True), [text])[0]["vectors"]) == 2


def test_text_of_one_token(encoder):
    item = encode(encoder, ["lift"])[0]
    assert item["vectors"].shape == (1, 384) and item["spans"].tolist() == [[0, 4]]


def test_pooling(plain, abstracts):
    tokenizer, model = plain
    inputs = tokenizer(abstracts[0], return_tensors="pt", truncation=True, max_length=256)
    cls_state = model(**inputs).last_hidden_state[0, 0].detach()
    pooled = encode(build(pooling="cls"), abstracts[:1])[0]["pooled"]
    torch.testing.assert_close(pooled, cls_state / cls_state.norm(), atol=1e-6, rtol=0)
    unpooled = build(pooling="none")
    assert unpooled.pooled_dim is None
    assert encode(unpooled, abstracts[:1])[0]["pooled"] is None


def test_prefix_tokens_are_prompt_without_spans(encoder):
    prefixed = build(document_prefix="passage: ", query_prefix="query: ")
    item = encode(prefixed, ["wing lift"])[0]
    assert item["kind"].tolist() == [PROMPT, PROMPT, TEXT, TEXT]
    assert item["spans"].tolist() == [[-1, -1], [-1, -1], [0, 4], [5, 9]]
    whole = encode(encoder, ["passage: wing lift"])[0]
    assert torch.equal(item["vectors"], whole["vectors"])
    assert prefixed.encode_queries(["wing"]).token_texts == [["query", ":", "wing"]]


def test_instruction_fills_the_slot_of_the_query_prefix(encoder):
    slotted = build(query_prefix="{instruction} Query: ")
    instructed = slotted.with_instruction("Find a page.")
    for found, prefix in (
        (instructed, "Find a page. Query: "),
        (slotted, f"{DEFAULT_INSTRUCTION} Query: "),
    ):
        expected = build(query_prefix=prefix).encode_queries(["wing"])
        queries = found.encode_queries(["wing"])
        assert queries.token_texts == expected.token_texts
        assert torch.equal(queries.tokens.vectors, expected.tokens.vectors)
    assert instructed.fingerprint == slotted.fingerprint
    assert encoder.with_instruction("Find a page.").templates() == encoder.templates()


def test_token_texts_of_queries(encoder):
    queries = encoder.encode_queries(["Aeroelastic WINGS", "café"])
    assert queries.token_texts == [["Aero", "ela", "stic", "WINGS"], ["café"]]
    assert queries.tokens.lengths.tolist() == [4, 1]
    item = encode(encoder, ["Aeroelastic WINGS"])[0]
    torch.testing.assert_close(queries.tokens.vectors[0], item["vectors"], atol=1e-6, rtol=0)


def test_long_query_is_not_truncated(encoder, long_text):
    queries = encoder.encode_queries(["lift", long_text])
    item = encode(encoder, [long_text])[0]
    assert queries.tokens.lengths.tolist() == [1, len(item["vectors"])]
    assert len(queries.token_texts[1]) == len(item["vectors"])


@pytest.mark.parametrize("texts", [[], [""], ["lift", " \t"]])
def test_rejects_empty_queries(encoder, texts):
    with pytest.raises(ValueError, match="^query must be "):
        encoder.encode_queries(texts)


def test_query_without_tokens(encoder):
    only_a_private_character = "\ue000"
    queries = encoder.encode_queries([only_a_private_character])
    torch.testing.assert_close(queries.tokens.vectors[:, 0], queries.tokens.pooled)
    assert queries.token_texts == [[only_a_private_character]]
    with pytest.raises(ValueError, match="at least one token"):
        build(pooling="none").encode_queries([only_a_private_character])


def test_attention_and_dtype_agree_with_the_default(encoder, abstracts):
    reference = encode(encoder, abstracts[:2])
    eager = encode(build(attention="eager"), abstracts[:2])
    half = encode(build(dtype="bfloat16"), abstracts[:2])
    for a, b, c in zip(reference, eager, half, strict=True):
        torch.testing.assert_close(a["vectors"], b["vectors"], atol=1e-5, rtol=0)
        assert c["vectors"].dtype == torch.float32
        assert ((a["vectors"] * c["vectors"]).sum(dim=-1) > 0.99).all()


def test_automatic_dtype_is_resolved_by_the_cpu(tiny_folder):
    flags = Path("/proc/cpuinfo").read_text().split()
    expected = "bfloat16" if "avx512_bf16" in flags else "float32"
    automatic = build(model=str(tiny_folder), window=128, dtype="auto")
    named = build(model=str(tiny_folder), window=128, dtype=expected)
    assert automatic.spec == named.spec  # `auto` is not stored
    assert automatic.fingerprint == named.fingerprint


def test_local_checkpoint_of_another_width(tiny_folder, abstracts, monkeypatch):
    monkeypatch.chdir(tiny_folder.parent)
    tiny = build(model=tiny_folder.name, window=128, overlap_tokens=16, layer=1)
    assert tiny.spec.model == str(tiny_folder)  # workers have other working directories
    assert tiny.dim == tiny.pooled_dim == 48
    item = encode(tiny, abstracts[:1])[0]
    model = BertModel.from_pretrained(tiny_folder).eval()
    ids = tiny.tokenizer(abstracts[0][:200], return_tensors="pt")["input_ids"]
    states = model(ids, output_hidden_states=True).hidden_states[1][0, 1:-1].detach()
    short = encode(tiny, [abstracts[0][:200]])[0]
    expected = torch.nn.functional.normalize(states, dim=-1)
    torch.testing.assert_close(short["vectors"], expected, atol=1e-6, rtol=0)
    assert len(item["vectors"]) > len(short["vectors"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "/no/such/folder"}, "model"),
        ({"model": "no/such/folder"}, "model"),
        ({"model": "~/no-such-folder"}, "model"),
        ({"layer": 7}, "layer"),
        ({"layer": -8}, "layer"),
        ({"window": 513}, "window"),
    ],
)
def test_check_names_the_invalid_field(fields, field):
    spec = config.parse(MiniLM.Spec, fields)
    for call in (MiniLM.check, MiniLM):
        with pytest.raises(SpecError) as caught:
            call(spec)
        assert caught.value.field == field and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"window": 64, "overlap_tokens": 33}, "overlap_tokens"),
        ({"max_batch_tokens": 100}, "max_batch_tokens"),
        ({"pooling": "max"}, "pooling"),
        ({"windows": 5}, "windows"),
    ],
)
def test_spec_rejects_invalid_values(fields, field):
    with pytest.raises(SpecError) as caught:
        config.parse(MiniLM.Spec, fields)
    assert caught.value.field == field


def test_check_rejects_incomplete_checkpoints(tiny_folder, tmp_path):
    MiniLM.check(MiniLM.Spec(model=str(tiny_folder), window=128, layer=-3))
    for file, message in [
        ("model.safetensors", "no safetensors"),
        ("config.json", "in its config.json"),
    ]:
        folder = tmp_path / file
        shutil.copytree(tiny_folder, folder)
        (folder / file).unlink()
        with pytest.raises(SpecError, match=message):
            MiniLM.check(MiniLM.Spec(model=str(folder)))
    T5Config().save_pretrained(tmp_path / "config.json")  # the folder without config
    with pytest.raises(SpecError, match="must be a text encoder, got .*, which is a t5"):
        MiniLM.check(MiniLM.Spec(model=str(tmp_path / "config.json")))


def test_check_loads_no_weights(tiny_folder, tmp_path):
    folder = tmp_path / "other-weights"
    shutil.copytree(tiny_folder, folder)
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")
    MiniLM.check(MiniLM.Spec(model=str(folder), window=128))


def test_check_rejects_unreachable_hub_models(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SpecError, match="got 'some/model', which is not a folder"):
        MiniLM.check(MiniLM.Spec(model="some/model"))


def test_fingerprint_changes_with_query_vectors(tiny_folder, tmp_path):
    base = {"model": str(tiny_folder), "window": 128, "overlap_tokens": 16}
    reference = build(**base).fingerprint
    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    for same in (
        {"model": str(copy)},
        {"max_batch_tokens": 1000},
        {"document_prefix": "passage: "},
    ):
        assert build(**base | same).fingerprint == reference, same
    fingerprints = {reference}
    for other in (
        {"model": BUNDLED},
        {"layer": 1},
        {"pooling": "cls"},
        {"keep_special": True},
        {"window": 64},
        {"overlap_tokens": 8},
        {"dtype": "bfloat16"},
        {"query_prefix": "query: "},
    ):
        fingerprints.add(build(**base | other).fingerprint)
    assert len(fingerprints) == 9

    for file in ("tokenizer.json", "config.json"):
        changed = tmp_path / f"changed-{file}"
        shutil.copytree(tiny_folder, changed)
        (changed / file).write_text((changed / file).read_text() + "\n")
        fingerprints.add(build(**base | {"model": str(changed)}).fingerprint)
    changed = tmp_path / "changed-weights"
    shutil.copytree(tiny_folder, changed)
    model = BertModel.from_pretrained(changed)
    model.embeddings.word_embeddings.weight.data[7, 7] += 1e-3
    model.save_pretrained(changed)
    fingerprints.add(build(**base | {"model": str(changed)}).fingerprint)
    assert len(fingerprints) == 12


ALL_TAPS = [
    Tap(statistic, heads, str(layer))
    for statistic in ("column_sums", "eos_row", "pooled_row")
    for heads in ("mean", "max")
    for layer in (0, 5)
]


@pytest.fixture(scope="module")
def eager():
    return AutoModel.from_pretrained(FOLDER, attn_implementation="eager").eval()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_taps_match_eager_attention(pooling, abstracts, eager):
    encoder = build(pooling=pooling, window=512)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    texts = [*abstracts[:3], "lift"]
    num_checked = 0
    for rows, batch in encoder.encode(table(texts), ALL_TAPS):
        for i, row in enumerate(rows):
            ids = tokenizer(texts[row], return_tensors="pt")
            with torch.no_grad():
                matrices = eager(**ids, output_attentions=True).attentions
            for tap in ALL_TAPS:
                matrix = matrices[int(tap.layers)][0].double()  # (H, L, L)
                rows = {
                    "column_sums": matrix[:, 1:-1].sum(dim=1),
                    "eos_row": matrix[:, -1],
                    "pooled_row": matrix[:, 0] if pooling == "cls" else matrix.mean(dim=1),
                }[tap.statistic][:, 1:-1]
                expected = rows.mean(dim=0) if tap.heads == "mean" else rows.amax(dim=0)
                values = batch.taps[tap.name][i, batch.mask[i]].double()
                torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)
                num_checked += 1
    assert num_checked == len(texts) * len(ALL_TAPS)


def test_taps_do_not_change_vectors(abstracts, long_text):
    encoder = build()
    texts = [*abstracts[:8], long_text, "", "🙂"]
    for (_, plain), (_, tapped) in zip(
        encoder.encode(table(texts)), encoder.encode(table(texts), ALL_TAPS), strict=True
    ):
        assert torch.equal(plain.vectors, tapped.vectors)
        assert torch.equal(plain.pooled, tapped.pooled)
        for tap in ALL_TAPS:
            assert tapped.taps[tap.name][tapped.mask].isfinite().all()


def test_taps_of_long_text_are_computed_per_window(long_text, eager):
    """Single rows are scaled by the window length; column sums are not."""
    encoder = build(window=64, overlap_tokens=16)
    taps = [Tap("column_sums", "mean", "3"), Tap("eos_row", "mean", "5")]
    ((_, batch),) = encoder.encode(table([long_text]), taps)
    expected = {tap.name: [] for tap in taps}
    (windows,) = encoder._tokenise([long_text], "")
    longest = max(len(window.ids) for window in windows)
    assert len(windows) > 3 and len(windows[-1].ids) < longest
    for window in windows:
        with torch.no_grad():
            ids = torch.from_numpy(window.ids).unsqueeze(0)
            matrices = eager(input_ids=ids, output_attentions=True).attentions
        sums = matrices[3][0].mean(dim=0)[1:-1].sum(dim=0)
        last = matrices[5][0].mean(dim=0)[-1] * len(window.ids) / longest
        expected[taps[0].name] += sums[window.keep].tolist()
        expected[taps[1].name] += last[window.keep].tolist()
    for name, expected_values in expected.items():
        values = batch.taps[name][0, batch.mask[0]]
        torch.testing.assert_close(values, torch.tensor(expected_values), atol=1e-5, rtol=1e-4)


def test_attention_info_needs_no_weights(tiny_folder):
    attention = MiniLM.attention(config.parse(MiniLM.Spec, {"model": str(tiny_folder)}))
    assert attention == (("column_sums", "eos_row", "pooled_row"), 2)
    spec = config.parse(MiniLM.Spec, {"pooling": "none"})
    assert MiniLM.attention(spec) == (("column_sums", "eos_row"), 6)


# -- training --------------------------------------------------------------------------------------


def test_training_tokens_match_items_and_have_gradients(encoder, abstracts, long_text):
    texts = [abstracts[0], long_text[:3000], "", "lift"]
    batch = encoder.tokens(encoder.read_items([{"text": text} for text in texts]))
    for row, item in enumerate(encode(encoder, texts)):
        vectors = batch.vectors[row][batch.mask[row]]
        torch.testing.assert_close(vectors.detach(), item["vectors"], atol=1e-5, rtol=0)
        torch.testing.assert_close(batch.pooled[row].detach(), item["pooled"], atol=1e-5, rtol=0)
    weight = encoder.model.encoder.layer[0].attention.self.query.weight
    for vectors in (batch.vectors, batch.pooled):
        (grad,) = torch.autograd.grad(vectors[1].sum(), weight, retain_graph=True)
        assert grad.isfinite().all() and grad.abs().max() > 0


def test_rejects_weights_of_another_model(tiny_folder, tmp_path):
    """Missing and mismatched weights raise an error instead of being initialised at random."""
    for name, message in (
        ("encoder.layer.1.output.dense.weight", "has no weights encoder.layer.1.output.dense"),
        (
            "encoder.layer.0.output.dense.weight",
            "has encoder.layer.0.output.dense.weight of shape 7 x 7",
        ),
    ):
        folder = tmp_path / name
        shutil.copytree(tiny_folder, folder)
        weights = load_file(folder / "model.safetensors")
        if "has no" in message:
            del weights[name]
        else:
            weights[name] = torch.zeros(7, 7)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(SpecError, match=f"^model must be .*{message}"):
            build(model=str(folder), window=128)
