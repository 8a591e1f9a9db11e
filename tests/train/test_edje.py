"""EDJE's training: the losses of a batch, the loop, starting points, teachers, quality."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import SiglipConfig, SiglipModel, SiglipProcessor

from pipeline import config
from pipeline.config import SpecError
from pipeline.rerank.edje import load_adapter, load_joint
from pipeline.train import tiny
from pipeline.train.edje import TEACHER, drawn, texts_of
from pipeline.train.loop import Loop, check
from tests.conftest import ROOT
from tests.rerank.models import language_model
from tests.train.runs import assert_same, logged, spec_of, trained, weights_of
from tests.train.test_loop import run_workers

ADAPTER = {"num_tokens": 3, "hidden": 24, "heads": 2}


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> dict[str, Any]:
    """A tiny SigLIP whose words are those of scenes, and which sees 4 x 4 patches."""
    folder = tmp_path_factory.mktemp("towers")
    tiny.siglip(folder)
    processor = SiglipProcessor.from_pretrained(folder)
    processor.image_processor.size = {"height": 32, "width": 32}
    settings = SiglipConfig.from_pretrained(folder)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    for tower in (settings.text_config, settings.vision_config):
        for name, value in {**small, "num_attention_heads": 2}.items():
            setattr(tower, name, value)
    settings.text_config.projection_size = 32
    settings.vision_config.image_size = 32
    torch.manual_seed(0)
    model = SiglipModel(settings)
    with torch.no_grad():  # at random, what it sees is little beside where it sees it
        model.vision_model.embeddings.patch_embedding.weight.mul_(10)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return {"name": "dual", "model": str(folder), "dtype": "float32"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return language_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def run_of(towers, bert, tmp_path):
    """`run_of(name, learner, ...)`: the spec of a run of six steps of eight scenes."""

    def of(name: str, learner: dict[str, Any] | None = None, **more: Any):
        own = {"adapter": ADAPTER, "joint": {"model": bert, "max_text_tokens": 24}}
        own = {"name": "edje", "encoder": towers, "pool": 4, **own, **(learner or {})}
        data = {"name": "shapes", "num_scenes": 24, "captions": 1, "held_out": 12}
        fields = {"data": {**data, "fresh": False}, **more}
        spec = spec_of(tmp_path / name, "", **fields)
        given = {**config.dump(spec), "learner": own}
        return config.parse(type(spec), given)

    return of


def loop_of(spec) -> Loop:
    loop = Loop(spec, say=lambda line: None)
    loop.learner.prepare(loop.data)
    return loop


def test_the_loss_of_a_batch_is_what_the_paper_says(run_of, tmp_path):
    """Against pairs that are read one by one, in float64 from the logits on."""
    trained(run_of("teacher", {"adapter": {**ADAPTER, "kind": "local"}}, max_steps=1))
    learner = {
        "negatives": "top",
        "num_negatives": 2,
        "itm": 0.5,
        "mlm": 0.25,
        "recovery": 2.0,
        "distillation": {"teacher": str(tmp_path / "teacher" / "model"), "weight": 3.0},
    }
    loop = loop_of(run_of("run", learner))
    own, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    embedded = own(own.read(batch))
    torch.manual_seed(0)
    loss, figures = own.loss(embedded, batch, loop.data)

    relevant = loop.data.relevant(batch.query_facts, batch.document_facts)
    torch.manual_seed(0)
    anchors = drawn(relevant, slice(0, 8)).tolist()
    similarity = (embedded["query_pooled"] @ embedded["document_pooled"].T).tolist()
    pairs = [(q, d, 1.0) for q, d in anchors]
    for q, d in anchors:
        wrong = [b for b in range(8) if not relevant[q, b]]
        pairs += [(q, b, 0.0) for b in sorted(wrong, key=lambda b: -similarity[q][b])[:2]]
        wrong = [a for a in range(8) if not relevant[a, d]]
        pairs += [(a, d, 0.0) for a in sorted(wrong, key=lambda a: -similarity[a][d])[:2]]
    itm, distilled = [], []
    for q, d, match in pairs:
        s, t = (
            edje.joint.scores([batch.queries[q]], *(embedded[f"{n}{k}"][d : d + 1] for k in kept))
            for (n, edje), kept in ((pair, ("tokens", "tokens_mask")) for pair in own._of.items())
        )
        p_s, p_t = (1 / (1 + math.exp(-logit.item())) for logit in (s, t))
        itm.append(-math.log(p_s if match else 1 - p_s))
        distilled.append(-(p_t * math.log(p_s) + (1 - p_t) * math.log(1 - p_s)))
    assert figures["itm"] == pytest.approx(sum(itm) / len(itm), abs=1e-4)
    expected = sum(distilled) / len(distilled)
    assert figures["distillation"] == pytest.approx(expected, abs=1e-4)

    made = own.edje.joint.recovered(texts_of(embedded)).double().tolist()
    wanted = embedded["query_pooled"].double().tolist()
    cosines = [
        sum(a * b for a, b in zip(f, g, strict=True)) / math.hypot(*f) / math.hypot(*g)
        for f, g in zip(made, wanted, strict=True)
    ]
    assert figures["recovery"] == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-5)
    total = 0.5 * figures["itm"] + 0.25 * figures["mlm"] + 2 * figures["recovery"]
    assert loss.item() == pytest.approx(total + 3 * figures["distillation"], abs=1e-5)


def test_masked_words_are_read_with_the_tokens_of_their_item(run_of):
    """Against the model's own head, one text at a time, for the words that were masked."""
    loop = loop_of(run_of("run"))
    own, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    embedded = own(own.read(batch))
    positives = torch.tensor([[0, 0], [3, 5]])
    torch.manual_seed(1)
    losses = own._masked_words(embedded, positives)
    torch.manual_seed(1)
    joint, expected = own.edje.joint, []
    texts = texts_of(embedded).take(positives[:, 0])
    is_masked = (torch.rand(texts.ids.shape) < 0.5) & texts.is_word
    assert 0 < is_masked.sum() < texts.is_word.sum()
    for row, (_, document) in enumerate(positives.tolist()):
        length = int(texts.mask[row].sum())
        ids = texts.ids[row : row + 1, :length]
        hidden = ids.masked_fill(is_masked[row, :length], joint.mask_id)
        item = [embedded[name][document : document + 1] for name in ("tokens", "tokens_mask")]
        states = joint.states(joint.words(hidden), torch.ones_like(ids).bool(), *item)[0]
        logits = joint.word_logits(states).double().log_softmax(dim=1)
        places = is_masked[row, :length].nonzero().flatten().tolist()
        expected += [-logits[place, ids[0, place]].item() for place in places]
    assert losses.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("kind", "precision"), [("compressed", "bfloat16"), ("local", "float32")])
