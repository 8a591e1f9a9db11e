"""The joint encoder: inputs, heads, batches, padding, and saving and loading."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import safetensors.torch
import torch

from pipeline.config import SpecError, parse
from pipeline.encoders.edje.candidates import candidate_pairs, rerank_scores
from pipeline.encoders.edje.joint import JointEncoder
from pipeline.encoders.edje.model import ADAPTER, HEADS, METADATA, Edje, check_tokens, load_adapter
from tests.encoders.edje.models import FAMILIES, edje, joint_encoder, language_model

TEXTS = ["lift of a wing", "heat", "the boundary layer over a flat plate in a stream of gas"]
ALL_PAIRS = torch.cartesian_prod(torch.arange(3), torch.arange(3))


def tokens_of(joint: JointEncoder, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    tokens = torch.randn(len(lengths), max(lengths), joint.dim)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    tokens[~mask] = 1e4  # padding is arbitrary
    return tokens, mask


@pytest.fixture(scope="module", params=FAMILIES)
def joint(request, tmp_path_factory) -> JointEncoder:
    return joint_encoder(tmp_path_factory.mktemp(request.param), request.param)


@torch.no_grad()
def test_text_states_and_word_logits(joint):
    texts = joint.tokenise(TEXTS)
    output = joint.language.base_model(input_ids=texts.ids, attention_mask=texts.mask.long())
    states = joint.text_states(texts)
    torch.testing.assert_close(
        states[texts.mask], output.last_hidden_state[texts.mask], atol=1e-5, rtol=1e-5
    )
    logits = joint.language(input_ids=texts.ids, attention_mask=texts.mask.long()).logits
    torch.testing.assert_close(
        joint.word_logits(states[texts.mask]), logits[texts.mask], atol=1e-4, rtol=1e-4
    )


def test_language_head_is_tied_to_the_embeddings(joint):
    assert (
        joint.language.get_output_embeddings().weight
        is joint.language.get_input_embeddings().weight
    )


@torch.no_grad()
def test_pair_is_one_sequence(joint):
    """Compares with the language model, one pair at a time and without padding."""
    tokens, mask = tokens_of(joint, 5, 3, 0)
    scores = joint.scores(TEXTS, tokens, mask)
    for row, (text, length) in enumerate(zip(TEXTS, (5, 3, 0), strict=True)):
        ids = torch.tensor([joint.tokenizer(text)["input_ids"]])
        embedded = torch.cat([tokens[row : row + 1, :length], joint.words(ids)], dim=1)
        positions = torch.cat([torch.zeros(length), torch.arange(ids.shape[1])]).long()
        token_types = {}
        if getattr(joint.language.config, "type_vocab_size", 1) > 1:
            types = torch.cat([torch.ones(length), torch.zeros(ids.shape[1])]).long()
            token_types["token_type_ids"] = types.unsqueeze(0)
        if joint.language.config.model_type == "roberta":
            positions = positions + joint.tokenizer.pad_token_id + 1
        states = joint.language.base_model(
            inputs_embeds=embedded, position_ids=positions.unsqueeze(0), **token_types
        ).last_hidden_state
        expected = joint.match(states[:, length]).item()
        assert scores[row].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("positions", ["text", "patches", "sequence"])
def test_scores_depend_only_on_the_pair(tmp_path, positions):
    """Scores do not depend on padding, the batch, its order or the number of forward passes."""
    joint = joint_encoder(tmp_path, positions=positions)
    tokens, mask = tokens_of(joint, 6, 2, 4)
    scores = joint.scores(TEXTS, tokens, mask, ALL_PAIRS)
    for (text, item), score in zip(ALL_PAIRS.tolist(), scores.tolist(), strict=True):
        length = int(mask[item].sum())
        single = joint.scores([TEXTS[text]], tokens[item, None, :length], mask[item, None, :length])
        assert single.item() == pytest.approx(score, abs=1e-4)
    assert scores.std() > 1e-3
    joint.spec = joint.spec.model_copy(update={"max_batch_tokens": 30})
    texts, half = joint.tokenise(TEXTS), tokens.half().float()
    in_batches = joint.scores(texts, half, mask, ALL_PAIRS.flip(0))
    torch.testing.assert_close(in_batches.flip(0), scores, atol=2e-2, rtol=0)
    swapped = joint.scores(TEXTS, tokens[:, [1, 0, 2, 3, 4, 5]], mask)
    difference = (swapped - joint.scores(TEXTS, tokens, mask)).abs()
    if positions == "text":  # vision tokens are a set
        assert difference.max() < 1e-4
    else:
        assert difference[mask[:, 1]].min() > 1e-4


def test_rejects_too_long_sequence_positions(tmp_path):
    joint = joint_encoder(tmp_path, positions="sequence")
    tokens, mask = tokens_of(joint, 38)
    with pytest.raises(
        SpecError,
        match="^positions must be text for sequences of more than 40 tokens, got 'sequence' "
        r"for a sequence of \d+ tokens$",
    ):
        joint.scores(["a wing"], tokens, mask)
    text_positions = joint_encoder(tmp_path / "text")
    assert text_positions.scores(["a wing"], tokens, mask).isfinite().all()


def test_patch_positions(tmp_path):
    """Neighbouring patches share positions if the position table is too short."""
    joint = joint_encoder(tmp_path, positions="patches", max_text_tokens=30)
    mask = torch.tensor([[True] * 10 + [False] * 15, [True] * 25])
    short, long = joint._patch_positions(mask).tolist()
    assert short[:10] == list(range(30, 40))
    assert long == [30 + number * 10 // 25 for number in range(25)]
    tokens, mask = tokens_of(joint, 10, 25)
    batch = joint.scores(TEXTS[:2], tokens, mask)
    single = joint.scores(TEXTS[:1], tokens[:1, :10], mask[:1, :10])
    torch.testing.assert_close(batch[:1], single, atol=1e-4, rtol=0)
    rule = "at most 39 for a model with 40 positions"
    with pytest.raises(SpecError, match=f"^max_text_tokens must be {rule}, got 40$"):
        joint_encoder(tmp_path / "full", positions="patches", max_text_tokens=40)


def test_text_is_embedded_once(tmp_path, monkeypatch):
    joint = joint_encoder(tmp_path)
    tokens, mask = tokens_of(joint, 4, 4, 4)
    pairs = torch.tensor([[0, 0], [0, 1], [0, 2]])
    embedded, words = [], joint.words
    monkeypatch.setattr(joint, "words", lambda ids: embedded.append(len(ids)) or words(ids))
    of_one_text = joint.scores(TEXTS[:1], tokens, mask, pairs)
    assert embedded == [1]
    monkeypatch.undo()
    torch.testing.assert_close(
        of_one_text, joint.scores(TEXTS[:1] * 3, tokens, mask), atol=1e-5, rtol=0
    )


def test_truncation(tmp_path):
    joint = joint_encoder(tmp_path, max_text_tokens=8)
    texts = joint.tokenise(["heat", TEXTS[2], "", "[MASK] [SEP]"])
    num_tokens = len(joint.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"])
    assert texts.num_truncated.tolist()[:3] == [0, num_tokens - 6, 0]
    assert texts.ids.shape[1] == 8 and texts.is_word.sum(dim=1).tolist()[1:3] == [6, 0]
    assert not ((texts.ids == joint.mask_id) & texts.is_word).any()  # "[MASK]" is plain text
    assert texts.ids[1, 7] == joint.tokenizer.sep_token_id


def test_no_pairs(tmp_path):
    joint = joint_encoder(tmp_path)
    tokens, mask = tokens_of(joint, 2)
    no_pairs = torch.zeros(0, 2, dtype=torch.int64)
    assert joint.scores(TEXTS, tokens, mask, no_pairs).shape == (0,)
    assert joint.scores([], tokens[:0], mask[:0]).shape == (0,)


def test_rejects_tokens_of_another_dimension(tmp_path):
    joint = joint_encoder(tmp_path)
    rule = "vectors of dimension 32"
    with pytest.raises(SpecError, match=f"^tokens must be {rule}, got 'vectors of dimension 31'$"):
        joint.scores(["heat"], torch.zeros(1, 2, 31), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(tmp_path, dtype):
    model = edje(tmp_path / "model")
    model.save(tmp_path / "edje")
    tokens, mask = tokens_of(model.joint, 4, 2, 3)
    expected = model.joint.scores(TEXTS, tokens, mask)
    half = Edje.load(tmp_path / "edje", dtype=dtype).joint.scores(TEXTS, tokens.half(), mask)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected, atol=0.1, rtol=0.05)


@torch.no_grad()
def test_optimised_layers_equal_logits(joint):
    """The result is exact up to rounding in float64 and as accurate as `logits` in float32."""
    tokens, mask = tokens_of(joint, 5, 2, 0)
    same, no_padding = tokens_of(joint, 4, 4)
    alike = joint.tokenise(["heat heat", "wing heat"])
    double = copy.deepcopy(joint).double()
    exact = double.logits(joint.tokenise(TEXTS), tokens.double(), mask, ALL_PAIRS)
    torch.testing.assert_close(
        double.scores(TEXTS, tokens, mask, ALL_PAIRS), exact, atol=1e-6, rtol=1e-6
    )
    assert joint._layers() is not None and double._layers() is not joint._layers()
    torch.testing.assert_close(
        joint.scores(TEXTS, tokens, mask, ALL_PAIRS), exact, atol=2e-5, rtol=1e-5
    )
    pairs = torch.tensor([[0, 0], [0, 1]])
    expected = joint.logits(alike, same, no_padding, pairs)
    torch.testing.assert_close(
        joint.scores(alike, same, no_padding, pairs), expected, atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_partial_last_layer_equals_transformers(tmp_path, family):
    """Logits and gradients equal those of complete layers in transformers."""
    ours, theirs = (
        joint_encoder(tmp_path / attention, family, attention=attention).double()
        for attention in ("sdpa", "eager")
    )
    theirs.match.load_state_dict(ours.match.state_dict())
    tokens, mask = tokens_of(ours, 5, 2, 0)
    texts, results = ours.tokenise(TEXTS), []
    for joint in (ours, theirs):
        vision = tokens.double().masked_fill(~mask.unsqueeze(2), 0).requires_grad_(True)
        logits = joint.logits(texts, vision, mask, ALL_PAIRS)
        states = joint.states(joint.words(texts.ids), texts.mask, vision, mask)
        (logits.sum() + states[texts.mask].square().sum()).backward()
        weights = {name: p.grad for name, p in joint.named_parameters() if p.grad is not None}
        results.append({"logits": logits.detach(), "tokens": vision.grad, **weights})
    assert results[0].keys() == results[1].keys() and len(results[0]) > 20
    for name, result in results[0].items():
        torch.testing.assert_close(result, results[1][name], atol=1e-5, rtol=1e-5, msg=name)
    first = ours.states(ours.words(texts.ids), texts.mask, vision, mask, first=2)
    torch.testing.assert_close(first, states[:, :2], atol=1e-9, rtol=1e-9)


def test_dropout_only_in_training(tmp_path):
    joint = joint_encoder(tmp_path)
    for layer in joint.language.base_model.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    tokens, mask = tokens_of(joint, 5, 2, 4)
    texts = joint.tokenise(TEXTS)
    one, other = (joint.logits(texts, tokens, mask, ALL_PAIRS) for _ in range(2))
    assert torch.equal(one, other)
    joint.train()
    one, other = (joint.logits(texts, tokens, mask, ALL_PAIRS) for _ in range(2))
    assert (one - other).abs().max() > 1e-3


@torch.no_grad()
def test_scores_follow_the_weights(tmp_path):
    """Optimised layers are rebuilt when weights change and are not used in training."""
    joint = joint_encoder(tmp_path)
    tokens, mask = tokens_of(joint, 4, 2, 3)
    before = joint.scores(TEXTS, tokens, mask)
    layers = joint._layers()
    assert joint._layers() is layers
    for layer in joint.language.base_model.encoder.layer:
        layer.output.dense.weight.mul_(-1)
    after = joint.scores(TEXTS, tokens, mask)
    pairs = torch.arange(3).unsqueeze(1).expand(-1, 2)
    torch.testing.assert_close(
        after, joint.logits(joint.tokenise(TEXTS), tokens, mask, pairs), atol=2e-5, rtol=1e-5
    )
    assert (after - before).abs().max() > 1e-3
    assert joint.train()._layers() is None
    loaded = pickle.loads(pickle.dumps(joint.eval()))
    torch.testing.assert_close(loaded.scores(TEXTS, tokens, mask), after, atol=0, rtol=0)


def test_low_rank_adapters(tmp_path):
    """The optimised layers are not used with LoRA."""
    peft = pytest.importorskip("peft")
    joint = joint_encoder(tmp_path)
    tokens, mask = tokens_of(joint, 4, 2, 3)
    before = joint.scores(TEXTS, tokens, mask)
    settings = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    peft.inject_adapter_in_model(settings, joint.language)
    assert joint.eval()._layers() is None
    assert (joint.scores(TEXTS, tokens, mask) - before).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_in_int8_are_close(tmp_path, family):
    """The error is a few hundredths of the range of the scores, for any batch."""
    exact, quantised = (
        joint_encoder(tmp_path / str(quantise), family, quantise=quantise)
        for quantise in (None, "int8")
    )
    for name in ("match", "recover"):
        getattr(quantised, name).load_state_dict(getattr(exact, name).state_dict())
    tokens, mask = tokens_of(exact, 6, 2, 4)
    expected = exact.scores(TEXTS, tokens, mask, ALL_PAIRS)
    batch = quantised.scores(TEXTS, tokens, mask, ALL_PAIRS)
    single = [quantised.scores(TEXTS, tokens, mask, pair.unsqueeze(0)) for pair in ALL_PAIRS]
    for scores in (batch, torch.cat(single)):
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, expected, atol=0.1, rtol=0)
        assert torch.corrcoef(torch.stack([scores, expected]))[0, 1] > 0.98
    assert not torch.equal(batch, expected)


def test_int8_requires_float32(tmp_path):
    fields = {"model": language_model(tmp_path), "dtype": "bfloat16", "quantise": "int8"}
    with pytest.raises(
        SpecError, match="^quantise must be null unless dtype is float32, got 'int8'$"
    ):
        parse(JointEncoder.Spec, fields)


def test_bundled_model_gets_a_language_head():
    joint = JointEncoder(JointEncoder.Spec(), 4).eval()
    assert joint.dim == 384 and joint.mask_id == 103
    texts = joint.tokenise(["a red [MASK]"])
    logits = joint.word_logits(joint.text_states(texts))
    assert logits.shape == (*texts.ids.shape, 30522) and logits.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"model": "nowhere/at all"}, "^model must be .*'nowhere/at all', which is not a folder"),
        ({"max_text_tokens": 64}, "^max_text_tokens must be at most 40 for a model .*, got 64$"),
        ({"max_text_tokens": 2}, "^max_text_tokens must be greater than or equal to 3, got 2$"),
        ({"positions": "none"}, "^positions must be 'text', .*'sequence', got 'none'$"),
    ],
)
def test_rejects_invalid_specs(tmp_path, spec, message):
    fields = {"model": language_model(tmp_path), "max_text_tokens": 24, **spec}
    with pytest.raises(SpecError, match=message):
        JointEncoder(parse(JointEncoder.Spec, fields), 4)


def test_rejects_model_of_another_type(checkpoint):
    with pytest.raises(SpecError, match="^model must be .*bert.*, which is a siglip"):
        JointEncoder.check(JointEncoder.Spec(model=checkpoint("siglip")))


# -- saving and loading ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of an EDJE model, and the model."""
    model = edje(tmp_path / "model")
    model.save(tmp_path / "edje")
    return tmp_path / "edje", model


