"""Gradients through compressors, objects of boxes, projections on cached hidden states."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from examples.papers.synthetic import BINDING, SHAPES
from pipeline import config
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.tokens import TokenBatch, normalise
from pipeline.train.compressors import with_objects
from pipeline.train.data.quality import ranking
from pipeline.train.loop import Loop, check
from tests.train.runs import assert_same, logged, spec_of, trained, weights_of


def grid_batch(seed: int, compressor) -> TokenBatch:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randn(3, 16, 6, generator=random)
    y, x = torch.meshgrid(torch.arange(4) / 4, torch.arange(4) / 4, indexing="ij")
    boxes = torch.stack([x, y, x + 0.25, y + 0.25], dim=-1).reshape(1, 16, 4).expand(3, 16, 4)
    extents = torch.cat([boxes, torch.full((3, 16, 2), torch.nan)], dim=2)
    taps = {tap.name: torch.rand(3, 16, generator=random) for tap in compressor.needs_taps}
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[1, 13:] = False
    return TokenBatch(tokens, mask, normalised=False, extents=extents, taps=taps)


#: Of SaMer's soft centroids see tests/compression/test_samer.py: the k-means that they are compared
#: with is a constant to the gradient, and moves with the tokens in a difference quotient.
TRAINABLE = [
    name
    for name in COMPRESSORS.names()
    if not COMPRESSORS.load(name).needs_fit
    and name not in ("none", "samer", "memtok", "seqresize")  # the last two have tests of their own
]
OPTIONS = [
    *((name, {}) for name in TRAINABLE),
    *(("samer", {"centroid": c}) for c in ("mean", "normalised", "medoid", "object_weighted")),
]


@pytest.mark.parametrize(("name", "more"), OPTIONS)
def test_gradients_flow_through_means_but_not_assignments(name, more):
    """Against a difference quotient that is too small to change an assignment."""
    spec = COMPRESSORS.resolve({"name": name, "num_vectors": 4, **more})
    compressor = COMPRESSORS.build(spec)
    batch = grid_batch(0, compressor)
    random = torch.Generator().manual_seed(1)
    direction = torch.randn(batch.vectors.shape, generator=random)

    def value(tokens):
        result = compressor.compress(dataclasses.replace(batch, vectors=tokens))
        weights = torch.linspace(-1, 1, result.vectors.numel()).reshape(result.vectors.shape)
        return (result.vectors * weights * result.mask.unsqueeze(2)).sum()

    tokens = batch.vectors.clone().requires_grad_()
    value(tokens).backward()
    assert tokens.grad.isfinite().all() and (tokens.grad[~batch.mask] == 0).all()
    slope = (tokens.grad * direction).sum().item()
    step = 1e-3
    above, below = (value(batch.vectors + sign * step * direction) for sign in (1, -1))
    quotient = (above - below).item() / (2 * step)
    assert abs(slope) > 1e-3
    assert slope == pytest.approx(quotient, rel=0.02, abs=0.02)


def test_boxes_label_tokens_with_objects():
    batch = grid_batch(
        0, COMPRESSORS.build(COMPRESSORS.resolve({"name": "random", "num_vectors": 2}))
    )
    boxes = [
        np.array([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.2, 0.2]]),
        np.zeros((0, 4)),
        np.ones((1, 4)),
    ]
    boxes[2][0] = [0.5, 0.5, 1.0, 1.0]
    objects = with_objects(batch, boxes).objects
    assert objects[0].reshape(4, 4).tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [0] * 4]
    assert objects[1].sum() == 0
    assert objects[2].reshape(4, 4)[2:, 2:].tolist() == [[1, 1], [1, 1]]
    with pytest.raises(
        SpecError, match=r"boxes must be \[x0, y0, x1, y1\] .*, got \[10.0, 20.0, 60.0, 90.0\]"
    ):
        with_objects(batch, [np.array([[10.0, 20.0, 60.0, 90.0]]), *boxes[1:]])


SAMER = {"name": "samer", "num_vectors": 4, "object_prior": True}


def projection_run(folder, model, states, compressor=SAMER, **more):
    return spec_of(
        folder,
        model,
        {
            "trainable": "projection",
            "hidden_states_cache": states,
            "hidden_states_dtype": "float32",
            "compressor": compressor,
        },
        data={
            "class": SHAPES,
            "num_scenes": 24,
            "fresh": False,
            "captions": 2,
            "validation": 12,
        },
        eval_every=3,
        **more,
    )


@pytest.mark.parametrize("compressor", [SAMER, {"name": "sap", "num_vectors": 4}])
def test_cached_hidden_states_equal_those_of_the_model(model, tmp_path, compressor):
    run = trained(projection_run(tmp_path / "run", model, None, compressor))
    cached = trained(
        projection_run(tmp_path / "cached", model, str(tmp_path / "states"), compressor)
    )
    assert set(run) == {"weight", "bias"}
    # Adam divides a small gradient by its own size, so that rounding errors change full steps. Six
    # steps change a weight by up to 6e-3.
    assert_same(run, cached, atol=2e-4)
    for measure in ("loss", "R@1", "BoxMass"):
        one, other = (logged(tmp_path / name, measure) for name in ("run", "cached"))
        assert one == pytest.approx(other, abs=1e-4)


def test_validation_with_other_compressors(model, tmp_path):
    """A model is evaluated with each compressor as a run with this compressor evaluates it."""
    hpool, sap = {"name": "hpool", "num_vectors": 4}, {"name": "sap", "num_vectors": 2}
    data = {
        "class": SHAPES,
        "num_scenes": 8,
        "captions": 2,
        "validation": 12,
    }
    options = {"data": data, "eval_every": 1, "max_steps": 1}
    several = {"validation_compressors": [hpool, sap]}
    trained(spec_of(tmp_path / "several", model, several, **options))
    for compressor, label in ((hpool, "hpool num_vectors 4"), (sap, "sap num_vectors 2")):
        folder = tmp_path / compressor["name"]
        trained(spec_of(folder, model, {"compressor": compressor}, **options))
        for metric in ("R@1", "nDCG@10", "CV", "Gini", "Used"):
            expected = logged(folder, metric)[0]
            found = logged(tmp_path / "several", f"{metric} ({label})")[0]
            assert found == pytest.approx(expected, abs=1e-6)


def test_frozen_model_runs_once_with_cached_hidden_states(model, tmp_path, monkeypatch):
    from pipeline.encoders.sequences import SequenceEncoder

    spec = projection_run(tmp_path / "one", model, str(tmp_path / "states"))
    trained(spec)
    monkeypatch.setattr(SequenceEncoder, "states", lambda *_: pytest.fail("the model ran again"))
    trained(projection_run(tmp_path / "two", model, str(tmp_path / "states")))
    assert_same(*(weights_of(tmp_path / name / "model") for name in ("one", "two")), atol=0)


def test_encoder_loads_a_trained_projection(model, tmp_path):
    spec = projection_run(tmp_path, model, None)
    trained(spec)
    plain = spec.learner.encoder
    named = ENCODERS.resolve({**config.dump(plain), "projection": str(tmp_path / "model")})
    ENCODERS.load("colpali").check(named)
    before, after = ENCODERS.build(plain), ENCODERS.build(named)
    assert before.fingerprint != after.fingerprint
    torch.testing.assert_close(after.projection.state_dict(), weights_of(tmp_path / "model"))
    reader = before.reader(plain)
    inputs = [[reader.read_text_query("a red star")[0]]]
    states = before.states(inputs)
    expected = normalise(after.projection(states.vectors))
    torch.testing.assert_close(after.tokens(inputs).vectors, expected, atol=1e-5, rtol=0)


def test_rejects_folder_without_projection(checkpoint, tmp_path):
    other = {"name": "colpali", "model": checkpoint("colqwen2"), "dtype": "float32"}
    wrong = ENCODERS.resolve({**other, "projection": str(tmp_path / "nowhere")})
    with pytest.raises(SpecError, match="projection must be .*nowhere.*has no projection"):
        ENCODERS.load("colpali").check(wrong)


@pytest.mark.parametrize(
    ("learner", "data", "message"),
    [
        (
            {"encoder": "sleeping"},
            {},
            "learner.encoder.name must be one of .*minilm.*, got 'sleeping'",
        ),
        (
            {"encoder": "minilm", "trainable": "projection"},
            {},
            "learner.trainable must be .*, got 'projection'",
        ),
        (
            {"compressor": {"name": "hpc", "num_vectors": 4}},
            {},
            "compressor.name must be .*, got 'hpc'",
        ),
        (
            {"hidden_states_cache": "x"},
            {},
            "learner.hidden_states_cache must be null when trainable is all",
        ),
        (
            {"trainable": "projection", "encoder": {"name": "dual", "model": "SIGLIP"}},
            {},
            "learner.trainable must be all or lora .*colpali.*, got 'projection'",
        ),
        (
            {"trainable": "projection", "score": "hybrid"},
            {},
            "learner.score must be maxsim .*, got 'hybrid'",
        ),
        ({"temperature": 0}, {}, "learner.temperature must be greater than 0, got 0"),
        (
            {},
            {"num_scenes": 4},
            "batch_size must be at most the number of examples per epoch, got 8",
        ),
    ],
)
def test_rejects_invalid_specs_before_loading(model, checkpoint, tmp_path, learner, data, message):
    if isinstance(learner.get("encoder"), dict):
        learner = {**learner, "encoder": {**learner["encoder"], "model": checkpoint("siglip")}}
    with pytest.raises(SpecError, match=message):
        check(
            spec_of(
                tmp_path,
                model,
                learner,
                data={"class": SHAPES, **data},
            )
        )


@pytest.mark.parametrize("data", [{"fresh": True}, {"single": [0.5, 0.0]}], ids=str)
def test_cached_hidden_states_require_repeating_data(model, tmp_path, data):
    learner = {"trainable": "projection", "hidden_states_cache": str(tmp_path / "states")}
    data = {
        "class": SHAPES,
        "num_scenes": 24,
        "fresh": False,
        **data,
    }
    with pytest.raises(
        SpecError,
        match="learner.hidden_states_cache must be null for data whose queries or documents differ",
    ):
        Loop(spec_of(tmp_path / "run", model, learner, data=data), say=print)


def test_ranking_equals_ir_measures():
    import ir_measures

    random = torch.Generator().manual_seed(0)
    scores, positive = (
        torch.rand(30, 50, generator=random),
        torch.rand(30, 50, generator=random) < 0.06,
    )
    found = ranking(scores, positive)
    judged = positive.any(dim=1).nonzero().flatten().tolist()
    qrels = {str(q): {str(d): 1 for d in positive[q].nonzero().flatten().tolist()} for q in judged}
    run = {str(q): {str(d): scores[q, d].item() for d in range(50)} for q in judged}
    names = {"Success@1": "R@1", "Success@5": "R@5", "Success@10": "R@10", "nDCG@10": "nDCG@10"}
    measures = [ir_measures.parse_measure(name) for name in names]
    for measured in ir_measures.iter_calc(measures, qrels, run):
        value = found[names[str(measured.measure)]][judged.index(int(measured.query_id))]
        assert value == pytest.approx(measured.value, abs=1e-6)


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_distillation_moves_student_towards_teacher(model, tmp_path, kind):
    """The teacher likes for each query what the data call irrelevant least."""
    from pipeline.train.losses import kl_divergence, margin_mse

    learner = {"distillation": {"kind": kind, "weight": 20.0}}
    loop = Loop(spec_of(tmp_path, model, learner), say=lambda line: None)
    batch = next(loop.data.batches(0, 0, 0, 1))
    random = torch.Generator().manual_seed(0)
    teacher = torch.rand(16, 8, generator=random)
    teacher[torch.rand(16, 8, generator=random) < 0.3] = torch.nan
    batch = dataclasses.replace(batch, teacher=teacher)
    read = loop.learner.read(batch)

    def distance():
        with torch.no_grad():
            embedded = loop.learner(read)
            scores = loop.learner.scores(embedded, embedded)
        if kind == "kl":
            return kl_divergence(scores, teacher, 0.1).mean().item()
        facts = batch.query_labels, batch.document_labels
        return margin_mse(scores, teacher, loop.data.relevant(*facts)).mean().item()

    before = distance()
    for _ in range(6):
        loop._step([(batch, read)])
    assert distance() < 0.9 * before


@pytest.mark.parametrize("symmetric", [False, True])
def test_degenerate_batches_have_finite_gradients(model, tmp_path, symmetric):
    loop = Loop(spec_of(tmp_path, model, {"symmetric": symmetric}), say=lambda line: None)
    batch = next(loop.data.batches(0, 0, 0, 1))
    single = dataclasses.replace(
        batch, queries=batch.queries[:1], query_labels=batch.query_labels[:1]
    )
    alone = dataclasses.replace(
        single, documents=batch.documents[:1], document_labels=batch.document_labels[:1]
    )
    # One of eight identical documents is relevant: chance level.
    alike = dataclasses.replace(batch, documents=[batch.documents[0]] * 8)
    for given, loss in ((single, None), (alone, 0.0), (alike, None if symmetric else np.log(8))):
        figures = loop._step([(given, loop.learner.read(given))])
        assert np.isfinite(figures["loss"]) and np.isfinite(figures["gradient_norm"])
        assert loss is None or figures["loss"] == pytest.approx(loss, abs=1e-4)


def test_distillation_requires_a_teacher(model, tmp_path):
    spec = spec_of(tmp_path, model, {"distillation": {}})
    with pytest.raises(
        SpecError,
        match="learner.distillation must be null for data without teacher scores, got 'kl'",
    ):
        Loop(spec, say=lambda line: None).run()


@pytest.mark.parametrize(
    ("family", "layer", "score"),
    [
        ("minilm", [-1, 1], "hybrid"),
        pytest.param("qwen3_vl", -1, "maxsim", marks=pytest.mark.heavy),
        pytest.param("minilm", -1, "maxsim", marks=pytest.mark.heavy),
        pytest.param("qwen3_vl", [-1, 1], "hybrid", marks=pytest.mark.heavy),
    ],
)
def test_adapter_trains_on_any_encoder(checkpoint, tmp_path, family, layer, score):
    encoder: dict = {"name": "minilm", "layer": layer}
    if family == "qwen3_vl":
        encoder |= {"name": "qwen_vl", "model": checkpoint(family), "dtype": "float32"}
    data = {
        "class": BINDING,
        "num_pairs": 4,
        "fresh": False,
        "queries": 2,
        "validation": 2,
    }
    data |= {"form": "text" if family == "minilm" else "rendered"}
    learner = {"encoder": encoder, "trainable": "adapter", "adapter_dim": 8, "score": score}
    learner["compressor"] = {"name": "sap", "num_vectors": 8} if score == "maxsim" else "none"
    runs = {}
    for name, states in (("run", None), ("cached", str(tmp_path / "states"))):
        fields = {**learner, "hidden_states_cache": states, "hidden_states_dtype": "float32"}
        spec = spec_of(tmp_path / name, "", fields, data=data, batch_size=4, eval_every=2, epochs=2)
        check(spec)
        runs[name] = trained(spec)
    has_layers = {"layers"} if layer != -1 else set()
    assert set(runs["run"]) == {"linear.weight", "norm.bias", "norm.weight"} | has_layers
    assert not has_layers or runs["run"]["layers"].abs().max() > 1e-4  # they were zero
    assert_same(runs["run"], runs["cached"], atol=1e-4)
    assert len(logged(tmp_path / "run", "pairwise_accuracy")) == 3
    made = {"name": "smart", "encoder": encoder, "adapter": str(tmp_path / "run" / "model")}
    smart = ENCODERS.build(ENCODERS.resolve(made))
    assert smart.encode_queries(["the code"]).tokens.vectors.shape[2] == 8