def test_the_loss_falls_and_what_was_trained_reranks(run_of, tmp_path, kind, precision):
    data = {"name": "shapes", "num_scenes": 8, "fresh": False, "captions": 1, "held_out": 8}
    spec = run_of(
        "run",
        {
            "adapter": {**ADAPTER, "kind": kind},
            "states": str(tmp_path / "states"),
            "mlm": 0.1,
            "recovery": 0.1,
        },
        data=data,
        epochs=100,
        precision=precision,
        evaluate_every=100,
        checkpoint_every=100,
        optimiser={"learning_rate": 3e-3, "warmup": 0.1, "clip": 1.0},
    )
    trained(spec)
    for name in ("loss", "itm", "mlm", "recovery"):
        values = logged(tmp_path / "run", name)
        assert sum(values[-5:]) < 0.9 * sum(values[:5]), name
    for name in ("R@1", "item to text R@1", "first stage R@1", "first stage item to text nDCG@10"):
        assert len(logged(tmp_path / "run", name)) == 2
    for name in ("first stage R@1", "first stage item to text nDCG@10"):  # it is frozen
        first, last = logged(tmp_path / "run", name)
        assert first == last

    # On what it was trained on matches have the higher scores.
    loop = loop_of(spec)
    batch = next(loop.data.batches(0, 0, 0, 1))
    model = tmp_path / "run" / "model"
    states = loop.learner._frozen(batch.documents)
    tokens, mask = load_adapter(model).cached(states)
    assert tokens.dtype == torch.float16
    every = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    scores = load_joint(model).scores(batch.queries, tokens, mask, every).reshape(8, 8)
    relevant = loop.data.relevant(batch.query_facts, batch.document_facts)
    assert scores[relevant].mean() > scores[~relevant].mean() + 0.5
    about = json.loads((model / "training.json").read_text("utf-8"))
    assert about["spec"] == config.dump(spec) and "adapter.safetensors" in about["sha256"]


def test_kept_states_give_what_the_encoder_gives(run_of, tmp_path, monkeypatch):
    run = trained(run_of("run", evaluate_every=3))
    states = {"states": str(tmp_path / "states"), "states_dtype": "float32"}
    kept = trained(run_of("kept", states, evaluate_every=3))
    assert_same(run, kept, atol=1e-4)
    from pipeline.encoders.dual import Dual

    monkeypatch.setattr(Dual, "_embed", lambda *_: pytest.fail("the encoder ran again"))
    assert_same(kept, trained(run_of("again", states, evaluate_every=3)), atol=0)


