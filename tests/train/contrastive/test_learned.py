"""Training of appended tokens and of the parameters of compressors (AGC paper)."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.encoders.trained import MODULE, SUBFOLDER, TOKENS
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.taps import average_layers, single_layer_taps
from pipeline.train.loop import Loop, check
from pipeline.train.spec import TrainSpec
from tests.train.data.files import write_lines
from tests.train.runs import assert_same, logged, run_workers, spec_of

AGC = {"compressor": {"name": "agc", "num_vectors": 3}, "num_appended_tokens": 4}
MEMTOK = {"compressor": {"name": "memtok", "num_vectors": 4}, "num_appended_tokens": 4}
SEQRESIZE = {
    "compressor": {
        "name": "seqresize",
        "num_vectors": 3,
        "sequence_length": 12,
        "hidden_size": 8,
    }
}
METHODS = {"agc": AGC, "memtok": MEMTOK, "seqresize": SEQRESIZE}
TOKEN_RUN = {"trainable": "tokens"}
LORA = {"trainable": "lora", "lora": {"rank": 2, "alpha": 4}}


def run(spec) -> dict[str, torch.Tensor]:
    """Trains, and returns all weights of the trained model."""
    Loop(spec, say=lambda line: None).run()
    return all_weights(Path(spec.output) / "model")


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all weights of a trained model, with the names of their files."""
    return {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def trained_encoder(spec, folder: Path) -> Any:
    """Returns the encoder with the weights of a run."""
    field = {"all": "model", "lora": "adapter", "tokens": "projection", "projection": "projection"}
    fields = {field[spec.learner.trainable]: str(folder)}
    if (folder / SUBFOLDER / TOKENS).exists():
        fields["appended_tokens"] = str(folder)
    return ENCODERS.build(ENCODERS.resolve({**config.dump(spec.learner.encoder), **fields}))


def trained_compressor(spec, folder: Path) -> Any:
    """Returns the compressor with the parameters of a run."""
    artefact = None
    if (path := folder / SUBFOLDER / MODULE).exists():
        artefact = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    described = json.loads((folder / SUBFOLDER / "compressor.json").read_text("utf-8"))
    return COMPRESSORS.build(COMPRESSORS.resolve(described["compressor"]), artefact)


def compressed(encoder, compressor, items) -> Any:
    """Returns compressed documents as an index job computes them."""
    taps: tuple = ()
    if compressor.needs_taps:
        num_layers = encoder.attention(encoder.spec).num_layers
        taps = single_layer_taps(compressor.needs_taps, num_layers)
    with torch.no_grad():
        tokens = encoder.tokens(encoder.read_items(items), taps)
    for tap in compressor.needs_taps:
        tokens.taps[tap.name] = average_layers(tap, tokens.taps, num_layers)
    with torch.no_grad():
        return compressor.compress(tokens)


@pytest.mark.parametrize("trainable", [{"trainable": "all"}, LORA, TOKEN_RUN], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_trained_folder_gives_the_vectors_of_the_learner(model, tmp_path, method, trainable):
    spec = spec_of(tmp_path, model, {**METHODS[method], **trainable}, max_steps=3, eval_every=3)
    check(spec)
    loop = Loop(spec, say=lambda line: None)
    before = {name: p.detach().clone() for name, p in loop.learner.named_parameters()}
    loop.run()
    for name, parameter in loop.learner.named_parameters():
        is_changed = not torch.equal(parameter, before[name])
        is_learned = name.startswith(("appended.", "compressor_module."))
        if is_learned or trainable["trainable"] == "tokens":
            has_projection = "embedding_proj_layer" in name
            assert is_changed == (is_learned or has_projection), name
    folder = tmp_path / "model"
    assert (folder / SUBFOLDER / TOKENS).exists() == (method != "seqresize")
    assert (folder / SUBFOLDER / MODULE).exists() == (method == "seqresize")
    assert (tmp_path / "best" / SUBFOLDER).is_dir()
    batch = next(loop.data.batches(0, 0, 0, 1))
    loop.learner.eval()
    with torch.no_grad():
        expected = loop.learner(loop.learner.read(batch))
    encoder, compressor = trained_encoder(spec, folder), trained_compressor(spec, folder)
    found = compressed(encoder, compressor, batch.documents)
    assert torch.equal(found.mask, expected["document_mask"])
    atol = 1e-5 if trainable is LORA else 0  # the matrices are merged
    torch.testing.assert_close(
        found.vectors[found.mask], expected["document_vectors"][found.mask], atol=atol, rtol=0
    )
    masters = torch.load(next((tmp_path / "checkpoints").glob("*/weights.pt")), weights_only=True)
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}


def test_gradients_flow_through_the_saliency(model, tmp_path):
    """With random centroids, which do not depend on it; against a difference quotient."""
    compressor = {**AGC["compressor"], "centroids": "random"}
    learner = {**AGC, **TOKEN_RUN, "compressor": compressor}
    loop = Loop(spec_of(tmp_path, model, learner), say=lambda line: None)
    learner = loop.learner
    mini_batch = learner.read(next(loop.data.batches(0, 0, 0, 1)))
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(learner.appended.weight.shape, generator=random)

    def value():
        vectors = learner(mini_batch)["document_vectors"]
        return (vectors * torch.linspace(-1, 1, vectors.numel()).reshape(vectors.shape)).sum()

    value().backward()
    slope = (learner.appended.weight.grad * direction).sum().item()
    values, start, step = [], learner.appended.weight.detach().clone(), 1e-3
    for sign in (1, -1):
        with torch.no_grad():
            learner.appended.weight.copy_(start + sign * step * direction)
            values.append(value().item())
    quotient = (values[0] - values[1]) / (2 * step)
    assert abs(slope) > 1e-4
    assert slope == pytest.approx(quotient, rel=0.05, abs=2e-3)


def test_other_attention_statistics_are_constants(model, tmp_path):
    learner = {"compressor": {"name": "attention_clustering", "num_vectors": 3}}
    loop = Loop(spec_of(tmp_path, model, learner), say=lambda line: None)
    seen, compress = [], loop.learner.compressor.compress
    loop.learner.compressor.compress = lambda batch: seen.append(batch) or compress(batch)
    loop.learner(loop.learner.read(next(loop.data.batches(0, 0, 0, 1))))
    assert seen and not any(tap.requires_grad for tap in seen[0].taps.values())


def test_new_tokens_are_seeded_and_as_wide_as_the_embeddings(model, tmp_path):
    def tokens(seed: int) -> torch.Tensor:
        learner = {**AGC, "num_appended_tokens": 64}
        loop = Loop(spec_of(tmp_path / str(seed), model, learner, seed=seed), say=lambda _: None)
        embedding = loop.learner.encoder.embedding
        embedded = embedding(torch.arange(len(embedding.weight)))
        weight = loop.learner.appended.weight.detach()
        assert weight.std().item() == pytest.approx(embedded.std().item(), rel=0.2)
        assert any(parameter is loop.learner.appended.weight for parameter in loop.trained)
        loop.metrics.close()
        loop._lock.close()
        return weight

    first = tokens(0)
    assert torch.equal(first, tokens(0)) and not torch.equal(first, tokens(1))


@pytest.mark.parametrize(
    "learner",
    [AGC, {**MEMTOK, **TOKEN_RUN}, {**SEQRESIZE, "trainable": "projection"}],
    ids=["agc", "memtok", "seqresize"],
)
def test_resumed_run_equals_uninterrupted_run(model, tmp_path, learner, monkeypatch):
    whole = run(spec_of(tmp_path / "whole", model, learner))
    spec, step = spec_of(tmp_path / "broken", model, learner), Loop._step

    def breaking(self, batches):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, batches)

    monkeypatch.setattr(Loop, "_step", breaking)
    with pytest.raises(KeyboardInterrupt):
        run(spec)
    monkeypatch.setattr(Loop, "_step", step)
    assert_same(whole, run(spec), atol=0)


