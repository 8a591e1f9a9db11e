"""The joint encoder: what it reads, its heads, batches and padding, and the folder."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import safetensors.torch
import torch

from pipeline.config import SpecError, parse
from pipeline.rerank.candidates import candidate_pairs, rerank_scores
from pipeline.rerank.edje import ADAPTER, HEADS, METADATA, Edje, check_tokens, load_adapter
from pipeline.rerank.joint import JointEncoder
from tests.rerank.models import FAMILIES, edje, joint_encoder, language_model

TEXTS = ["lift of a wing", "heat", "the boundary layer over a flat plate in a stream of gas"]


def tokens_of(joint: JointEncoder, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    tokens = torch.randn(len(lengths), max(lengths), joint.dim)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    tokens[~mask] = 1e4  # padding holds anything
    return tokens, mask


@pytest.fixture(scope="module", params=FAMILIES)
def joint(request, tmp_path_factory) -> JointEncoder:
    return joint_encoder(tmp_path_factory.mktemp(request.param), request.param)


@torch.no_grad()
def test_a_text_alone_is_what_the_model_makes_of_it(joint):
    texts = joint.tokenise(TEXTS)
    read = joint.language.base_model(input_ids=texts.ids, attention_mask=texts.mask.long())
    states = joint.text_states(texts)
    torch.testing.assert_close(
        states[texts.mask], read.last_hidden_state[texts.mask], atol=1e-5, rtol=1e-5
    )
    logits = joint.language(input_ids=texts.ids, attention_mask=texts.mask.long()).logits
    torch.testing.assert_close(
        joint.word_logits(states[texts.mask]), logits[texts.mask], atol=1e-4, rtol=1e-4
    )


def test_the_head_of_words_is_tied_to_the_embeddings(joint):
    assert (
        joint.language.get_output_embeddings().weight
        is joint.language.get_input_embeddings().weight
    )


@torch.no_grad()
def test_a_pair_is_one_sequence_of_vision_tokens_and_text(joint):
    """Against the model itself, one pair at a time, without padding."""
    tokens, mask = tokens_of(joint, 5, 3, 0)
    scores = joint.scores(TEXTS, tokens, mask)
    for row, (text, length) in enumerate(zip(TEXTS, (5, 3, 0), strict=True)):
        ids = torch.tensor([joint.tokenizer(text)["input_ids"]])
        embedded = torch.cat([tokens[row : row + 1, :length], joint.words(ids)], dim=1)
        places = torch.cat([torch.zeros(length), torch.arange(ids.shape[1])]).long()
        more = {}
        if getattr(joint.language.config, "type_vocab_size", 1) > 1:
            types = torch.cat([torch.ones(length), torch.zeros(ids.shape[1])]).long()
            more["token_type_ids"] = types.unsqueeze(0)
        if joint.language.config.model_type == "roberta":
            places = places + joint.tokenizer.pad_token_id + 1
        states = joint.language.base_model(
            inputs_embeds=embedded, position_ids=places.unsqueeze(0), **more
        ).last_hidden_state
        expected = joint.match(states[:, length]).item()
        assert scores[row].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("positions", ["text", "patches", "sequence"])
def test_scores_depend_on_the_pair_alone(tmp_path, positions):
    """Not on padding, the batch, its order or how it is cut into passes."""
    joint = joint_encoder(tmp_path, positions=positions)
    tokens, mask = tokens_of(joint, 6, 2, 4)
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    scores = joint.scores(TEXTS, tokens, mask, every)
    for (text, item), score in zip(every.tolist(), scores.tolist(), strict=True):
        length = int(mask[item].sum())
        alone = joint.scores([TEXTS[text]], tokens[item, None, :length], mask[item, None, :length])
        assert alone.item() == pytest.approx(score, abs=1e-4)
    assert scores.std() > 1e-3
    joint.spec = joint.spec.model_copy(update={"max_batch_tokens": 30})
    in_passes = joint.scores(joint.tokenise(TEXTS), tokens.half().float(), mask, every.flip(0))
    torch.testing.assert_close(in_passes.flip(0), scores, atol=2e-2, rtol=0)
    swapped = joint.scores(TEXTS, tokens[:, [1, 0, 2, 3, 4, 5]], mask)
    moved = (swapped - joint.scores(TEXTS, tokens, mask)).abs()
    if positions == "text":  # vision tokens are a set
        assert moved.max() < 1e-4
    else:
        assert moved[mask[:, 1]].min() > 1e-4


def test_places_through_the_sequence_must_suffice(tmp_path):
    joint = joint_encoder(tmp_path, positions="sequence")
    tokens, mask = tokens_of(joint, 38)
    with pytest.raises(
        SpecError, match="positions must be text, because .* 40 positions, got 'sequence'"
    ):
        joint.scores(["a wing"], tokens, mask)
    in_text = joint_encoder(tmp_path / "text")
    assert in_text.scores(["a wing"], tokens, mask).isfinite().all()


def test_patches_have_positions_behind_those_of_the_text(tmp_path):
    """Neighbours share one where an item has more tokens than the table has room."""
    joint = joint_encoder(tmp_path, positions="patches", max_text_tokens=30)
    mask = torch.tensor([[True] * 10 + [False] * 15, [True] * 25])
    few, many = joint._patch_positions(mask).tolist()
    assert few[:10] == list(range(30, 40))
    assert many == [30 + number * 10 // 25 for number in range(25)]
    tokens, mask = tokens_of(joint, 10, 25)
    together = joint.scores(TEXTS[:2], tokens, mask)
    alone = joint.scores(TEXTS[:1], tokens[:1, :10], mask[:1, :10])
    torch.testing.assert_close(together[:1], alone, atol=1e-4, rtol=0)
    with pytest.raises(SpecError, match="max_text_tokens must be at most 39 .*, got 40"):
        joint_encoder(tmp_path / "full", positions="patches", max_text_tokens=40)


def test_a_pool_reads_its_text_once(tmp_path, monkeypatch):
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


def test_what_is_cut_of_a_text_is_said(tmp_path):
    joint = joint_encoder(tmp_path, max_text_tokens=8)
    read = joint.tokenise(["heat", TEXTS[2], "", "[MASK] [SEP]"])
    whole = len(joint.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"])
    assert read.num_truncated.tolist()[:3] == [0, whole - 6, 0]
    assert read.ids.shape[1] == 8 and read.is_word.sum(dim=1).tolist()[1:3] == [6, 0]
    assert not ((read.ids == joint.mask_id) & read.is_word).any()  # spelled out, it is characters
    assert read.ids[1, 7] == joint.tokenizer.sep_token_id


def test_no_pairs_have_no_scores(tmp_path):
    joint = joint_encoder(tmp_path)
    tokens, mask = tokens_of(joint, 2)
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert joint.scores(TEXTS, tokens, mask, none).shape == (0,)
    assert joint.scores([], tokens[:0], mask[:0]).shape == (0,)


def test_tokens_of_another_width_are_refused(tmp_path):
    joint = joint_encoder(tmp_path)
    with pytest.raises(SpecError, match="tokens must be vectors of width 32, got 31"):
        joint.scores(["heat"], torch.zeros(1, 2, 31), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(tmp_path, dtype):
    made = edje(tmp_path / "made")
    made.save(tmp_path / "edje")
    tokens, mask = tokens_of(made.joint, 4, 2, 3)
    expected = made.joint.scores(TEXTS, tokens, mask)
    half = Edje.load(tmp_path / "edje", dtype=dtype).joint.scores(TEXTS, tokens.half(), mask)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected, atol=0.1, rtol=0.05)


EVERY = torch.cartesian_prod(torch.arange(3), torch.arange(3))


@torch.no_grad()
def test_the_layers_laid_out_anew_are_the_models_own(joint):
    """In float64 to rounding; in float32 as near it as the model itself."""
    tokens, mask = tokens_of(joint, 5, 2, 0)
    same, no_padding = tokens_of(joint, 4, 4)
    alike = joint.tokenise(["heat heat", "wing heat"])
    double = copy.deepcopy(joint).double()
    exact = double.logits(joint.tokenise(TEXTS), tokens.double(), mask, EVERY)
    torch.testing.assert_close(
        double.scores(TEXTS, tokens, mask, EVERY), exact, atol=1e-6, rtol=1e-6
    )
    assert joint._layers() is not None and double._layers() is not joint._layers()
    torch.testing.assert_close(
        joint.scores(TEXTS, tokens, mask, EVERY), exact, atol=2e-5, rtol=1e-5
    )
    pairs = torch.tensor([[0, 0], [0, 1]])
    expected = joint.logits(alike, same, no_padding, pairs)
    torch.testing.assert_close(
        joint.scores(alike, same, no_padding, pairs), expected, atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_of_the_last_layer_alone_is_what_transformers_gives(tmp_path, family):
    """Also its gradients: against the model's own pass through whole layers."""
    ours, theirs = (
        joint_encoder(tmp_path / how, family, attention=how).double() for how in ("sdpa", "eager")
    )
    theirs.match.load_state_dict(ours.match.state_dict())
    tokens, mask = tokens_of(ours, 5, 2, 0)
    texts, gradients = ours.read(TEXTS), []
    for joint in (ours, theirs):
        given = tokens.double().masked_fill(~mask.unsqueeze(2), 0).requires_grad_(True)
        logits = joint.logits(texts, given, mask, EVERY)
        words = joint.states(joint.words(texts.ids), texts.mask, given, mask)
        (logits.sum() + words[texts.mask].square().sum()).backward()
        weights = {name: p.grad for name, p in joint.named_parameters() if p.grad is not None}
        gradients.append({"logits": logits.detach(), "tokens": given.grad, **weights})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, own in gradients[0].items():
        torch.testing.assert_close(own, gradients[1][name], atol=1e-5, rtol=1e-5, msg=name)
    first = ours.states(ours.words(texts.ids), texts.mask, given, mask, first=2)
    torch.testing.assert_close(first, words[:, :2], atol=1e-9, rtol=1e-9)