def test_pairs_and_documents_in_parts_give_the_gradients_of_all(run_of):
    gradients = {}
    for name, learner, more in (
        ("whole", {}, {}),
        ("pairs", {"pairs_at_once": 5}, {}),
        ("parts", {}, {"part_size": 3}),
    ):
        loop = loop_of(run_of(name, learner, **more))
        batch = next(loop.data.batches(0, 0, 0, 1))
        torch.manual_seed(0)
        loop._backward(batch, loop.learner.read(batch), is_last=True)
        gradients[name] = {n: p.grad for n, p in loop.learner.named_parameters()}
    assert all(grad is not None for grad in gradients["whole"].values())
    for name in ("pairs", "parts"):
        assert_same(gradients["whole"], gradients[name], atol=1e-5)


@pytest.mark.heavy
def test_two_workers_learn_what_one_does(run_of, tmp_path):
    """Negatives are those of both; what is drawn at random is left out."""
    learner = {"negatives": "top", "mlm": 0}
    trained(run_of("one", learner))
    run_workers(run_of("two", learner), tmp_path, 2)
    for name in ("loss", "itm", "recovery"):
        one, two = (logged(tmp_path / run, name) for run in ("one", "two"))
        assert one == pytest.approx(two, abs=1e-5)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_stopped_ends_as_an_unbroken_one(run_of, stop, monkeypatch):
    whole, steps = trained(run_of("whole")), []

    def breaking(self, batches):
        if len(steps) == stop:
            raise KeyboardInterrupt
        steps.append(self.step)
        return step(self, batches)

    step = Loop._step
    monkeypatch.setattr(Loop, "_step", breaking)
    with pytest.raises(KeyboardInterrupt):
        trained(run_of("broken"))
    monkeypatch.setattr(Loop, "_step", step)
    assert_same(whole, trained(run_of("broken")), atol=0)


@pytest.mark.parametrize("off", ["itm", "mlm", "recovery"])
def test_a_loss_may_be_off(run_of, tmp_path, off):
    learner = {off: 0}
    if off == "itm":
        trained(run_of("teacher", max_steps=1))
        learner["distillation"] = {"teacher": str(tmp_path / "teacher" / "model")}
    trained(run_of("run", learner))
    first = logged(tmp_path / "run", "loss")[0]
    names = {"itm", "mlm", "recovery", "distillation"} - {off}
    parts = [logged(tmp_path / "run", name)[:1] for name in sorted(names)]
    assert first == pytest.approx(sum(sum(part) for part in parts), abs=1e-5)


def test_fine_tuning_begins_where_training_ended(run_of, tmp_path):
    trained(run_of("first", {"adapter": {**ADAPTER, "kind": "local"}}))
    start = str(tmp_path / "first" / "model")
    spec = run_of("second", {"start": start, "adapter": None, "joint": None})
    check(spec)
    learner = loop_of(spec).learner
    assert learner.edje.adapter.spec.kind == "local"
    learner.save(tmp_path / "untouched")
    assert_same(weights_of(Path(start)), weights_of(tmp_path / "untouched"), atol=0)
    after = trained(spec)
    before = weights_of(Path(start))
    moved = {name for name in before if (before[name] != after[name]).any()}
    assert {
        "match.weight",
        "recover.weight",
        "0.weight" if "0.weight" in before else "mlp.0.weight",
    } <= moved


def test_a_student_comes_closer_to_its_teacher(run_of, tmp_path):
    trained(run_of("teacher", {"adapter": {**ADAPTER, "kind": "local"}}, seed=1))
    distillation = {"teacher": str(tmp_path / "teacher" / "model"), "weight": 5.0}
    off = {"itm": 0, "mlm": 0, "recovery": 0}
    loop = loop_of(run_of("student", {**off, "distillation": distillation}))
    own, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    with torch.no_grad():  # a teacher with something to say
        own._of[TEACHER].joint.match.weight.mul_(5)
        own._of[TEACHER].joint.match.bias.fill_(2.0)
    read = own.read(batch)

    def distance() -> float:
        with torch.no_grad():
            embedded = own(read)
            pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
            student, teacher = (
                own._logits(edje, embedded, pairs, name) for name, edje in own._of.items()
            )
        return (student - teacher).abs().mean().item()

    before = distance()
    frozen = [p.clone() for p in own._of[TEACHER].parameters()]
    for _ in range(8):
        loop._step([(batch, read)])
    assert distance() < 0.9 * before
    for weights, kept in zip(own._of[TEACHER].parameters(), frozen, strict=True):
        assert (weights == kept).all()


def test_a_batch_without_a_positive_changes_nothing_and_stops_nothing(run_of):
    loop = loop_of(run_of("run", {"recovery": 0}, optimiser={"weight_decay": 0.0}))
    batch = next(loop.data.batches(0, 0, 0, 1))
    nothing = dataclasses.replace(batch, document_facts=torch.full_like(batch.document_facts, -1))
    loop.data.relevant = lambda q, d: torch.zeros(len(q), len(d), dtype=torch.bool)
    figures = loop._step([(nothing, loop.learner.read(nothing))])
    assert figures["loss"] == 0 and figures["gradient_norm"] == 0


