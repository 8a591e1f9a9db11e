"""Rerankers based on Qwen-VL, compared with the model classes of transformers.

The checkpoints are tiny and random. The peers process one pair at a time without padding, with the
prompts of the model cards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pipeline import config
from pipeline.config import SpecError
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.rerankers import load_rerankers
from pipeline.search.rerankers.contents import ItemImages
from pipeline.search.rerankers.pairs import Content
from pipeline.search.searcher import open_index
from tests import media
from tests.images import index_captioned, noise, png
from tests.search.rerankers.conftest import TEXTS
from tests.tiny import checkpoints
from tests.tiny.checkpoints import QWEN3_TEXT, QWEN3_VISION, abstracts, qwen_settings, tokenizer

START, END = "<|vision_start|>", "<|vision_end|>"
WORDS = ["yes", "no", "True", "False"]
#: Limits of pixels that keep the images of the tests small: patches of 4, tokens of 8 pixels.
PIXELS = {"min_pixels": 8 * 8, "max_pixels": 32 * 32}
PHOTOS = {f"{n}.png": noise(40 + 3 * n, 30, n) for n in range(4)}
QUERIES = ["lift of a wing", "heat"]


def write(folder: Path, name: str, model_class: Any, config_class: Any, *settings: Any) -> Path:
    words = tokenizer(
        *("<|im_start|>", "<|im_end|>", START, END, "<|image_pad|>", "<|video_pad|>"),
        pad="<|endoftext|>",
        eos="<|im_end|>",
        texts=[*abstracts(), *(word for word in WORDS for _ in range(3000))],
    )
    assert set(WORDS) <= words.get_vocab().keys()
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **PIXELS)
    sizes = qwen_settings(config_class, words, *settings)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        path = checkpoints.save(folder / name, model_class, sizes, words, images)
    return path


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("qwen3")
    settings = QWEN3_TEXT, QWEN3_VISION
    return str(write(folder, "m", Qwen3VLForConditionalGeneration, Qwen3VLConfig, *settings))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    folder = tmp_path_factory.mktemp("qwen2")
    model = write(folder, "m", Qwen2VLForConditionalGeneration, Qwen2VLConfig, rope, vision)
    return str(model)


@pytest.fixture(scope="module")
def jina(qwen2, tmp_path_factory) -> str:
    """A copy of the Qwen2-VL with a head, under the names of the published weights."""
    folder = tmp_path_factory.mktemp("jina")
    for file in Path(qwen2).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    named = {}
    for name, tensor in weights.items():
        if not name.startswith("lm_head."):
            name = name.removeprefix("model.")
            old = name if name.startswith("visual.") else f"model.{name}"
            named[old.replace("model.language_model.", "model.")] = tensor
    generator = torch.Generator().manual_seed(5)
    for name, shape in (
        ("0.weight", (32, 32)),
        ("0.bias", (32,)),
        ("2.weight", (1, 32)),
        ("2.bias", (1,)),
    ):
        named[f"score.{name}"] = torch.randn(shape, generator=generator)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    saved = json.loads((folder / "config.json").read_text("utf-8"))
    saved["architectures"] = ["JinaVLForRanking"]
    saved["auto_map"] = {"AutoModel": "modeling.JinaVLForRanking"}
    (folder / "config.json").write_text(json.dumps(saved), "utf-8")
    return str(folder)


class Peer:
    """The model of transformers with the prompt and the score of a model card."""

    def __init__(self, folder: str, model_class: Any):
        self.model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def state(self, text: str, *images: Image.Image, end: tuple[int, ...] = ()) -> torch.Tensor:
        """Returns the state (D,) of the last token. `<|image_pad|>` represents an image."""
        media = self.images(list(images), return_tensors="pt") if images else {}
        for grid in media.get("image_grid_thw", ()):
            text = text.replace("<|image_pad|>", "<|PAD|>" * (int(grid.prod()) // 4), 1)
        text = text.replace("<|PAD|>", "<|image_pad|>")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + list(end)
        ids = torch.tensor([ids])
        types = (ids == self.model.config.image_token_id).long()
        with torch.no_grad():
            output = self.model.model(input_ids=ids, mm_token_type_ids=types, **media)
        return output.last_hidden_state[0, -1]

    def probability(self, state: torch.Tensor, yes: str, no: str) -> float:
        vocabulary = self.tokenizer.get_vocab()
        logits = self.model.lm_head(state)[[vocabulary[yes], vocabulary[no]]]
        return torch.softmax(logits, dim=0)[0].item()


def qwen3_prompt(query: str, document: str) -> str:
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Find pages.<Query>:"
        + query
        + "\n<Document>:"
        + document
        + "<|im_end|>\n<|im_start|>assistant\n"
    )


def load(name: str, folder: str, **fields: Any) -> Any:
    spec = {"name": name, "model": folder, "dtype": "float32", **PIXELS, **fields}
    return load_rerankers({**spec, "attention": "eager"})[0]


IMAGE = f"{START}<|image_pad|>{END}"


@pytest.fixture(scope="module")
def photos(cluster, checkpoint, tmp_path_factory) -> str:
    encoder = {"name": "dual", "model": checkpoint("siglip"), "dtype": "float32"}
    files = {name: png(image) for name, image in PHOTOS.items()}
    return index_captioned(tmp_path_factory.mktemp("photos"), encoder, files)


def scores(reranker: Any, uri: str, queries: list[Any], ids: list[str]) -> list[dict[str, float]]:
    found = reranker.score(open_index(uri), queries, [ids] * len(queries))
    return [{name: record.score for name, record in row.items()} for row in found]


def test_qwen3_vl_equals_transformers(qwen3, photos, texts):
    peer = Peer(qwen3, Qwen3VLForConditionalGeneration)
    reranker = load("qwen3_vl", qwen3, instruction="Find pages.", max_batch_tokens=600)

    def expected(query: str, document: str, *images: Image.Image) -> float:
        state = peer.state(qwen3_prompt(query, document), *images)
        return peer.probability(state, "yes", "no")

    for query, row in zip(QUERIES, scores(reranker, photos, QUERIES, [*PHOTOS]), strict=True):
        values = {name: expected(query, IMAGE, image) for name, image in PHOTOS.items()}
        assert row == pytest.approx(values, abs=1e-6)
        assert len({round(value, 5) for value in values.values()}) == len(PHOTOS)
    for query, row in zip(QUERIES, scores(reranker, texts, QUERIES, [*TEXTS]), strict=True):
        values = {name: expected(query, text) for name, text in TEXTS.items()}
        assert row == pytest.approx(values, abs=1e-6)
    (row,) = scores(reranker, photos, [png(PHOTOS["2.png"])], [*PHOTOS])
    both = {n: expected(IMAGE, IMAGE, PHOTOS["2.png"], image) for n, image in PHOTOS.items()}
    assert row == pytest.approx(both, abs=1e-6)
    captions = load("qwen3_vl", qwen3, instruction="Find pages.", documents="both")
    (row,) = scores(captions, photos, QUERIES[:1], ["1.png"])
    value = expected(QUERIES[0], IMAGE + "a wing with 1 engines", PHOTOS["1.png"])
    assert row == pytest.approx({"1.png": value}, abs=1e-6)


def test_monoqwen2_vl_equals_transformers(qwen2, photos, texts):
    peer = Peer(qwen2, Qwen2VLForConditionalGeneration)
    reranker = load("monoqwen2_vl", qwen2)
    for query, row in zip(QUERIES, scores(reranker, photos, QUERIES, [*PHOTOS]), strict=True):
        prompt = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{IMAGE}Assert the relevance of the previous image document to the following query, "
            f"answer True or False. The query is: {query}<|im_end|>\n<|im_start|>assistant\n"
        )
        values = {
            name: peer.probability(peer.state(prompt, image), "True", "False")
            for name, image in PHOTOS.items()
        }
        assert row == pytest.approx(values, abs=1e-6)
    assert scores(reranker, texts, QUERIES, [*TEXTS]) == [{}, {}]  # have no image
    hits = open_index(texts).search("lift", rerank=reranker, k=5)
    assert {hit.rerank.problem for hit in hits} == {"has no readable image"}
    with pytest.raises(SpecError, match="^query must be a text to be reranked by monoqwen2_vl"):
        open_index(photos).search(png(PHOTOS["2.png"]), rerank=reranker)


def test_jina_m0_equals_transformers(qwen2, jina, photos, texts):
    """The peer scores states of transformers' Qwen2-VL with the layers of the checkpoint."""
    peer, weights = (
        Peer(qwen2, Qwen2VLForConditionalGeneration),
        load_file(Path(jina) / "model.safetensors"),
    )
    reranker = load("jina_m0", jina)

    def expected(query: str, document: str, *images: Image.Image) -> float:
        prompt = f"**Document**:\n{document}\n**Query**:\n{query}"
        state = peer.state(prompt, *images, end=(100,))
        hidden = torch.relu(weights["score.0.weight"] @ state + weights["score.0.bias"])
        logit = weights["score.2.weight"] @ hidden + weights["score.2.bias"]
        return 1 / (1 + np.exp(-(logit.item() - 2.65)))

    for query, row in zip(QUERIES, scores(reranker, photos, QUERIES, [*PHOTOS]), strict=True):
        values = {name: expected(query, IMAGE, image) for name, image in PHOTOS.items()}
        assert row == pytest.approx(values, abs=1e-5)
    for query, row in zip(QUERIES, scores(reranker, texts, QUERIES, [*TEXTS]), strict=True):
        values = {name: expected(query, text) for name, text in TEXTS.items()}
        assert row == pytest.approx(values, abs=1e-5)
    (row,) = scores(reranker, photos, [png(PHOTOS["2.png"])], [*PHOTOS])
    both = {n: expected(IMAGE, IMAGE, image, PHOTOS["2.png"]) for n, image in PHOTOS.items()}
    assert row == pytest.approx(both, abs=1e-5)