def test_dropout_is_on_in_training_alone(tmp_path):
    joint = joint_encoder(tmp_path)
    for layer in joint.language.base_model.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    tokens, mask = tokens_of(joint, 5, 2, 4)
    texts = joint.tokenise(TEXTS)
    one, other = (joint.logits(texts, tokens, mask, EVERY) for _ in range(2))
    assert torch.equal(one, other)
    joint.train()
    one, other = (joint.logits(texts, tokens, mask, EVERY) for _ in range(2))
    assert (one - other).abs().max() > 1e-3


@torch.no_grad()
def test_scores_follow_the_weights(tmp_path):
    """They are laid out again when they change, and never while dropout is on."""
    joint = joint_encoder(tmp_path)
    tokens, mask = tokens_of(joint, 4, 2, 3)
    before = joint.scores(TEXTS, tokens, mask)
    laid_out = joint._layers()
    assert joint._layers() is laid_out
    for layer in joint.language.base_model.encoder.layer:
        layer.output.dense.weight.mul_(-1)
    after = joint.scores(TEXTS, tokens, mask)
    own = torch.arange(3).unsqueeze(1).expand(-1, 2)
    torch.testing.assert_close(
        after, joint.logits(joint.tokenise(TEXTS), tokens, mask, own), atol=2e-5, rtol=1e-5
    )
    assert (after - before).abs().max() > 1e-3
    assert joint.train()._layers() is None
    copied = pickle.loads(pickle.dumps(joint.eval()))
    torch.testing.assert_close(copied.scores(TEXTS, tokens, mask), after, atol=0, rtol=0)