def test_late_interaction_may_choose(run_of, tmp_path):
    trained(run_of("run", {"first_stage": "late"}, evaluate_every=6))
    single = trained(run_of("single", evaluate_every=6))
    assert logged(tmp_path / "run", "first stage R@1")[0] >= 0
    assert (weights_of(tmp_path / "run" / "model")["match.weight"] != single["match.weight"]).any()


def test_each_of_several_captions_of_a_scene_has_a_pair(run_of):
    data = {"name": "shapes", "num_scenes": 24, "captions": 4, "held_out": 12}
    loop = loop_of(run_of("run", data=data))
    own, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    relevant = loop.data.relevant(batch.query_facts, batch.document_facts)
    anchors = drawn(relevant, slice(0, 32))
    assert anchors[:, 0].tolist() == list(range(32))
    assert relevant[anchors[:, 0], anchors[:, 1]].all()
    similarity = own.similarity(own(own.read(batch)))
    pairs, is_match = own._pairs(similarity, ~relevant, anchors)
    assert (relevant[pairs[:, 0], pairs[:, 1]] == is_match).all()
    assert len(pairs) == 32 * 7


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"itm": 0}, "learner.itm: 0 .* or a distillation"),
        ({"mlm": -1}, "learner.mlm: -1"),
        ({"start": "nowhere"}, "learner.adapter: .* null, where `start` has one"),
        ({"start": "nowhere", "adapter": None, "joint": None}, "learner.start: .*nowhere.* has no"),
        ({"distillation": {"teacher": "nowhere"}}, "learner.distillation.teacher: .* has no"),
        ({"joint": {"model": "nowhere/at all"}}, "learner.joint.model: .* is not a folder"),
        ({"encoder": {"name": "dual", "model": "x y"}}, "learner.encoder.model: 'x y'"),
        ({"adapter": {"num_tokens": 64, "max_tokens": 32}}, "learner.adapter.max_tokens: 32"),
    ],
)
def test_what_cannot_be_trained_is_said_before(run_of, learner, said):
    with pytest.raises(SpecError, match=said):
        check(run_of("run", learner))


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"encoder": {"name": "minilm", "pooling": "none"}}, "learner.first_stage: .* late"),
        (
            {"encoder": {"name": "minilm", "pooling": "none"}, "first_stage": "late"},
            "learner.recovery: 1.0 .* 0",
        ),
        ({"adapter": {**ADAPTER, "heads": 3}}, "adapter.heads: 3 .* divides 32"),
        ({"joint": {"model": "bundled", "max_text_tokens": 513}}, "joint.max_text_tokens: 513"),
    ],
)
def test_what_does_not_fit_is_said_when_it_is_built(run_of, learner, said):
    with pytest.raises(SpecError, match=said):
        Loop(run_of("run", learner), say=print)


def test_a_teacher_of_another_encoder_is_refused(run_of, checkpoint, tmp_path):
    trained(run_of("run", max_steps=1))
    own = {"distillation": {"teacher": str(tmp_path / "run" / "model")}}
    other = {"name": "dual", "model": checkpoint("clip"), "dtype": "float32"}
    with pytest.raises(SpecError, match=r"distillation.teacher: .* is of another encoder"):
        Loop(run_of("other", {**own, "encoder": other}), say=print)


@pytest.mark.parametrize(("name", "num_negatives"), [("edje", 3), ("shapes_edje", 1)])
def test_the_shipped_specs_can_be_read(name, num_negatives):
    from pipeline.train.study import StudySpec

    path = ROOT / "jobs" / "specs" / "training" / f"{name}.yaml"
    spec = config.load(StudySpec, str(path))
    learner = spec.learner
    assert learner.name == "edje" and learner.num_negatives == num_negatives and learner.pool == 10
    assert learner.masked == 0.5 and learner.negatives == "sampled"
    assert spec.optimiser.weight_decay == 0.05


def test_the_small_language_model_is_the_same_by_seed_and_knows_all_words(tmp_path):
    from pipeline.rerank.joint import JointEncoder
    from pipeline.train.shapes_data import held_out

    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        tiny.bert(tmp_path / name, seed)
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two", "three")]
    assert weights[0] == weights[1] != weights[2]
    joint = JointEncoder(JointEncoder.Spec(model=str(tmp_path / "one"), max_text_tokens=24), 4)
    read = joint.read(held_out(50)[1].texts)
    assert not (read.ids == joint.tokenizer.unk_token_id).any() and not read.num_cut.any()
    assert joint.language.config.num_hidden_layers == 2 and joint.dim == 128