def test_default_pixels_are_those_of_the_model_cards(qwen3, qwen2, jina):
    def limits(name: str, folder: str, **fields: Any) -> tuple[int, int]:
        spec = {"name": name, "model": folder, "dtype": "float32", **fields}
        size = load_rerankers(spec)[0]._reader.images.size
        return size["shortest_edge"], size["longest_edge"]

    assert limits("qwen3_vl", qwen3) == (4096, 1843200)
    assert limits("jina_m0", jina) == (3136, 602112)
    assert limits("monoqwen2_vl", qwen2) == (64, 1024)  # the checkpoint's
    assert limits("qwen3_vl", qwen3, max_pixels=1024) == (1024, 1024)


def test_long_inputs(qwen3, texts):
    reranker = load("qwen3_vl", qwen3, max_pair_tokens=400, documents="text")
    searcher = open_index(texts)
    whole = load("qwen3_vl", qwen3, documents="text")._reader
    texts_by_length = ("lift of a wing " * number for number in range(20, 100))
    pairs = ((text, whole.read_pair(Content("wing"), Content(text))) for text in texts_by_length)
    long, (untruncated, none) = next(pair for pair in pairs if len(pair[1][0]) > 440)
    inputs, removed = reranker._reader.read_pair(Content("wing"), Content(long))
    assert none == 0 and 390 < len(inputs) <= 400 and removed >= 40
    assert len(untruncated) - removed == pytest.approx(len(inputs), abs=3)
    with pytest.raises(
        SpecError, match=r"^query must be a text of at most 200 tokens with the prompt"
    ):
        reranker.score(searcher, ["lift of a wing " * 99], [["a"]])