def test_low_rank_matrices_are_read_as_they_are(tmp_path):
    """They stand beside linear layers, which are then not laid out anew."""
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
    """A few hundredths of how far scores differ, and of any neighbours."""
    exact, small = (
        joint_encoder(tmp_path / str(how), family, quantise=how) for how in (None, "int8")
    )
    for name in ("match", "recover"):
        getattr(small, name).load_state_dict(getattr(exact, name).state_dict())
    tokens, mask = tokens_of(exact, 6, 2, 4)
    expected = exact.scores(TEXTS, tokens, mask, EVERY)
    together = small.scores(TEXTS, tokens, mask, EVERY)
    alone = [small.scores(TEXTS, tokens, mask, pair.unsqueeze(0)) for pair in EVERY]
    for scores in (together, torch.cat(alone)):
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, expected, atol=0.1, rtol=0)
        assert torch.corrcoef(torch.stack([scores, expected]))[0, 1] > 0.99
    assert not torch.equal(together, expected)


def test_int8_comes_of_float32(tmp_path):
    given = {"model": language_model(tmp_path), "dtype": "bfloat16", "quantise": "int8"}
    with pytest.raises(
        SpecError, match="quantise must be null unless dtype is float32, got 'int8'"
    ):
        parse(JointEncoder.Spec, given)


