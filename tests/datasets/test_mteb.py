"""The mteb source on miniature datasets in the layouts of the hub."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.config import SpecError
from pipeline.data.base import content_hash, items_table
from pipeline.datasets.mteb import document_text, query_text
from pipeline.registry import BENCHMARKS, SOURCES
from pipeline.schema import Item, Reject
from tests.datasets import mteb_data

pytestmark = mteb_data.NEEDS_MTEB

Layout = Callable[..., Path]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory) -> Callable[..., str]:
    """Function that writes a miniature of a task once and returns its folder."""
    root, folders = tmp_path_factory.mktemp("snapshots"), {}

    def snapshot(task: str, layout: Layout = mteb_data.standard, **options: Any) -> str:
        key = (task, layout, str(options))
        if key not in folders:
            folders[key] = str(layout(root / f"{task}-{len(folders)}", task, **options))
        return folders[key]

    return snapshot


def source(task: str, data: str | None, wants: tuple[str, ...] = ("text",), **fields: Any) -> Any:
    spec = SOURCES.resolve({"name": "mteb", "task": task, "data": data, **fields})
    return SOURCES.build(spec, wants)


def read(source: Any) -> list[Item | Reject]:
    """Returns all items and rejects, after pickling and JSON round trips as in a job."""
    source.check()
    source = pickle.loads(pickle.dumps(source))
    results: list[Item | Reject] = []
    for shard in source.shards():
        shard = json.loads(json.dumps(shard))
        entries = list(enumerate(source.scan(shard)))
        wanted = [(position, entry) for position, entry in entries if isinstance(entry, Item)]
        decoded = source.decode(shard, wanted)
        results += [next(decoded) if isinstance(entry, Item) else entry for _, entry in entries]
    items_table([result for result in results if isinstance(result, Item)], source.payload)
    return results


def test_texts_are_joined_as_in_mteb(snapshots):
    items = read(source("SciFact", snapshots("SciFact")))
    assert [item.item_id for item in items] == ["d0", "d1", "d2", "d3"]
    assert items[1].text == f"Title 1 {mteb_data.text(1)}" and items[1].title == "Title 1"
    assert {(item.modality, item.source) for item in items} == {("text", "SciFact")}

    from datasets import Dataset
    from mteb._create_dataloaders import _retrieval_texts
    from mteb.types import PromptType

    documents = [{"id": "1", "title": "A", "text": " b "}, {"id": "2", "title": "", "text": " c"}]
    texts = _retrieval_texts(Dataset.from_list(documents), PromptType.document)
    assert [document_text(row) for row in documents] == texts == ["A  b", "c"]
    queries = [{"id": "1", "text": "a", "instruction": "b"}, {"id": "2", "text": "c"}]
    texts = _retrieval_texts(Dataset.from_list(queries), PromptType.query)
    assert [query_text(row) for row in queries] == texts == ["a b", "c"]
    turns = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "What?"}]
    conversations = [{"id": "1", "text": turns, "instruction": "Be brief."}]
    texts = _retrieval_texts(Dataset.from_list(conversations), PromptType.query)
    assert [query_text(row) for row in conversations] == texts


def test_images_are_decoded(snapshots):
    data = snapshots("VidoreDocVQARetrieval", mteb_data.vidore_v1)
    reader = source("VidoreDocVQARetrieval", data, ("image",))
    items = read(reader)
    assert [item.item_id for item in items] == [f"corpus-test-{i}" for i in range(4)]
    assert {item.modality for item in items} == {"page"}
    for number, item in enumerate(items):
        decoded = np.asarray(Image.open(io.BytesIO(item.payload["image"])))
        expected = np.asarray(Image.open(io.BytesIO(mteb_data.image(number)["bytes"])))
        np.testing.assert_array_equal(decoded, expected)
    row = {**items[2].row(), "metadata": items[2].metadata}
    assert reader.preview_image(row) == items[2].payload["image"]
    assert reader.read_content_hash(row) == content_hash(items[2].revision)
    assert reader.stores_listing
    assert not read(source("VidoreDocVQARetrieval", data, ("text",)))[0].payload


def test_pages_with_text_provide_both(snapshots):
    data = snapshots("Vidore3HrRetrieval.v2", subsets=["english"])
    fields = {"subset": "english"}
    reader = source("Vidore3HrRetrieval.v2", data, ("text", "image", "scan"), **fields)
    assert reader.provided_inputs(reader.spec) == ("item_id", "text", "image", "scan")
    items = read(reader)
    assert items[0].text == f"Title 0 {mteb_data.text(0)}" and items[0].modality == "page"
    assert items[0].payload["image"] and items[0].payload["scan"] is None


def test_audio_and_video_are_decoded(snapshots):
    data = snapshots("MSRVTTT2VA", mteb_data.pairs)
    items = read(source("MSRVTTT2VA", data, ("frames", "audio")))
    assert [item.modality for item in items] == ["video"] * 4
    frames = items[2].payload["frames"]
    assert frames[0]["width"].as_py() == 64
    pixels = np.frombuffer(frames[0]["pixels"].as_py(), np.uint8)
    assert abs(pixels.mean() - 80) < 4
    samples = np.frombuffer(items[2].payload["audio"]["samples"], "<f4")
    assert len(samples) == 16_000  # of the audio column: the video has no audio
    audio = read(
        source(
            "ClothoT2ARetrieval", snapshots("ClothoT2ARetrieval", mteb_data.captions), ("audio",)
        )
    )
    assert {item.modality for item in audio} == {"audio"}
    samples = np.frombuffer(audio[1].payload["audio"]["samples"], "<f4")
    expected = 0.3 * np.sin(2 * np.pi * 220 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(samples, expected, atol=1e-3)


def test_revisions_depend_on_content_only(tmp_path):
    rows = mteb_data.standard_parts(["text"], ["text"])
    configs = {name: {"test": list(values)} for name, values in rows.items()}
    first = read(source("SciFact", str(mteb_data.write_snapshot(tmp_path / "a", configs))))
    configs["corpus"]["test"][2] = {**configs["corpus"]["test"][2], "text": "Another text."}
    second = read(source("SciFact", str(mteb_data.write_snapshot(tmp_path / "b", configs))))
    changed = [a.item_id for a, b in zip(first, second, strict=True) if a.revision != b.revision]
    assert changed == ["d2"]


def test_changed_folder_is_read_again(tmp_path):
    rows = mteb_data.standard_parts(["text"], ["text"])
    configs = {name: {"test": list(values)} for name, values in rows.items()}
    folder = mteb_data.write_snapshot(tmp_path, configs)
    assert len(read(source("SciFact", str(folder)))) == 4
    configs["corpus"]["test"].append({"id": "d9", "title": "", "text": "One more."})
    mteb_data.write_snapshot(tmp_path, configs)
    assert len(read(source("SciFact", str(folder)))) == 5


def test_unreadable_documents_are_rejects(tmp_path):
    corpus = [
        {"id": "good", "image": mteb_data.image(0)},
        {"id": "corrupted", "image": {"bytes": b"no image", "path": "x.png"}},
        {"id": "empty", "image": None},
    ]
    parts = {**mteb_data.standard_parts(["text"], ["image"]), "corpus": corpus}
    folder = mteb_data.write_snapshot(tmp_path, {n: {"test": rows} for n, rows in parts.items()})
    results = read(source("Flickr30kT2IRetrieval", str(folder), ("image",)))
    assert [type(result) for result in results] == [Item, Reject, Reject]
    assert [result.reason for result in results[1:]] == ["not an image", "empty document"]


def test_errors_are_one_sentence(snapshots, tmp_path):
    data = snapshots("SciFact")

    def message(task: str, data: str | None = data, **fields: Any) -> str:
        with pytest.raises(SpecError) as error:
            source(task, data, **fields).check()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert message("SciFacts").startswith(
        "task must be the name of a retrieval task of mteb, got 'SciFacts'; did you mean 'SciFact"
    )
    assert "which has the type STS" in message("STS12")
    mean = message("CQADupstackRetrieval")
    assert "which is a mean over tasks; evaluate each of them: CQADupstackAndroidRetriev" in mean
    assert "subset must be one of french, spanish, english" in message("Vidore3HrRetrieval")
    wrong = message("Vidore3HrRetrieval", subset="englisch")
    assert wrong.endswith("; did you mean 'english'?")
    assert "split must be 'test', got 'dev'" in message("SciFact", split="dev")
    missing = message("SciFact", None)
    assert missing.startswith("data must be a folder with all files of the dataset mteb/scifact at")
    assert "get them with `hf download mteb/scifact --repo-type dataset --revision " in missing
    assert missing.endswith(" --local-dir FOLDER`, or set download: true")
    assert "is not a local folder" in message("SciFact", str(tmp_path / "nowhere"))
    assert "is empty" in message("SciFact", str(tmp_path))
    (tmp_path / "corpus.csv").write_text("a,b\n1,2\n")
    assert "has no README.md, which defines its configurations" in message("SciFact", str(tmp_path))


def test_nothing_is_downloaded(snapshots, tmp_path, monkeypatch):
    """Without the corpus in the folder, no request is sent, even if the process is online."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    rows = mteb_data.standard_parts(["text"], ["text"])
    configs = {name: {"test": values} for name, values in rows.items() if name != "corpus"}
    folder = mteb_data.write_snapshot(tmp_path, configs)
    with pytest.raises(SpecError, match=r"cannot be loaded \(ValueError: BuilderConfig 'corpus'"):
        source("SciFact", str(folder)).check()
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