@pytest.mark.heavy
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "more", [{"mini_batch_size": 3}, {"activation_checkpointing": True}], ids=str
)
def test_memory_options_do_not_change_the_result(model, tmp_path, method, more):
    learner = METHODS[method]
    one, other = (
        run(spec_of(tmp_path / str(len(fields)), model, learner, max_steps=3, **fields))
        for fields in ({}, more)
    )
    assert_same(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("learner", "more"),
    [
        # Covered by the test of two sharded workers and by those of the losses.
        pytest.param(
            {**AGC, "positives": "all", "reduction": "sum", "temperature": 1.0},
            {},
            marks=pytest.mark.heavy,
        ),
        # Of the model, the projection is trained.
        pytest.param({**MEMTOK, **TOKEN_RUN}, {}, marks=pytest.mark.heavy),
        pytest.param({**SEQRESIZE, **TOKEN_RUN}, {"fsdp": True}, marks=pytest.mark.heavy),
        pytest.param({**AGC, **LORA}, {"fsdp": True}, marks=pytest.mark.heavy),
    ],
    ids=["agc", "memtok", "seqresize, sharded", "agc with lora, sharded"],
)
def test_two_workers_equal_one(model, tmp_path, learner, more):
    one = run(spec_of(tmp_path / "one", model, learner, **more))
    two = spec_of(tmp_path / "two", model, learner, **more)
    run_workers(two, tmp_path, 2)
    losses = [logged(tmp_path / name, "loss") for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert_same(one, all_weights(tmp_path / "two" / "model"), atol=1e-4)


def test_training_continues_from_a_trained_compressor(model, tmp_path):
    first = spec_of(tmp_path / "first", model, {**AGC, **LORA}, max_steps=2)
    weights = run(first)
    folder = str(tmp_path / "first" / "model")
    encoder = {**config.dump(first.learner.encoder), "adapter": folder, "appended_tokens": folder}
    learner = {**LORA, "compressor": AGC["compressor"], "encoder": encoder}
    second = spec_of(tmp_path / "second", model, learner, max_steps=2)
    check(second)
    loop = Loop(second, say=lambda line: None)
    name = f"{SUBFOLDER}/{TOKENS} weight"
    assert torch.equal(loop.learner.appended.weight, weights[name])
    loop.run()
    assert not torch.equal(all_weights(tmp_path / "second" / "model")[name], weights[name])
    memtok = {**learner, "compressor": {"name": "memtok", "num_vectors": 3}}
    with pytest.raises(SpecError, match="learner.compressor.num_vectors must be 4, .*, got 3"):
        check(spec_of(tmp_path / "third", model, memtok))


def test_training_continues_from_trained_parameters(model, tmp_path):
    first = spec_of(tmp_path / "first", model, {**SEQRESIZE, **TOKEN_RUN}, max_steps=2)
    weights = run(first)
    compressor = {**SEQRESIZE["compressor"], "weights": str(tmp_path / "first" / "model")}
    learner = {**TOKEN_RUN, "compressor": compressor}
    loop = Loop(spec_of(tmp_path / "second", model, learner), say=lambda line: None)
    for name, tensor in loop.learner.compressor_module.state_dict().items():
        assert torch.equal(tensor, weights[f"{SUBFOLDER}/{MODULE} {name}"])
    compressor = {**compressor, "hidden_size": 9}
    with pytest.raises(SpecError, match="learner.compressor.hidden_size must be 8, .*, got 9"):
        check(spec_of(tmp_path / "third", model, {"compressor": compressor}))


def text_lists(folder: Path, num_ways: int = 16) -> Path:
    """Twelve queries, each with a list of scored documents that overlaps those of others."""
    words = [f"word{number}" for number in range(12)]
    texts = [" ".join(pair) for pair in itertools.permutations(words, 2)]
    rows = [
        {
            "query": f"{words[row]} {words[row - 5]}",
            "text": texts[row * 5],
            "negatives": [texts[row * 5 + 1 + step] for step in range(num_ways - 1)],
            "scores": [float((row * step) % 7) for step in range(num_ways)],
        }
        for row in range(12)
    ]
    return write_lines(folder / "lists.jsonl", rows)


def distillation_spec(folder: Path, checkpoint, **learner):
    encoder = {
        "name": "colbert",
        "model": checkpoint("colbert_modernbert"),
        "dtype": "float32",
        "projection": "identity",
        **{"query_prefix": "", "document_prefix": "", "query_length": 12, "skiplist": []},
        "custom_template": True,
    }
    fields = {
        "encoder": encoder,
        **{"reduction": "sum", "temperature": 1.0, "contrastive_weight": 0.0},
        "distillation": {"scale": 0.5},
    }
    path = folder / "lists.jsonl"
    data = {
        **{"name": "pairs", "path": str(path if path.exists() else text_lists(folder))},
        "negatives_are": "texts",
    }
    more = {"data": data, "batch_size": 6, "epochs": 3}
    return spec_of(folder / "run", "", {**fields, **learner}, **more)


def test_distillation_compares_exactly_the_listed_documents(checkpoint, tmp_path):
    loop = Loop(distillation_spec(tmp_path, checkpoint), say=lambda line: None)
    batch = next(loop.data.batches(0, 0, 0, 1))
    with torch.no_grad():
        embedded = loop.learner(loop.learner.read(batch))
        loss, _ = loop.learner.loss(embedded, batch, loop.data)
    queries, documents = (
        [
            vectors[mask].double()
            for vectors, mask in zip(
                embedded[f"{kind}_vectors"], embedded[f"{kind}_mask"], strict=True
            )
        ]
        for kind in ("query", "document")
    )
    columns = {document["text"]: row for row, document in enumerate(batch.documents)}
    rows = map(json.loads, (tmp_path / "lists.jsonl").read_text("utf-8").splitlines())
    lists = {row["query"]: row for row in rows}
    total = 0.0
    for text, query in zip(batch.queries, queries, strict=True):
        row = lists[text]
        listed = [columns[name] for name in (row["text"], *row["negatives"])]
        assert len(listed) == 16 < len(batch.documents)
        student = torch.stack([(query @ documents[d].T).amax(dim=1).sum() for d in listed])
        teacher = torch.tensor(row["scores"], dtype=torch.float64) * 0.5
        p, q = teacher.softmax(dim=0), student.softmax(dim=0)
        total += (p * (p / q).log()).sum().item()
    assert loss.item() == pytest.approx(total / len(queries), abs=1e-4)


@pytest.mark.parametrize("trainable", [{"trainable": "all"}, TOKEN_RUN], ids=str)
def test_projection_of_colbert_is_trained_with_the_model(checkpoint, tmp_path, trainable):
    """It is not a part of the transformers model."""
    dumped = config.dump(distillation_spec(tmp_path, checkpoint, **AGC, **trainable))
    dumped["learner"]["encoder"]["projection"] = None
    spec = config.parse(TrainSpec, dumped)
    loop = Loop(spec, say=lambda line: None)
    before = loop.learner.head[0].weight.detach().clone()
    loop.run()
    is_trained = not torch.equal(loop.learner.head[0].weight, before)
    assert is_trained == (trainable["trainable"] == "all")
    batch = next(loop.data.batches(0, 0, 0, 1))
    loop.learner.eval()
    with torch.no_grad():
        expected = loop.learner.tuning.tokens(loop.learner.read(batch).documents).vectors
    fields = {"appended_tokens": spec.output + "/model"}
    if is_trained:
        fields["model"] = spec.output + "/model"
    encoder = ENCODERS.build(ENCODERS.resolve({**config.dump(spec.learner.encoder), **fields}))
    with torch.no_grad():
        found = encoder.tokens(encoder.read_items(batch.documents)).vectors
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.heavy
def test_distillation_is_independent_of_the_number_of_workers(checkpoint, tmp_path):
    """Documents of a list may belong to another worker."""
    spec = distillation_spec(tmp_path, checkpoint, **AGC)
    weights = run(spec)
    losses = logged(tmp_path / "run", "loss")
    assert losses[-1] < losses[0]
    shutil.move(tmp_path / "run", tmp_path / "one")
    run_workers(spec, tmp_path, 2)
    assert logged(tmp_path / "run", "loss") == pytest.approx(losses, abs=1e-4)
    assert_same(weights, all_weights(tmp_path / "run" / "model"), atol=2e-4)


@pytest.mark.heavy
def test_tokens_train_without_a_trainable_model(tmp_path):
    """MiniLM has no projection, so that nothing is left for DDP."""
    data = {"name": "pairs", "path": str(text_lists(tmp_path)), "negatives_are": "texts"}
    learner = {**MEMTOK, **TOKEN_RUN, "encoder": {"name": "minilm"}}
    more = {"data": data, "batch_size": 4, "max_steps": 2}
    one = run(spec_of(tmp_path / "one", "", learner, **more))
    assert set(one) == {f"{SUBFOLDER}/{TOKENS} weight"}
    run_workers(spec_of(tmp_path / "two", "", learner, **more), tmp_path, 2)
    assert_same(one, all_weights(tmp_path / "two" / "model"), atol=1e-4)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (
            {**AGC, "trainable": "projection", "hidden_states_cache": "cache"},
            "learner.hidden_states_cache must be null with appended tokens, .*, got '.*cache'",
        ),
        (
            {**AGC, "trainable": "projection"},
            "learner.trainable must be one of all, lora, tokens if tokens are appended, got",
        ),
        (
            {**SEQRESIZE, "trainable": "adapter"},
            "learner.trainable must be .* with a compressor that has parameters, got 'adapter'",
        ),
        (
            {"trainable": "tokens"},
            "learner.trainable must be .* without appended tokens, got 'tokens'",
        ),
        (
            {"num_appended_tokens": 4, "encoder": {"name": "dual", "model": "SIGLIP"}},
            "learner.num_appended_tokens must be null for the encoder dual; .* colpali.*, got 4",
        ),
        (
            {**MEMTOK, "num_appended_tokens": 5},
            "learner.compressor.num_vectors must be 5, the value of learner.num_appended_tokens, "
            "got 4$",
        ),
        (
            {**AGC, "validation_compressors": ["none", MEMTOK["compressor"] | {"num_vectors": 3}]},
            r"learner.validation_compressors\[1\].num_vectors must be 4, .*, got 3$",
        ),
        (
            {**AGC, "validation_compressors": [SEQRESIZE["compressor"]]},
            r"learner.validation_compressors\[0\].name must be a compressor without parameters,"
            " got 'seqresize'",
        ),
        (
            {"compressor": {**SEQRESIZE["compressor"], "weights": "/missing"}},
            "learner.compressor.weights must be .*, got '/missing', which does not exist",
        ),
        (
            {**AGC, "score": "hybrid"},
            "learner.score must be maxsim for the encoder colpali, which has no single vector, got",
        ),
        (
            {"compressor": AGC["compressor"]},
            "learner.num_appended_tokens must be a number of tokens, .* agc",
        ),
        (
            {"compressor": {"name": "memtok"}},
            "learner.num_appended_tokens must be a number of tokens, .* memtok",
        ),
        (
            {"compressor": {**SEQRESIZE["compressor"], "sequence_length": 2}},
            "learner.compressor.sequence_length must be at least num_vectors=3, got 2",
        ),
        ({"contrastive_weight": 0}, "learner.contrastive_weight must be greater than 0 .*, got 0"),
    ],
)
def test_rejects_invalid_specs_before_loading(model, checkpoint, tmp_path, learner, message):
    if learner.get("encoder", {}).get("model") == "SIGLIP":
        learner = {**learner, "encoder": {"name": "dual", "model": checkpoint("siglip")}}
    with pytest.raises(SpecError, match=message):
        check(spec_of(tmp_path, model, learner))