def test_the_bundled_model_gets_a_head_of_its_own():
    joint = JointEncoder(JointEncoder.Spec(), 4).eval()
    assert joint.dim == 384 and joint.mask_id == 103
    texts = joint.tokenise(["a red [MASK]"])
    logits = joint.word_logits(joint.text_states(texts))
    assert logits.shape == (*texts.ids.shape, 30522) and logits.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"model": "nowhere/at all"}, "model must be .* which is not a folder"),
        ({"max_text_tokens": 64}, "max_text_tokens must be at most 40 .*, got 64"),
        ({"max_text_tokens": 2}, "max_text_tokens must be .*, got 2"),
        ({"positions": "none"}, "positions must be .*, got 'none'"),
    ],
)
def test_invalid_specs(tmp_path, spec, said):
    given = {"model": language_model(tmp_path), "max_text_tokens": 24, **spec}
    with pytest.raises(SpecError, match=said):
        JointEncoder(parse(JointEncoder.Spec, given), 4)


def test_a_model_of_another_kind_is_refused(checkpoint):
    with pytest.raises(SpecError, match="model must be .*, which is a siglip"):
        JointEncoder.check(JointEncoder.Spec(model=checkpoint("siglip")))


# -- the folder ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    made = edje(tmp_path / "made")
    made.save(tmp_path / "edje")
    return tmp_path / "edje", made


@pytest.mark.parametrize("kind", ["compressed", "local"])
def test_what_was_saved_is_loaded(tmp_path, kind):
    made = edje(tmp_path / "made", kind=kind)
    made.save(tmp_path / "edje")
    loaded = Edje.load(tmp_path / "edje")
    states, mask = torch.randn(3, 7, 16), torch.ones(3, 7, dtype=torch.bool)
    with torch.no_grad():
        tokens, tokens_mask = made.adapter(states, mask)
        again, _ = loaded.adapter(states, mask)
    torch.testing.assert_close(again, tokens, atol=0, rtol=0)
    scores = [each.joint.scores(TEXTS, tokens, tokens_mask) for each in (made, loaded)]
    torch.testing.assert_close(*scores, atol=0, rtol=0)
    texts = made.joint.tokenise(TEXTS)
    recovered = [
        each.joint.text_embeddings(each.joint.text_states(texts)) for each in (made, loaded)
    ]
    torch.testing.assert_close(*recovered, atol=0, rtol=0)
    assert not any(weights.requires_grad for weights in loaded.parameters())


