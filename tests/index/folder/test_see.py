"""`maxray index FOLDER --see MODEL`: images and frames are found by what they show."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from pipeline import Index
from pipeline.config import SpecError, parse
from pipeline.index.checks import check
from pipeline.index.folder import Account, folder_spec
from pipeline.index.spec import IndexSpec
from pipeline.search.searcher import open_index
from tests.images import noise, png
from tests.media import write_video
from tests.pdfs import Page, pdf

QUERY = "lift of a wing"


@pytest.fixture(scope="module")
def model(checkpoint) -> str:
    return str(checkpoint("clip"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a folder with a text, a page, a text image, two photos and a video."""
    folder = tmp_path_factory.mktemp("see") / "files"
    folder.mkdir()
    (folder / "wing.txt").write_text("The lift of a wing grows with its angle.")
    (folder / "page.pdf").write_bytes(pdf(Page([(20, 50, "a crust of bread")])))
    for seed in range(3):
        image = np.random.default_rng(seed).integers(0, 255, (48, 64, 3), np.uint8)
        (folder / f"photo{seed}.png").write_bytes(png(Image.fromarray(image)))
    write_video(folder / "clip.mp4", np.arange(90) / 30)
    return folder


def statuses(account: Account) -> dict[str, str]:
    return {file.path.removeprefix("files/"): file.status for file in account.files}


@pytest.fixture(scope="module")
def made(folder, model) -> tuple[Index, Account, Account]:
    """Returns an index that was made without and completed with the encoder of images."""
    index = Index(f"{folder}.maxray")
    return index, index.add_files(str(folder)), index.add_files(str(folder), see=model)


def test_an_index_is_completed(made):
    index, without, account = made
    assert statuses(without)["photo0.png"] == statuses(without)["clip.mp4"] == "rejected"
    assert "--see finds images and frames by what they show" in str(without)
    assert "--see" not in str(account)
    assert statuses(account) == {
        "clip.mp4": "indexed",
        "page.pdf": "unchanged",
        **{f"photo{seed}.png": "indexed" for seed in range(3)},
        "wing.txt": "unchanged",
    }
    table = index.reader.dataset.to_table(["item_id", "full", "seen"])
    has_text, is_seen = (
        {item for item, value in zip(*columns, strict=True) if value is not None}
        for columns in (
            (table["item_id"].to_pylist(), table[name].to_pylist()) for name in ("full", "seen")
        )
    )
    assert has_text == {"files/wing.txt", "files/page.pdf#page=1"}
    assert is_seen == {item for item in table["item_id"].to_pylist() if item not in has_text}


def test_the_order_is_that_of_the_model(made, folder, model):
    clip, processor = CLIPModel.from_pretrained(model).eval(), CLIPProcessor.from_pretrained(model)
    names = [f"photo{seed}.png" for seed in range(3)]
    images = [Image.open(io.BytesIO((folder / name).read_bytes())) for name in names]
    with torch.inference_mode():
        pixels = processor.image_processor(images, return_tensors="pt")
        shown = clip.get_image_features(**pixels).pooler_output
        ids = torch.tensor([processor.tokenizer(QUERY)["input_ids"]])
        asked = clip.get_text_features(ids).pooler_output
    similarities = torch.nn.functional.cosine_similarity(shown, asked).tolist()
    expected = sorted(zip(similarities, names, strict=True), reverse=True)
    hits = made[0].search(QUERY, "seen", filter="modality = 'image'")
    assert [hit.item_id for hit in hits] == [f"files/{name}" for _, name in expected]
    # The default precision is bfloat16.
    assert [hit.score for hit in hits] == pytest.approx([s for s, _ in expected], abs=2e-2)


def test_hits_of_texts_and_images_alternate(made, folder):
    index = made[0]
    texts, images = index.search(QUERY, "full"), index.search(QUERY, "seen")
    hits = index.search(QUERY, k=4)
    expected = [texts[0], images[0], texts[1], images[1]]
    assert [(hit.item_id, hit.score) for hit in hits] == [
        (hit.item_id, hit.score) for hit in expected
    ]
    assert [hit.representation for hit in hits] == ["full", "seen", "full", "seen"]
    assert [hit.rank for hit in hits] == [1, 2, 3, 4]
    (by_image,) = index.search((folder / "photo1.png").read_bytes(), k=1)
    assert (by_image.item_id, by_image.representation) == ("files/photo1.png", "seen")
    assert by_image.score == pytest.approx(1, abs=2e-2)
    assert len(index.search([QUERY, "bread"], k=2)[1]) == 2
    parents = [hit.parent_id for hit in index.search(QUERY, k=9, group_by="parent")]
    assert len(parents) == len({*parents}) == 6
    ranked = open_index(index.uri).rank([QUERY])[0]
    assert {*ranked.item_ids} == {hit.item_id for hit in texts}  # runs are of one representation


def test_frames_are_found_with_their_times(made):
    hits = made[0].search(QUERY, "seen", filter="modality = 'video'")
    assert hits[0].item_id == "files/clip.mp4#t=0,3"
    (match,) = hits[0].matches
    assert match.query_token == QUERY and match.similarity == pytest.approx(hits[0].score, abs=1e-4)
    (location,) = match.locations
    assert 0 <= location.times[0] < location.times[1] <= 3
    assert location.box == pytest.approx(
        (0.214, 0, 0.786, 1), abs=1e-3
    )  # the middle, as CLIP crops


def test_later_runs_keep_the_encoder(made, folder, model):
    index = made[0]
    spec = folder_spec([str(folder)])
    assert spec["see"] == {"name": "dual", "model": model, "layer": "single"}
    (folder / "photo3.png").write_bytes(png(noise(20, 20)))
    (folder / "photo2.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (folder / "photo0.png").unlink()
    account = index.add_files(str(folder))
    assert statuses(account) == {
        "clip.mp4": "unchanged",
        "page.pdf": "unchanged",
        "photo1.png": "unchanged",
        "photo2.png": "rejected",
        "photo3.png": "indexed",
        "wing.txt": "unchanged",
    }
    found = {hit.item_id for hit in index.search(QUERY, "seen", filter="modality = 'image'")}
    # The last readable revision of a damaged file remains.
    assert found == {f"files/photo{number}.png" for number in (1, 2, 3)}


def test_another_encoder_is_refused(made, folder, checkpoint):
    with pytest.raises(SpecError, match=r"^encoder must be the encoder that filled 'seen'"):
        made[0].add_files(str(folder), see=str(checkpoint("siglip")))
    with pytest.raises(SpecError, match=r"^see\.model must be .*no/such"):
        made[0].add_files(str(folder), see="no/such")
    with pytest.raises(SpecError, match=r"^see\.model must be "):
        made[0].add_files(str(folder), see="")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"see": None}, "field 'see' is required; it must be an encoder of images, for seen"),
        ({"see": {"name": "minilm"}}, "see must be an encoder of images, such as dual, got 'minil"),
        ({"representations": [{"compressor": "none"}]}, "see must be null unless a representation"),
        (
            {
                "representations": [
                    {"compressor": {"name": "hpool", "num_vectors": 2}, "field": "image"}
                ]
            },
            "representations.image_hpool_2.compressor must be none, with a codec without a fit",
        ),
    ],
)
def test_wrong_specs(folder, model, tmp_path, change, message):
    fields = folder_spec([str(folder)], str(tmp_path / "index"), see=model)
    with pytest.raises(SpecError, match=message):
        check(parse(IndexSpec, fields | change))