@pytest.mark.parametrize("kind", ["compressed", "local"])
def test_save_and_load(tmp_path, kind):
    model = edje(tmp_path / "model", kind=kind)
    model.save(tmp_path / "edje")
    loaded = Edje.load(tmp_path / "edje")
    states, mask = torch.randn(3, 7, 16), torch.ones(3, 7, dtype=torch.bool)
    with torch.no_grad():
        tokens, tokens_mask = model.adapter(states, mask)
        again, _ = loaded.adapter(states, mask)
    torch.testing.assert_close(again, tokens, atol=0, rtol=0)
    scores = [each.joint.scores(TEXTS, tokens, tokens_mask) for each in (model, loaded)]
    torch.testing.assert_close(*scores, atol=0, rtol=0)
    texts = model.joint.tokenise(TEXTS)
    recovered = [
        each.joint.text_embeddings(each.joint.text_states(texts)) for each in (model, loaded)
    ]
    torch.testing.assert_close(*recovered, atol=0, rtol=0)
    assert not any(weights.requires_grad for weights in loaded.parameters())


def test_fingerprints(tmp_path, folder):
    path, model = folder
    first = json.loads((path / METADATA).read_text("utf-8"))["fingerprints"]
    changes = {}
    for name in ("same", "adapter", "joint", "vision", "settings"):
        if name == "adapter":
            with torch.no_grad():
                model.adapter.queries[0, 0] += 1
        elif name == "joint":
            with torch.no_grad():
                model.joint.match.bias += 1
        elif name == "vision":
            model.vision["fingerprint"] = "other vision"
        elif name == "settings":
            model.adapter.spec = model.adapter.spec.model_copy(update={"max_tokens": 9})
        model.save(tmp_path / name)
        changes[name] = json.loads((tmp_path / name / METADATA).read_text("utf-8"))["fingerprints"]
    assert changes["same"] == first
    assert changes["adapter"]["adapter"] != first["adapter"]
    assert changes["adapter"]["joint"] == first["joint"] != changes["joint"]["joint"]
    adapters = [changes[name]["adapter"] for name in ("same", "joint", "vision", "settings")]
    assert len(set(adapters)) == 4
    check_tokens(path, first["adapter"])
    stored = changes["adapter"]["adapter"]
    rule = f"an EDJE model with the adapter of the index, {stored}"
    problem = f"has the adapter {first['adapter']}"
    with pytest.raises(SpecError, match=f"^edje must be {rule}, got '{path}', which {problem}$"):
        check_tokens(path, stored)