def test_fingerprints_tell_adapters_and_joint_encoders_apart(tmp_path, folder):
    path, made = folder
    first = json.loads((path / METADATA).read_text("utf-8"))["fingerprints"]
    changes = {}
    for name in ("same", "adapter", "joint", "vision", "settings"):
        if name == "adapter":
            with torch.no_grad():
                made.adapter.queries[0, 0] += 1
        elif name == "joint":
            with torch.no_grad():
                made.joint.match.bias += 1
        elif name == "vision":
            made.vision["fingerprint"] = "of another tower"
        elif name == "settings":
            made.adapter.spec = made.adapter.spec.model_copy(update={"max_tokens": 9})
        made.save(tmp_path / name)
        changes[name] = json.loads((tmp_path / name / METADATA).read_text("utf-8"))["fingerprints"]
    assert changes["same"] == first
    assert changes["adapter"]["adapter"] != first["adapter"]
    assert changes["adapter"]["joint"] == first["joint"] != changes["joint"]["joint"]
    of_adapter = [changes[name]["adapter"] for name in ("same", "joint", "vision", "settings")]
    assert len(set(of_adapter)) == 4
    check_tokens(path, first["adapter"])
    with pytest.raises(SpecError, match=r"edje must be .*the index's adapter .* has the adapter"):
        check_tokens(path, changes["adapter"]["adapter"])


def test_a_folder_that_is_none_or_damaged_is_one_error(folder, tmp_path):
    path, _ = folder

    def refused(said: str) -> None:
        for load in (Edje.load, load_adapter):
            with pytest.raises(SpecError, match=said) as error:
                load(path, "start")
            assert error.value.field == "start"

    with pytest.raises(SpecError, match=f"edje must be .*nowhere.*has no {METADATA}"):
        Edje.load(tmp_path / "nowhere")
    about = (path / METADATA).read_text("utf-8")
    for damaged, said in (
        (about[:40], f"has a damaged {METADATA}"),
        ("{}", f"has a damaged {METADATA}"),
        ("[]", f"has a damaged {METADATA}"),
        (about.replace('"format": 1', '"format": 9'), "is of format 9; .* format 1"),
        (about.replace('"num_tokens": 3', '"num_tokens": 2'), "its adapter that were changed"),
    ):
        (path / METADATA).write_text(damaged, "utf-8")
        refused(said)
    (path / METADATA).write_text(about, "utf-8")
    for name, part in ((ADAPTER, "adapter"), (HEADS, "joint"), ("model.safetensors", "joint")):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-9])
        refused(f"has files of its {part} that were changed")
        (path / name).unlink()
        refused(f"has no {name}" if name in (ADAPTER, HEADS) else "that were changed")
        (path / name).write_bytes(whole)
    weights = safetensors.torch.load_file(path / HEADS)
    safetensors.torch.save_file({**weights, "more": torch.ones(1)}, path / HEADS)
    refused("has files of its joint that were changed")


# -- the candidates --------------------------------------------------------------------------------


def test_a_pool_is_reranked_and_stands_above_all_others():
    torch.manual_seed(0)
    first = torch.randn(5, 12)
    pairs = candidate_pairs(first, 4)
    scores = torch.randn(len(pairs))
    for add in (False, True):
        order = rerank_scores(first, pairs, scores, add).argsort(dim=1, descending=True)
        for query in range(5):
            ranked = first[query].argsort(descending=True).tolist()
            rows = pairs[:, 0] == query
            own = dict(zip(pairs[rows, 1].tolist(), scores[rows].tolist(), strict=True))
            if add:
                own = {item: score + first[query, item].item() for item, score in own.items()}
            expected = sorted(own, key=own.__getitem__, reverse=True) + ranked[4:]
            assert order[query].tolist() == expected


def test_a_pool_larger_than_the_corpus_is_the_corpus_and_an_empty_one_changes_nothing():
    first = torch.rand(2, 3)
    assert candidate_pairs(first, 10).shape == (6, 2)
    none = candidate_pairs(first, 0)
    torch.testing.assert_close(rerank_scores(first, none, torch.zeros(0)), first.double())


def test_texts_can_be_taken(tmp_path):
    joint = joint_encoder(tmp_path)
    texts = joint.tokenise(TEXTS)
    some = texts.take(torch.tensor([2, 0]))
    assert len(some) == 2
    for field in dataclasses.fields(texts):
        assert (getattr(some, field.name)[1] == getattr(texts, field.name)[0]).all()