#: Representative tasks of the benchmarks, with the layout of their dataset.
TASKS: list[tuple[str, str, Layout, dict[str, Any], dict[str, Any]]] = [
    ("BEIR", "ArguAna", mteb_data.standard, {}, {}),
    ("BEIR", "NFCorpus", mteb_data.standard, {}, {}),
    ("BRIGHT", "BrightBiologyRetrieval", mteb_data.bright, {}, {}),
    ("BRIGHT", "BrightBiologyLongRetrieval", mteb_data.bright, {}, {}),
    ("LongEmbed", "LEMBPasskeyRetrieval", mteb_data.standard, {}, {"split": "test_256"}),
    ("LongEmbed", "LEMBNeedleRetrieval", mteb_data.long_embed, {}, {"split": "test_256"}),
    ("LongEmbed", "LEMBNarrativeQARetrieval", mteb_data.long_embed, {}, {}),
    ("ViDoRe v1", "VidoreDocVQARetrieval", mteb_data.vidore_v1, {}, {}),
    ("ViDoRe v2", "Vidore2ESGReportsRetrieval", mteb_data.vidore_v2, {}, {"subset": "english"}),
    ("ViDoRe v3", "Vidore3HrRetrieval", mteb_data.standard, {}, {"subset": "french"}),
    ("ViDoRe v3.1", "Vidore3HrRetrieval.v2", mteb_data.standard, {}, {"subset": "german"}),
    (
        "ViDoRe v3.1",
        "Vidore3HrBGEm3Reranking.v2",
        mteb_data.standard,
        {"pools": True},
        {"subset": "english"},
    ),
    ("JinaVDR", "JinaVDRDocVQARetrieval", mteb_data.jina_vdr, {}, {}),
    ("MIEB", "Flickr30kT2IRetrieval", mteb_data.standard, {}, {}),
    ("MIEB", "Flickr30kI2TRetrieval", mteb_data.standard, {}, {}),
    ("MIEB", "CIRRIT2IRetrieval", mteb_data.standard, {}, {}),
    ("MIEB", "CUB200I2IRetrieval", mteb_data.standard, {}, {}),
    ("MIEB", "InfoSeekIT2ITRetrieval", mteb_data.standard, {}, {}),
    ("MVEB", "MSRVTTT2V", mteb_data.pairs, {}, {}),
    ("MVEB", "VALOR32KT2VARetrieval", mteb_data.pairs, {"caption": "description"}, {}),
    ("MVEB", "MSVDT2VRetrieval", mteb_data.pairs, {}, {}),
    ("MAEB", "ClothoT2ARetrieval", mteb_data.captions, {}, {}),
    ("MAEB", "MACST2ARetrieval", mteb_data.standard, {}, {}),
    ("reranking", "AskUbuntuDupQuestions", mteb_data.standard, {"pools": True}, {}),
    (
        "instructions",
        "Core17InstructionRetrieval",
        mteb_data.standard,
        {"pools": True, "instructions": True},
        {},
    ),
]


@pytest.mark.parametrize(("benchmark", "task", "layout", "options", "fields"), TASKS)
def test_task_loads_from_miniature(benchmark, task, layout, options, fields, snapshots):
    data = snapshots(task, layout, **options)
    items = read(source(task, data, ("text", "image", "frames", "audio"), **fields))
    assert len(items) == mteb_data.NUM_DOCUMENTS
    assert all(isinstance(item, Item) for item in items)
    spec = BENCHMARKS.resolve({"name": "mteb", "task": task, "data": data, **fields})
    judged = BENCHMARKS.build(spec).load()
    ids = {item.item_id for item in items}
    assert judged.queries and all(ids >= set(grades) for grades in judged.qrels.values())
    assert (judged.pools is not None) == (options.get("pools", False) or layout == mteb_data.bright)