def test_rejects_new_tokens_beside_trained_ones(model, tmp_path):
    encoder = {"name": "colpali", "model": model, "appended_tokens": str(tmp_path)}
    with pytest.raises(SpecError, match="num_appended_tokens must be null when encoder.appended"):
        spec_of(tmp_path, model, {**AGC, "encoder": encoder})


def test_rejects_other_folders_before_loading(model, tmp_path):
    """Also in a dry run, and before the first run of a study."""
    run(spec_of(tmp_path / "agc", model, {**AGC, **TOKEN_RUN}, max_steps=1))
    run(spec_of(tmp_path / "seqresize", model, {**SEQRESIZE, **TOKEN_RUN}, max_steps=1))
    agc, seqresize = (str(tmp_path / name / "model") for name in ("agc", "seqresize"))

    def error(compressor: dict[str, Any], **encoder: str) -> str:
        learner = {
            "compressor": compressor,
            "encoder": {"name": "colpali", "model": model, "output_tokens": "visual", **encoder},
        }
        with pytest.raises(SpecError) as caught:
            check(spec_of(tmp_path / "run", model, learner))
        return str(caught.value)

    trained = {**SEQRESIZE["compressor"], "weights": seqresize}
    assert error({**trained, "hidden_size": 9}) == (
        f"learner.compressor.hidden_size must be 8, as in {seqresize}, got 9; it cannot be changed"
        " after training"
    )
    assert error({**trained, "weights": agc}) == (
        f"learner.compressor.weights must be the folder of a trained seqresize, got '{agc}', which"
        " has a trained agc"
    )
    assert error(MEMTOK["compressor"] | {"num_vectors": 3}, appended_tokens=agc) == (
        "learner.compressor.num_vectors must be 4, the number of tokens that the encoder was"
        " trained to append, got 3; MemTok cannot change its budget after training"
    )
    assert error(AGC["compressor"], appended_tokens=seqresize).startswith(
        "learner.encoder.appended_tokens must be the folder of a trained compressor with appended"
        f" tokens, got '{seqresize}', which has no readable {TOKENS}"
    )


def test_tokens_without_the_projection_of_their_run_are_rejected(model, tmp_path):
    run(spec_of(tmp_path / "agc", model, {**AGC, **TOKEN_RUN}, max_steps=1))
    folder = str(tmp_path / "agc" / "model")
    encoder = {"name": "colpali", "model": model, "dtype": "float32", "appended_tokens": folder}
    spec = spec_of(tmp_path / "run", model, {"compressor": AGC["compressor"], "encoder": encoder})
    with pytest.raises(SpecError) as caught:
        Loop(spec, say=lambda line: None)
    assert str(caught.value).endswith(
        "which was trained with other weights; the encoder must load the model, adapter and"
        " projection of the same run"
    )


def test_non_finite_vectors_end_an_evaluation(model, tmp_path):
    """Their assignments to vectors are undefined."""
    loop = Loop(spec_of(tmp_path, model, AGC, eval_every=1), say=lambda line: None)
    assert loop.learner.appended is not None
    torch.nn.init.constant_(loop.learner.appended.weight, torch.nan)
    rule = "^step 0: validation: non-finite vectors or attention of documents; no checkpoint was"
    with pytest.raises(JobError, match=rule):
        loop.run()
