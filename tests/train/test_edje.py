"""EDJE's training: the losses of a batch, the loop, starting points, teachers, quality."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import SiglipConfig, SiglipModel, SiglipProcessor

from examples.papers.studies.study import StudySpec, runs_of
from examples.papers.synthetic import SHAPES
from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.edje.model import load_adapter, load_joint
from pipeline.index.reader import IndexReader
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.tokens import unit_vectors
from pipeline.train.edje import (
    DEFAULT_TEMPERATURE,
    TEACHER,
    EdjeLearner,
    sample_positives,
    texts_of,
)
from pipeline.train.loop import Loop, check
from pipeline.train.losses import late_scores
from pipeline.train.spec import TrainSpec
from tests.bench import rerank
from tests.conftest import ROOT
from tests.encoders.edje.models import language_model
from tests.images import index_captioned, noise, png
from tests.tiny import untrained as tiny
from tests.train.runs import assert_same, logged, run_workers, spec_of, trained, weights_of

ADAPTER = {"num_tokens": 3, "hidden": 24, "heads": 2}
LATE = {"first_stage": "maxsim"}


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
        models = {"adapter": ADAPTER, "joint": {"model": bert, "max_text_tokens": 24}}
        models |= {"name": "edje", "encoder": towers, "rerank_depth": 4, **(learner or {})}
        data = {
            "class": SHAPES,
            "num_scenes": 24,
            "captions": 1,
            "validation": 12,
        }
        fields = {"data": {**data, "fresh": False}, **more}
        spec = spec_of(tmp_path / name, "", **fields)
        given = {**config.dump(spec), "learner": models}
        return config.parse(type(spec), given)

    return of


def cosine(f: list[float], g: list[float]) -> float:
    return sum(a * b for a, b in zip(f, g, strict=True)) / math.hypot(*f) / math.hypot(*g)


def loop_of(spec) -> Loop:
    loop = Loop(spec, say=lambda line: None)
    loop.learner.prepare(loop.data)
    return loop


def test_loss_equals_the_equations(run_of, tmp_path):
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
    learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    embedded = learner(learner.read(batch))
    torch.manual_seed(0)
    loss, figures = learner.loss(embedded, batch, loop.data)

    relevant = loop.data.relevant(batch.query_labels, batch.document_labels)
    torch.manual_seed(0)
    anchors = sample_positives(relevant, slice(0, 8)).tolist()
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
            edje.joint.scores([batch.queries[q]], *(embedded[f"{n}{k}"][d : d + 1] for k in keys))
            for (n, edje), keys in (
                (pair, ("tokens", "tokens_mask")) for pair in learner._of.items()
            )
        )
        p_s, p_t = (1 / (1 + math.exp(-logit.item())) for logit in (s, t))
        itm.append(-math.log(p_s if match else 1 - p_s))
        distilled.append(-(p_t * math.log(p_s) + (1 - p_t) * math.log(1 - p_s)))
    assert figures["itm"] == pytest.approx(sum(itm) / len(itm), abs=1e-4)
    expected = sum(distilled) / len(distilled)
    assert figures["distillation"] == pytest.approx(expected, abs=1e-4)

    made = (
        learner.edje.joint.text_embeddings(learner.edje.joint.text_states(texts_of(embedded)))
        .double()
        .tolist()
    )
    wanted = embedded["query_pooled"].double().tolist()
    cosines = [cosine(f, g) for f, g in zip(made, wanted, strict=True)]
    assert figures["recovery"] == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-5)
    total = 0.5 * figures["itm"] + 0.25 * figures["mlm"] + 2 * figures["recovery"]
    assert loss.item() == pytest.approx(total + 3 * figures["distillation"], abs=1e-5)


def test_masked_words_attend_to_their_item(run_of):
    """Compares with the model's own head, one text at a time, for the words that were masked."""
    loop = loop_of(run_of("run"))
    learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    embedded = learner(learner.read(batch))
    positives = torch.tensor([[0, 0], [3, 5]])
    torch.manual_seed(1)
    losses = learner._masked_words(embedded, positives)
    torch.manual_seed(1)
    joint, expected = learner.edje.joint, []
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


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "precision"), [("compressed", "bfloat16"), ("local", "float32")])
def test_loss_decreases_and_trained_model_reranks(run_of, tmp_path, kind, precision):
    data = {
        "class": SHAPES,
        "num_scenes": 8,
        "fresh": False,
        "captions": 1,
        "validation": 8,
    }
    spec = run_of(
        "run",
        {
            "adapter": {**ADAPTER, "kind": kind},
            "hidden_states_cache": str(tmp_path / "states"),
            "mlm": 0.1,
            "recovery": 0.1,
        },
        data=data,
        epochs=100,
        precision=precision,
        eval_every=100,
        checkpoint_every=100,
        optimiser={"learning_rate": 3e-3, "warmup_ratio": 0.1, "max_grad_norm": 1.0},
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
    states = loop.learner.frozen.states(batch.documents)
    tokens, mask = load_adapter(model).cache_tokens(states)
    assert tokens.dtype == torch.float16
    all_pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    scores = load_joint(model).scores(batch.queries, tokens, mask, all_pairs).reshape(8, 8)
    relevant = loop.data.relevant(batch.query_labels, batch.document_labels)
    assert scores[relevant].mean() > scores[~relevant].mean() + 0.5
    metadata = json.loads((model / "training.json").read_text("utf-8"))
    assert metadata["spec"] == config.dump(spec) and "adapter.safetensors" in metadata["sha256"]


def test_cached_hidden_states_equal_those_of_the_encoder(run_of, tmp_path, monkeypatch):
    run = trained(run_of("run", eval_every=3))
    states = {"hidden_states_cache": str(tmp_path / "states"), "hidden_states_dtype": "float32"}
    cached = trained(run_of("cached", states, eval_every=3))
    assert_same(run, cached, atol=1e-4)
    from pipeline.encoders.dual import Dual

    monkeypatch.setattr(Dual, "_embed", lambda *_: pytest.fail("the encoder ran again"))
    assert_same(cached, trained(run_of("again", states, eval_every=3)), atol=0)


def test_mini_batches_give_the_gradients_of_the_batch(run_of):
    gradients = {}
    for name, learner, more in (
        ("whole", {}, {}),
        ("pairs", {"pair_mini_batch_size": 5}, {}),
        ("parts", {}, {"mini_batch_size": 3}),
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
def test_two_workers_equal_one(run_of, tmp_path):
    """Negatives are those of both; what is drawn at random is left out."""
    learner = {"negatives": "top", "mlm": 0}
    trained(run_of("one", learner))
    run_workers(run_of("two", learner), tmp_path, 2)
    for name in ("loss", "itm", "recovery"):
        one, two = (logged(tmp_path / run, name) for run in ("one", "two"))
        assert one == pytest.approx(two, abs=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_run_equals_uninterrupted_run(run_of, stop, monkeypatch):
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


def test_contrastive_loss_equals_its_equation(run_of):
    """Number by number, from the states of texts alone and the tokens on."""
    learner = {"contrast": 0.5, "contrast_temperature": 0.2, "itm": 0, "mlm": 0, "recovery": 0}
    data = {
        "class": SHAPES,
        "num_scenes": 24,
        "captions": 2,
        "validation": 12,
        "single": [1, 1],
    }
    loop = loop_of(run_of("run", learner, data=data))
    learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    embedded = learner(learner.read(batch))
    loss, figures = learner.loss(embedded, batch, loop.data)
    assert figures.keys() == {"contrast"}

    relevant = loop.data.relevant(batch.query_labels, batch.document_labels)
    assert (relevant.sum(dim=1) > 1).any()  # of several that are relevant the sum counts
    texts = texts_of(embedded)
    states = learner.edje.joint.text_states(texts)
    losses = []
    for q in range(16):
        words = states[q, texts.is_word[q]].double().tolist()
        chances = []
        for b in range(8):
            tokens = embedded["tokens"][b].double().tolist()
            score = sum(max(cosine(w, y) for y in tokens) for w in words) / len(words)
            chances.append(math.exp(score / 0.2))
        right = sum(c for c, r in zip(chances, relevant[q].tolist(), strict=True) if r)
        losses.append(-math.log(right / sum(chances)))
    assert figures["contrast"] == pytest.approx(sum(losses) / 16, abs=1e-4)
    assert loss.item() == pytest.approx(figures["contrast"] / 2, abs=1e-6)
    loss.backward()
    trained = {name: p for name, p in learner.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    assert not any("match" in name or "recover" in name for name in trained)


@pytest.mark.parametrize("off", ["itm", "mlm", "recovery"])
def test_disabled_losses(run_of, tmp_path, off):
    learner = {off: 0}
    if off == "itm":
        trained(run_of("teacher", max_steps=1))
        learner["distillation"] = {"teacher": str(tmp_path / "teacher" / "model")}
    trained(run_of("run", learner))
    first = logged(tmp_path / "run", "loss")[0]
    names = {"itm", "mlm", "recovery", "distillation"} - {off}
    parts = [logged(tmp_path / "run", name)[:1] for name in sorted(names)]
    assert first == pytest.approx(sum(sum(part) for part in parts), abs=1e-5)


def test_mini_batched_steps_sample_new_negatives(run_of):
    """Negatives and masked words are not those of the step before."""
    loop, states = loop_of(run_of("run", mini_batch_size=3)), []
    honest, batch = loop.learner.loss, next(loop.data.batches(0, 0, 0, 1))
    loop.learner.loss = lambda *given: states.append(torch.get_rng_state()) or honest(*given)
    for _ in range(2):
        loop._backward(batch, loop.learner.read(batch), is_last=True)
    assert not torch.equal(*states)


def test_fine_tuning_starts_from_trained_weights(run_of, tmp_path):
    trained(run_of("first", {"adapter": {**ADAPTER, "kind": "local"}}))
    start = str(tmp_path / "first" / "model")
    spec = run_of("second", {"init_from": start, "adapter": None, "joint": None})
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


@pytest.mark.heavy
def test_bench_reports_a_study_of_tokens(run_of, tmp_path):
    given = config.dump(run_of("study", max_steps=1, eval_every=1))
    small, local = ADAPTER, {**ADAPTER, "kind": "local"}
    given["sweep"] = {"learner.adapter": [small, local], "seed": [0, 1]}
    study = config.parse(StudySpec, given)
    runs = runs_of(study)
    (tmp_path / "study.yaml").write_text(config.dump_yaml(study), "utf-8")
    path, record, plot = (str(tmp_path / name) for name in ("study.yaml", "out.json", "out.png"))
    few = ["--calls", "2", "--rerank-depth", "3", "5", "--text-tokens", "6", "--out", record]
    with pytest.raises(SpecError, match="study must be .*has no trained EDJE"):
        rerank.main(["--study", path])
    with pytest.raises(SpecError, match="plot must be used with --study, got "):
        rerank.main(["--plot", plot])
    for run in runs[:3]:  # the last one has not been run
        trained(run.spec)
    with pytest.raises(
        SpecError, match="field 'tokens' is required; it must be the number of tokens per item"
    ):
        rerank.main(["--study", path])
    rerank.main(["--study", path, "--tokens", "16", *few, "--plot", plot])
    figures = json.loads(Path(record).read_text("utf-8"))["figures"]["study"]
    of_small, of_local = (figures[name] for name in (runs[0].row, runs[2].row))
    assert (of_small["tokens"], of_local["tokens"]) == (3, 16)
    assert (of_small["seeds"], of_local["seeds"]) == (2, 1)
    joint = load_joint(Path(runs[0].spec.output) / "model")
    assert of_small["bytes"] == 3 * joint.dim * 2
    finals = [logged(Path(run.spec.output), "R@1")[-1] for run in runs[:2]]
    assert of_small["R@1"]["mean"] == pytest.approx(sum(finals) / 2)
    firsts = logged(Path(runs[0].spec.output), "first stage R@1")
    assert of_small["first stage R@1"] == pytest.approx(firsts[-1])
    assert [len(times) for times in of_local["milliseconds"].values()] == [2, 2]
    assert Image.open(plot).width > 500


def test_distillation_moves_student_towards_teacher(run_of, tmp_path):
    trained(run_of("teacher", {"adapter": {**ADAPTER, "kind": "local"}}, seed=1))
    distillation = {"teacher": str(tmp_path / "teacher" / "model"), "weight": 5.0}
    off = {"itm": 0, "mlm": 0, "recovery": 0}
    loop = loop_of(run_of("student", {**off, "distillation": distillation}))
    learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    with torch.no_grad():  # a teacher with something to say
        learner._of[TEACHER].joint.match.weight.mul_(5)
        learner._of[TEACHER].joint.match.bias.fill_(2.0)
    read = learner.read(batch)

    def distance() -> float:
        with torch.no_grad():
            embedded = learner(read)
            pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
            student, teacher = (
                learner._logits(edje, embedded, pairs, name) for name, edje in learner._of.items()
            )
        return (student - teacher).abs().mean().item()

    before = distance()
    frozen = [p.clone() for p in learner._of[TEACHER].parameters()]
    for _ in range(8):
        loop._step([(batch, read)])
    assert distance() < 0.9 * before
    for weights, initial in zip(learner._of[TEACHER].parameters(), frozen, strict=True):
        assert (weights == initial).all()


def test_batch_without_positives_has_zero_gradients(run_of):
    loop = loop_of(run_of("run", {"recovery": 0}, optimiser={"weight_decay": 0.0}))
    batch = next(loop.data.batches(0, 0, 0, 1))
    nothing = dataclasses.replace(batch, document_labels=torch.full_like(batch.document_labels, -1))
    loop.data.relevant = lambda q, d: torch.zeros(len(q), len(d), dtype=torch.bool)
    figures = loop._step([(nothing, loop.learner.read(nothing))])
    assert figures["loss"] == 0 and figures["gradient_norm"] == 0


def test_first_stage_with_late_interaction(run_of, tmp_path):
    trained(run_of("run", {"first_stage": "maxsim"}, eval_every=6))
    single = trained(run_of("single", eval_every=6))
    assert logged(tmp_path / "run", "first stage R@1")[0] >= 0
    assert (weights_of(tmp_path / "run" / "model")["match.weight"] != single["match.weight"]).any()


def test_first_stage_with_compressed_items(run_of):
    """In measurements, by MaxSim over what the compressor gives of the states."""
    spec = {"name": "hpool", "num_vectors": 3}
    loop = loop_of(run_of("run", {"first_stage": "maxsim", "compressor": spec}))
    learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    queries, full = learner.frozen.states(batch.queries), learner.frozen.states(batch.documents)
    few = COMPRESSORS.build(COMPRESSORS.resolve(spec)).compress(full)
    assert few.vectors.shape[1] == 3 < full.vectors.shape[1]
    for trains, items in ((True, full), (False, few)):
        learner.edje.train(trains)
        found = learner.similarity(learner(learner.read(batch)))
        vectors = unit_vectors(queries), queries.mask, unit_vectors(items), items.mask
        torch.testing.assert_close(found, late_scores(*vectors), atol=1e-5, rtol=1e-5)


def test_recovery_without_single_vectors_uses_the_mean(run_of, tmp_path):
    tiny.colpali(tmp_path / "colpali")
    encoder = {"name": "colpali", "model": str(tmp_path / "colpali"), "dtype": "float32"}
    loop = loop_of(run_of("run", {"encoder": encoder, "first_stage": "maxsim"}))
    learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    embedded = learner(learner.read(batch))
    queries = learner.frozen.states(batch.queries)
    for row, mask in enumerate(queries.mask):
        mean = queries.vectors[row, mask].mean(dim=0)
        torch.testing.assert_close(embedded["query_pooled"][row], mean / mean.norm())
    _, figures = learner.loss(embedded, batch, loop.data)
    made = learner.edje.joint.text_embeddings(learner.edje.joint.text_states(texts_of(embedded)))
    expected = 1 - torch.cosine_similarity(made, embedded["query_pooled"]).mean().item()
    assert figures["recovery"] == pytest.approx(expected, abs=1e-5)


def test_every_caption_of_a_scene_has_a_pair(run_of):
    data = {
        "class": SHAPES,
        "num_scenes": 24,
        "captions": 4,
        "validation": 12,
    }
    loop = loop_of(run_of("run", data=data))
    learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
    relevant = loop.data.relevant(batch.query_labels, batch.document_labels)
    anchors = sample_positives(relevant, slice(0, 32))
    assert anchors[:, 0].tolist() == list(range(32))
    assert relevant[anchors[:, 0], anchors[:, 1]].all()
    similarity = learner.similarity(learner(learner.read(batch)))
    pairs, is_match = learner._pairs(similarity, ~relevant, anchors)
    assert (relevant[pairs[:, 0], pairs[:, 1]] == is_match).all()
    assert len(pairs) == 32 * 7


def test_negatives_use_the_scale_of_the_encoder(run_of, towers, tmp_path):
    """Cosines of a dual encoder differ by hundredths; its trained scale spreads them."""
    folder = tmp_path / "scaled"
    model = SiglipModel.from_pretrained(towers["model"])
    with torch.no_grad():
        model.logit_scale.fill_(math.log(100))
    model.save_pretrained(folder)
    SiglipProcessor.from_pretrained(towers["model"]).save_pretrained(folder)
    data = {
        "class": SHAPES,
        "num_scenes": 64,
        "captions": 1,
        "validation": 12,
        "fresh": False,
    }

    def share_of_top_10(encoder: dict[str, Any], **learner: Any) -> float:
        """The share of the negative documents that are among the ten most similar."""
        spec = run_of("run", {**learner, "encoder": encoder}, data=data, batch_size=64)
        loop = loop_of(spec)
        learner, batch = loop.learner, next(loop.data.batches(0, 0, 0, 1))
        similarity = learner.similarity(learner(learner.read(batch)))
        similarity = 0.05 * (similarity - similarity.mean()) / similarity.std()
        relevant = loop.data.relevant(batch.query_labels, batch.document_labels)
        anchors = sample_positives(relevant, slice(0, 64))
        pairs, _ = learner._pairs(similarity, ~relevant, anchors)
        query, document = pairs[len(anchors) : 4 * len(anchors)].unbind(1)
        order = similarity.masked_fill(relevant, -torch.inf).argsort(dim=1, descending=True)
        ranks = order.argsort(dim=1)[query, document]
        return (ranks < 10).float().mean().item()

    scaled = {**towers, "model": str(folder)}
    assert share_of_top_10(towers) == share_of_top_10(scaled) == 1
    everywhere = {"negatives_top_k": 63}
    assert share_of_top_10(scaled, **everywhere) > 0.6
    assert share_of_top_10(scaled, **everywhere, negatives_temperature=0.07) < 0.35


def test_negatives_use_the_default_temperature_without_a_scale(run_of, towers):
    learner = {"first_stage": "maxsim", "encoder": {**towers, "normalise": True}}
    assert loop_of(run_of("run", learner)).learner.negatives_temperature == DEFAULT_TEMPERATURE


def test_training_stores_the_scale_of_a_dual_encoder(towers, tmp_path):
    learner = {
        "encoder": towers,
        "score": "single_vector",
        "temperature": 0.1,
        "learn_temperature": True,
    }
    trained(spec_of(tmp_path, "", learner, epochs=1))
    (scale,) = [1 / each for each in logged(tmp_path, "temperature")[-1:]]
    encoder = ENCODERS.build(ENCODERS.resolve({**towers, "model": f"{tmp_path}/model"}))
    assert encoder.logit_scale == pytest.approx(scale, rel=1e-2) and scale != 10


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"itm": 0}, "learner.itm must be greater than 0 unless distillation .*, got 0"),
        (
            {"compressor": {"name": "hpool", "num_vectors": 2}},
            "learner.first_stage must be maxsim .*, got 'single_vector'",
        ),
        (
            LATE | {"compressor": {"name": "hpc", "num_vectors": 2}},
            "compressor.name must be one of none, .*, got 'hpc'",
        ),
        (
            LATE | {"compressor": {"name": "sap", "num_vectors": 2}},
            "compressor.name must be one of none, .*, got 'sap'",
        ),
        ({"mlm": -1}, "learner.mlm must be .*, got -1"),
        ({"init_from": "nowhere"}, "learner.adapter must be null when `init_from` is set"),
        (
            {"init_from": "nowhere", "adapter": None, "joint": None},
            "learner.init_from must be .*nowhere.* does not exist",
        ),
        (
            {"distillation": {"teacher": "nowhere"}},
            "learner.distillation.teacher must be .* does not exist",
        ),
        ({"joint": {"model": "nowhere/at all"}}, "learner.joint.model must be .* is not a folder"),
        (
            {"encoder": {"name": "dual", "model": "x y"}},
            "learner.encoder.model must be .*, got 'x y'",
        ),
        (
            {"adapter": {"num_tokens": 64, "max_tokens": 32}},
            "learner.adapter.max_tokens must be at least num_tokens=64, got 32",
        ),
        ({"negatives_top_k": 2}, "learner.negatives_top_k must be at least num_negatives=3, got 2"),
    ],
)
def test_rejects_invalid_specs_before_loading(run_of, learner, message):
    with pytest.raises(SpecError, match=message):
        check(run_of("run", learner))


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"encoder": {"name": "minilm", "pooling": "none"}}, "learner.first_stage must be maxsim "),
        ({"adapter": {**ADAPTER, "heads": 3}}, "adapter.heads must be a divisor of 32, .*, got 3"),
        (
            {"joint": {"model": "bundled", "max_text_tokens": 513}},
            "joint.max_text_tokens must be .*, got 513",
        ),
    ],
)
def test_rejects_incompatible_models_when_building(run_of, learner, message):
    with pytest.raises(SpecError, match=message):
        Loop(run_of("run", learner), say=print)