def test_rejects_missing_and_corrupted_folders(folder, tmp_path):
    path, _ = folder

    def assert_rejected(problem: str, rule: str = "a folder written by EDJE training") -> None:
        message = f"^start must be {rule}.*, got '{path}', which {problem}$"
        for load in (Edje.load, load_adapter):
            with pytest.raises(SpecError, match=message):
                load(path, "start")

    with pytest.raises(SpecError, match="^edje must be .*nowhere', which does not exist$"):
        Edje.load(tmp_path / "nowhere")
    metadata = (path / METADATA).read_text("utf-8")
    for invalid in (metadata[:40], "{}", "[]"):
        (path / METADATA).write_text(invalid, "utf-8")
        assert_rejected(f"has a corrupted {METADATA} .*")
    (path / METADATA).write_text(metadata.replace('"format": 1', '"format": 9'), "utf-8")
    assert_rejected("has format 9", rule="an EDJE model of format 1")
    (path / METADATA).write_text(metadata.replace('"num_tokens": 3', '"num_tokens": 2'), "utf-8")
    assert_rejected("has modified files of its adapter")
    (path / METADATA).write_text(metadata, "utf-8")
    for name, part in ((ADAPTER, "adapter"), (HEADS, "joint"), ("model.safetensors", "joint")):
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:-9])
        assert_rejected(f"has modified files of its {part}")
        (path / name).unlink()
        is_listed = name in (ADAPTER, HEADS)
        assert_rejected(f"has no {name}" if is_listed else f"has modified files of its {part}")
        (path / name).write_bytes(data)
    weights = safetensors.torch.load_file(path / HEADS)
    safetensors.torch.save_file({**weights, "extra": torch.ones(1)}, path / HEADS)
    assert_rejected("has modified files of its joint")