@pytest.fixture(scope="module")
def clips(cluster, qwen2, tmp_path_factory) -> str:
    """Index of a video of four seconds, whose frames encode their numbers."""
    folder = tmp_path_factory.mktemp("clips")
    (folder / "clips").mkdir()
    media.write_video(folder / "clips/a.mp4", media.frame_times(4, 10))
    source = {"name": "video", "path": str(folder / "clips"), "sampling": "fps", "fps": 2.0}
    encoder = {"name": "qwen_vl", "model": qwen2, "dtype": "float32"}
    spec = {
        "index": str(folder / "index"),
        "source": {**source, "window_seconds": 4.0},
        "encoder": {**encoder, "preprocessing": "transformers"},
        "representations": [{"compressor": "none", "id": "full"}],
    }
    job.run(config.parse(IndexSpec, spec), IndexResources(), job="1", report=lambda line: None)
    return spec["index"]


def test_frames_of_a_video(qwen3, qwen2, clips):
    """Qwen3-VL reads them as a video; of other models, the best frame counts."""
    index = open_index(clips).index
    (item_id,) = index.dataset.to_table(columns=["item_id"])["item_id"].to_pylist()
    stored = json.loads(index.item(item_id, ["metadata"])["metadata"][0].as_py())["frames"]
    frames = ItemImages(index, 4).read(item_id)
    numbers = [media.read_number(np.asarray(image)) for image, _, _ in frames]
    rows = np.linspace(0, len(stored) - 1, 4).round().astype(int)
    assert numbers == [stored[row][0] for row in rows]
    assert [start for _, start, _ in frames] == [stored[row][1] for row in rows]

    reader = load("qwen3_vl", qwen3, max_pair_tokens=4000)._reader
    small = [(image.resize((32, 24)), start, stop) for image, start, stop in frames]
    inputs, _ = reader.read_pair(Content("wing"), Content(images=small, is_video=True))
    assert inputs.media["video_grid_thw"][0, 0] == 2  # pairs of frames
    text = reader.tokenizer.decode(inputs.sequence["input_ids"].tolist())
    assert text.count(" seconds>") == 2

    peer = Peer(qwen2, Qwen2VLForConditionalGeneration)
    reranker = load("monoqwen2_vl", qwen2, max_frames=4)
    ((found,),) = [[*row.values()] for row in scores(reranker, clips, ["lift"], [item_id])]
    prompt = reranker.prompt().replace("{document}", IMAGE).replace("{query}", "lift")
    states = [peer.state(prompt, image) for image, _, _ in frames]
    best = max(peer.probability(state, "True", "False") for state in states)
    assert found == pytest.approx(best, abs=1e-6)


def test_errors(qwen3, qwen2, checkpoint, tmp_path):
    def check(rule: str, name: str, **fields: Any) -> None:
        with pytest.raises(SpecError, match=rule):
            load_rerankers({"name": name, "dtype": "float32", **fields})

    check(
        r"^rerank.model must be a checkpoint of the type qwen3_vl, .* is a qwen2_vl",
        "qwen3_vl",
        model=qwen2,
    )
    check(r"^rerank.model must be a checkpoint of the type qwen2_vl", "jina_m0", model=qwen3)
    check(r"^rerank.model must be a ScoredQwen2VL checkpoint.*score.0", "jina_m0", model=qwen2)
    check(
        r"^rerank.model must be a .*checkpoint.*, which has no token True",
        "monoqwen2_vl",
        model=checkpoint("qwen2_vl"),
    )
    check(
        r"^rerank.model must be the path of an existing folder",
        "qwen3_vl",
        model=str(tmp_path / "x"),
    )
    check(r"^field 'model' is required in rerank", "qwen3_vl")
    check(r"^unknown field 'documents' in rerank", "monoqwen2_vl", model=qwen2, documents="text")