def test_rejects_teacher_of_another_encoder(run_of, checkpoint, tmp_path):
    trained(run_of("run", max_steps=1))
    fields = {"distillation": {"teacher": str(tmp_path / "run" / "model")}}
    other = {"name": "dual", "model": checkpoint("clip"), "dtype": "float32"}
    with pytest.raises(SpecError, match=r"distillation.teacher must be .*was trained on another"):
        Loop(run_of("other", {**fields, "encoder": other}), say=print)


def test_shipped_spec_has_the_values_of_the_paper():
    spec = config.load(TrainSpec, str(ROOT / "jobs" / "specs" / "training" / "edje.yaml"))
    learner = spec.learner
    assert learner.name == "edje" and learner.num_negatives == 3 and learner.rerank_depth == 10
    assert (
        learner.mask_probability == 0.5 and learner.negatives == "sampled" and learner.contrast == 0
    )
    assert (learner.itm, learner.mlm, learner.recovery) == (1, 1, 1)
    assert learner.adapter.num_tokens == 64 and learner.adapter.hidden == 8192
    assert not learner.adapter.norm_states and learner.adapter.queries_std == 0.02
    assert spec.optimiser.weight_decay == 0.05 and spec.optimiser.learning_rate == 3e-4


def test_small_language_model_is_deterministic_and_covers_the_vocabulary(tmp_path):
    from examples.papers.synthetic.shapes_data import validation_scenes
    from pipeline.encoders.edje.joint import JointEncoder

    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        tiny.bert(tmp_path / name, seed)
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two", "three")]
    assert weights[0] == weights[1] != weights[2]
    joint = JointEncoder(JointEncoder.Spec(model=str(tmp_path / "one"), max_text_tokens=24), 4)
    read = joint.tokenise(validation_scenes(50)[1].texts)
    assert not (read.ids == joint.tokenizer.unk_token_id).any() and not read.num_truncated.any()
    assert joint.language.config.num_hidden_layers == 2 and joint.dim == 128
    for layer in joint.language.base_model.encoder.layer:
        assert torch.equal(layer.attention.self.query.weight, layer.attention.self.key.weight)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("shapes_edje_align", 1),
        ("shapes_edje", 1),
        ("studies/edje_align", 15),
        ("studies/edje_tokens", 15),
        ("studies/edje_losses", 9),
        ("studies/edje_distilled", 6),
    ],
)
def test_shapes_specs_build_on_each_other(name, runs):
    """Each run starts from the output of another, and all use the same scenes."""
    folder = ROOT / "examples/papers/specs/training"

    def of(name: str) -> list[TrainSpec]:
        return [run.spec for run in runs_of(config.load(StudySpec, f"{folder}/{name}.yaml"))]

    specs = of(name)
    assert len(specs) == runs
    before = {
        f"{spec.output}/model": spec
        for other in ("shapes_edje_align", "studies/edje_align", "studies/edje_tokens")
        for spec in of(other)
    }
    for spec in specs:
        learner = spec.learner
        starts = [learner.init_from] if learner.init_from else []
        starts += [learner.distillation.teacher] if learner.distillation else []
        assert bool(starts) == (not name.endswith("align"))
        for start in starts:
            assert before[start].learner.encoder == learner.encoder
            assert before[start].data.series == spec.data.series == 0
            assert "studies" not in name or before[start].seed == spec.seed


def test_encoder_of_an_index(cluster, run_of, towers, tmp_path):
    """The encoder and the first stage are those of the index; stored specs do not name it."""
    photos = {f"{seed}.png": png(noise(40, 40, seed)) for seed in range(2)}
    uri = index_captioned(tmp_path / "photos", towers, photos)
    spec = run_of("run", {"encoder": None, "index": uri})
    assert spec.learner.index is None and spec.learner.encoder.model == towers["model"]
    assert spec.learner.first_stage == "single_vector"
    assert config.parse(type(spec), config.dump(spec)) == spec
    learner = EdjeLearner(spec.learner)
    stored = next(iter(IndexReader(uri).representations().values()))
    assert learner.edje.vision["fingerprint"] == stored.encoder.fingerprint
    with pytest.raises(SpecError, match="^learner.encoder must be null if index is set"):
        run_of("run", {"index": uri})
    with pytest.raises(SpecError, match="^learner.index must be"):
        run_of("run", {"encoder": None, "index": str(tmp_path / "none")})