# -- candidates ------------------------------------------------------------------------------------


def test_candidates_rank_above_all_others():
    torch.manual_seed(0)
    first = torch.randn(5, 12)
    pairs = candidate_pairs(first, 4)
    scores = torch.randn(len(pairs))
    for add in (False, True):
        order = rerank_scores(first, pairs, scores, add).argsort(dim=1, descending=True)
        for query in range(5):
            ranked = first[query].argsort(descending=True).tolist()
            rows = pairs[:, 0] == query
            score_of = dict(zip(pairs[rows, 1].tolist(), scores[rows].tolist(), strict=True))
            if add:
                score_of = {i: score + first[query, i].item() for i, score in score_of.items()}
            expected = sorted(score_of, key=score_of.__getitem__, reverse=True) + ranked[4:]
            assert order[query].tolist() == expected


def test_extreme_rerank_depths():
    first = torch.rand(2, 3)
    assert candidate_pairs(first, 10).shape == (6, 2)
    no_pairs = candidate_pairs(first, 0)
    torch.testing.assert_close(rerank_scores(first, no_pairs, torch.zeros(0)), first.double())


def test_take_texts(tmp_path):
    joint = joint_encoder(tmp_path)
    texts = joint.tokenise(TEXTS)
    subset = texts.take(torch.tensor([2, 0]))
    assert len(subset) == 2
    for field in dataclasses.fields(texts):
        assert (getattr(subset, field.name)[1] == getattr(texts, field.name)[0]).all()
