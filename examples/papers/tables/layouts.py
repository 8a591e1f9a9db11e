"""Miniatures of the data sets of the papers, in the layout in which each is published.

A writer gets a folder in place of the folder `--data`. It writes a few rows below the paths
that `data.yaml` lists, with the names of files, columns and members, and the types of columns, of
the published data set. Images, videos and texts are those of the repository.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from examples.papers.synthetic.binding_data import evaluation_pairs
from examples.papers.synthetic.binding_files import write_collection
from tests.datasets import (
    csv_text,
    imagecode,
    make_tar_gz,
    make_zip,
    small_video,
    sound,
    write_files,
)
from tests.media import make_tar
from tests.tiny.checkpoints import CRANFIELD, blip

PHOTOS = CRANFIELD.parent / "photos"
#: Type of a column of images in Parquet files of the Hugging Face hub.
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
NUM_IMAGES, NUM_CAPTIONS, NUM_QUERIES = 16, 5, 8


class Photo(NamedTuple):
    """Photo with its captions and size."""

    content: bytes
    captions: list[str]
    width: int
    height: int


@functools.cache
def _photos() -> list[Photo]:
    data = json.loads((PHOTOS / "captions.json").read_text("utf-8"))
    captions: dict[int, list[str]] = {}
    for row in data["annotations"]:
        captions.setdefault(row["image_id"], []).append(row["caption"])
    found = []
    for image in sorted(data["images"], key=lambda image: image["file_name"])[:NUM_IMAGES]:
        content = (PHOTOS / "images" / image["file_name"]).read_bytes()
        size = Image.open(io.BytesIO(content)).size
        found.append(Photo(content, captions[image["id"]][:NUM_CAPTIONS], *size))
    return found


def _lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    """Returns a Parquet file as the library `datasets` writes it to the hub."""
    names = list(rows[0])
    columns = {
        name: pa.array([row[name] for row in rows], IMAGE if name == "image" else None)
        for name in names
    }
    features = {name: {"_type": "Image"} for name in names if name == "image"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    stream = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), stream)
    return stream.getvalue()


def _snapshot(folder: str, configs: dict[str, bytes], split: str = "test") -> dict[str, bytes]:
    """Returns the files that `hf download --local-dir` writes for configurations of a data set."""
    files = {f"{config}/{split}-00000-of-00001.parquet": data for config, data in configs.items()}
    listed = "".join(
        f"- config_name: {config}\n  data_files:\n"
        f"  - split: {split}\n    path: {config}/{split}-*\n"
        for config in configs
    )
    files["README.md"] = f"---\nconfigs:\n{listed}---\n".encode()
    files[".gitattributes"] = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
    files[".cache/huggingface/.gitignore"] = b"*"
    return {f"{folder}/{name}": data for name, data in files.items()}


def _cell(number: int) -> dict[str, Any]:
    return {"bytes": _photos()[number].content, "path": f"{number}.jpg"}


# -- texts -----------------------------------------------------------------------------------------


@functools.cache
def _cranfield() -> tuple[dict[str, dict[str, Any]], dict[str, tuple[str, str]]]:
    """Returns documents by id, and queries by id with their text and a relevant document."""

    def read(name: str) -> dict[str, dict[str, Any]]:
        lines = (CRANFIELD / name).read_text("utf-8").splitlines()
        return {row["_id"]: row for row in map(json.loads, lines)}

    texts, queries = read("corpus.jsonl"), read("queries.jsonl")
    judged: dict[str, tuple[str, str]] = {}
    qrels = (CRANFIELD / "qrels/test.tsv").read_text("utf-8").splitlines()
    for row in csv.DictReader(qrels, delimiter="\t"):
        if row["corpus-id"] in texts and len(judged) < NUM_QUERIES:
            pair = (queries[row["query-id"]]["text"], row["corpus-id"])
            judged.setdefault(row["query-id"], pair)
    names = dict.fromkeys([*(name for _, name in judged.values()), *list(texts)[:NUM_IMAGES]])
    return {name: texts[name] for name in names}, judged


def beir(name: str) -> dict[str, bytes]:
    """Returns a data set of BEIR. The queries of ArguAna and Quora are documents as well."""
    texts, judged = _cranfield()
    corpus = [
        {"_id": row["_id"], "title": row.get("title", ""), "text": row["text"], "metadata": {}}
        for row in texts.values()
    ]
    if name in ("arguana", "quora"):
        corpus += [
            {"_id": q, "title": "", "text": t, "metadata": {}} for q, (t, _) in judged.items()
        ]
    queries = [{"_id": q, "text": text, "metadata": {}} for q, (text, _) in judged.items()]
    qrels = "".join(f"{query}\t{document}\t1\n" for query, (_, document) in judged.items())
    return {
        f"beir/{name}/corpus.jsonl": _lines(corpus),
        f"beir/{name}/queries.jsonl": _lines(queries),
        f"beir/{name}/qrels/test.tsv": f"query-id\tcorpus-id\tscore\n{qrels}".encode(),
    }


def ms_marco() -> dict[str, bytes]:
    """Returns lists of 16 documents with the scores of a teacher, converted from the hub."""
    texts, judged = _cranfield()
    pairs = []
    for text, document in judged.values():
        negatives = [name for name in texts if name != document][:15]
        scores = [1.0 - 0.05 * rank for rank in range(1 + len(negatives))]
        pairs.append(
            {"query": text, "document_id": document, "negatives": negatives, "scores": scores}
        )
    used = {name for pair in pairs for name in (pair["document_id"], *pair["negatives"])}
    documents = (
        {"document_id": name, "text": texts[name]["text"]} for name in texts if name in used
    )
    return {"ms_marco/train.jsonl": _lines(pairs), "ms_marco/documents.jsonl": _lines(documents)}


# -- pages -----------------------------------------------------------------------------------------


def colpali_train() -> dict[str, bytes]:
    """Returns `vidore/colpali_train_set`. Some rows have no query, and pages have several rows."""

    def rows(numbers: Iterable[int]) -> list[dict[str, Any]]:
        return [
            {
                "image": _cell(number),
                "image_filename": f"images/{number}.jpg",
                "query": None if number == 0 and caption else _photos()[number].captions[caption],
                "answer": "['A']",
                "source": "arxiv_qa",
                "options": "['A', 'B']",
                "page": "",
                "model": "",
                "prompt": "",
                "answer_type": "",
            }
            for number in numbers
            for caption in range(2)
        ]

    data = "colpali_train_set/data"
    return {
        f"{data}/train-00000-of-00082.parquet": _parquet(rows(range(8))),
        f"{data}/train-00001-of-00082.parquet": _parquet(rows(range(8, 14))),
        f"{data}/test-00000-of-00001.parquet": _parquet(rows(range(14, 16))),
        "colpali_train_set/README.md": b"---\nlicense: mit\n---\n",
    }


def vidore(folder: str, version: int) -> dict[str, bytes]:
    """Returns a BEIR configuration of ViDoRe v1, or a data set of ViDoRe v2.

    Some data sets have integer scores, and others floating point scores. Queries of version 2 have
    a row per language, except for those that people have written.
    """
    corpus, queries, qrels = [], [], []
    number_type = float if len(folder) % 2 else int
    languages = ["english", "french"] if version == 2 and not folder.endswith("_human") else [None]
    for number in range(NUM_QUERIES):
        document = {"doc-id": f"document-{number // 4}"} if version == 2 else {}
        corpus.append({"corpus-id": number, "image": _cell(number), **document})
    for number in range(NUM_QUERIES // 2):
        for offset, language in enumerate(languages):
            query = {"query-id": 2 * number + offset, "query": _photos()[number].captions[offset]}
            queries.append(query | ({"language": language} if language else {}))
            for page in {number, number // 2}:
                row = {"query-id": 2 * number + offset, "corpus-id": page}
                qrels.append({**row, "score": number_type(1)})
    configs = {"corpus": _parquet(corpus), "queries": _parquet(queries), "qrels": _parquet(qrels)}
    if version == 2:
        configs["docs"] = _parquet([{"doc-id": "document-0", "file": "a.pdf"}])
    return _snapshot(folder, configs)


def visdoc() -> dict[str, bytes]:
    """Returns the data sets of VisRAG and the out-of-domain ones. Their ids are texts."""
    names = ("arxivqa", "chartqa", "mp_docvqa", "slidevqa", "infovqa", "plotqa")
    folders = [f"visrag_{name}" for name in names]
    folders += [
        f"{name}_{unit}" for name in ("vidoseek", "mmlongbench") for unit in ("page", "doc")
    ]
    corpus = [{"corpus-id": f"{n}.jpg", "image": _cell(n)} for n in range(NUM_QUERIES)]
    queries = [
        {"query-id": f"{n}.jpg-0", "query": _photos()[n].captions[0]} for n in range(NUM_QUERIES)
    ]
    qrels = [
        {"query-id": f"{n}.jpg-0", "corpus-id": f"{n}.jpg", "score": 1} for n in range(NUM_QUERIES)
    ]
    configs = {"corpus": _parquet(corpus), "queries": _parquet(queries), "qrels": _parquet(qrels)}
    files: dict[str, bytes] = {}
    for folder in folders:
        split = "train" if folder.startswith("visrag") else "test"
        files |= _snapshot(f"visdoc/{folder}", configs, split)
    return files


# -- images with captions --------------------------------------------------------------------------


def _karpathy(name: str, splits: Sequence[str], **fields: Callable[[int, str], Any]) -> bytes:
    """Returns a file of Karpathy, with further fields of each image."""
    images = []
    for number, (photo, split) in enumerate(zip(_photos(), splits, strict=True)):
        ids = [NUM_CAPTIONS * number + caption for caption in range(len(photo.captions))]
        sentences = [
            {"tokens": text.lower().split(), "raw": f"{text} ", "imgid": number, "sentid": sentence}
            for sentence, text in zip(ids, photo.captions, strict=True)
        ]
        image = {name: value(number, split) for name, value in fields.items()}
        images.append(
            {"sentids": ids, "imgid": number, "sentences": sentences, "split": split, **image}
        )
    return _json({"images": images, "dataset": name})


def flickr30k() -> dict[str, bytes]:
    """Returns Flickr30K with Karpathy's splits, which are not those of Flickr30K Entities."""
    splits = ["train"] * 6 + ["val"] * 2 + ["test"] * 8
    files = {f"flickr30k/images/{_flickr_id(n)}.jpg": p.content for n, p in enumerate(_photos())}
    data = _karpathy("flickr30k", splits, filename=lambda number, _: f"{_flickr_id(number)}.jpg")
    return files | {"flickr30k/dataset_flickr30k.json": data}


def flickr30k_entities() -> dict[str, bytes]:
    """Returns Flickr30K Entities. The first two words of each caption are a phrase with a box."""
    folder = "flickr30k_entities"
    ids = [str(_flickr_id(number)) for number in range(NUM_IMAGES)]
    splits = {"train": ids[:6], "val": ids[6:8], "test": ids[8:]}
    files = {f"{folder}/{name}.txt": "\n".join(part).encode() for name, part in splits.items()}
    for number, (image, photo) in enumerate(zip(ids, _photos(), strict=True)):
        lines = []
        for text in photo.captions:
            first, second, *rest = text.split()
            lines.append(" ".join([f"[/EN#{number + 1}/people {first} {second}]", *rest]) + "\n")
        files[f"{folder}/Sentences/{image}.txt"] = "".join(lines).encode()
        width, height = photo.width, photo.height
        files[f"{folder}/Annotations/{image}.xml"] = (
            f"<annotation><filename>{image}.jpg</filename><size><width>{width}</width>"
            f"<height>{height}</height><depth>3</depth></size><object><name>{number + 1}</name>"
            f"<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>{width // 2}</xmax><ymax>{height}</ymax>"
            "</bndbox></object><object><name>900</name><scene>1</scene><nobndbox>1</nobndbox>"
            "</object></annotation>"
        ).encode()
    return files


def _flickr_id(number: int) -> int:
    return 1_000_092_795 + number


def coco() -> dict[str, bytes]:
    """Returns COCO with Karpathy's splits, whose images are in two folders."""
    splits = ["train"] * 4 + ["restval"] * 2 + ["val"] * 2 + ["test"] * 8

    def parent(split: str) -> str:
        return "train2014" if split == "train" else "val2014"

    def file_name(number: int, split: str) -> str:
        return f"COCO_{parent(split)}_{400 + number:012}.jpg"

    files = {
        f"coco/{parent(split)}/{file_name(number, split)}": photo.content
        for number, (photo, split) in enumerate(zip(_photos(), splits, strict=True))
    }
    files["coco/dataset_coco.json"] = _karpathy(
        "coco",
        splits,
        filepath=lambda _, split: parent(split),
        filename=file_name,
        cocoid=lambda number, _: 400 + number,
    )
    return files


def edje_pretraining() -> dict[str, bytes]:
    """Returns archives of the hub, and one of img2dataset with a table and statistics beside it."""

    def archive(numbers: Iterable[int]) -> bytes:
        members = []
        for number in numbers:
            caption = _photos()[number].captions[0]
            info = {"caption": caption, "url": "https://example.org", "status": "success"}
            key = f"{number:09}"
            members += [(f"{key}.jpg", _photos()[number].content), (f"{key}.json", _json(info))]
            members.append((f"{key}.txt", caption.encode()))
        return make_tar(members)

    return {
        "edje/pretraining/cc3m/cc3m-train-0000.tar": archive(range(6)),
        "edje/pretraining/cc12m/cc12m-train-0000.tar": archive(range(6, 10)),
        "edje/pretraining/00000.tar": archive(range(10, 14)),
        "edje/pretraining/00000.parquet": _parquet([{"key": "0", "status": "success"}]),
        "edje/pretraining/00000_stats.json": _json({"successes": 4}),
    }


def imagecode_mteb() -> dict[str, bytes]:
    """Returns ImageCoDe as mteb publishes it: one pool of all images."""
    corpus = [{"id": f"s-{n}", "image": _cell(n), "modality": "image"} for n in range(NUM_QUERIES)]
    queries = [
        {"id": f"s-{n}-q", "text": _photos()[n].captions[0], "modality": "text"}
        for n in range(NUM_QUERIES)
    ]
    qrels = [
        {"query-id": f"s-{n}-q", "corpus-id": f"s-{n}", "score": 1} for n in range(NUM_QUERIES)
    ]
    configs = {"corpus": _parquet(corpus), "query": _parquet(queries), "qrels": _parquet(qrels)}
    return _snapshot("imagecode_mteb", configs)


# -- videos ----------------------------------------------------------------------------------------


@functools.cache
def _media() -> tuple[bytes, bytes]:
    """Returns a video of two seconds, and the audio file of another one."""
    with tempfile.TemporaryDirectory() as folder:
        return small_video(Path(folder), 2.0, sound=True), sound(Path(folder), 2.0)


def msrvtt() -> dict[str, bytes]:
    """Returns MSR-VTT with the 1k-A split: four training videos, and two test videos."""
    train, test = range(4), range(9770, 9772)
    numbers = (*train, *test)
    files = {f"msrvtt/videos/video{number}.mp4": _media()[0] for number in numbers}
    videos = [
        {
            "id": number,
            "video_id": f"video{number}",
            "category": 9,
            "url": "https://www.youtube.com/watch?v=aaaaaaaaaaa",
            "start time": 1.0,
            "end time": 21.0,
            "split": "train" if number in train else "test",
        }
        for number in numbers
    ]
    captions = [photo.captions for photo in _photos()[: len(numbers)]]
    sentences = [
        {"sen_id": 20 * row + n, "video_id": f"video{number}", "caption": texts[n]}
        for row, (number, texts) in enumerate(zip(numbers, captions, strict=True))
        for n in range(2)
    ]
    header = ["key", "vid_key", "video_id", "sentence"]
    rows = [
        [f"ret{row}", f"msr{number}", f"video{number}", captions[len(train) + row][0]]
        for row, number in enumerate(test)
    ]
    data = {"info": {"year": "2016"}, "videos": videos, "sentences": sentences}
    ids = [[f"video{number}"] for number in train]
    return files | {
        "msrvtt/MSRVTT_data.json": _json(data),
        "msrvtt/MSRVTT_train.9k.csv": csv_text(["video_id"], ids),
        "msrvtt/MSRVTT_JSFUSION_test.csv": csv_text(header, rows),
    }


def multivent() -> dict[str, bytes]:
    """Returns MultiVENT 2.0: shards of videos, queries, judgments and recognised text."""
    train = [f"aB3_dE-fG1{letter}" for letter in "abcd"]
    files = {
        "multivent_2_ids.csv": csv_text(["id"], [[id_] for id_ in (*train, "aB3_dE.mp4.json")])
    }
    fields = ("video_language", "video_type", "video_modality", "query_event_type")
    for split, shard, ids in (("train", "000001", train), ("test", "000003", ["200", "201"])):
        members, queries, judgments = [], [], []
        for number, video in enumerate(ids):
            caption = f"{_photos()[number].captions[0]}, {number}"
            members += [(f"{video}.mp4", _media()[0]), (f"{video}.m4a", _media()[1])]
            judgment: dict[str, Any] = {"query_id": f"q{number}", "doc_id": video, "relevance": 2}
            judgment |= dict.fromkeys(fields, "")
            if split == "train":
                query = f"internvid_english_sports_pov_base_{number}"
                judgment = {"query_id": query, "doc_id": video, "relevance": 1}
                info = {"id": video, "title": None, "description": caption}
                metadata = {"caption": caption, "yt_meta_dict": {"info": info}}
                members.append((f"{video}.json", _json(metadata)))
            queries.append([judgment["query_id"], caption])
            judgments.append(judgment)
        files |= {
            f"{split}/{shard}.tar": make_tar(members),
            f"multivent_2_{split}_queries.csv": csv_text(["Query_id", "query"], queries, "\r\n"),
            f"multivent_2_{split}_judgments.jsonl": _lines(judgments),
        }
    speech = csv_text(["video_id", "text"], [["000003/200.m4a", "good evening"]])
    transcripts = make_tar_gz([("speech_to_text/000003/200.m4a.csv", speech)])
    row = ["000003/200.mp4", "0", "0", "[[0, 0]]", "City hall"]
    text = csv_text(["video_id", "image_id", "ocr_nbr", "bbox", "text"], [row])
    frames = [("000003/200.mp4_frames/200_frame_0.png.csv", text)]
    captions = [{"doc_id": "201", "text": "a street"}]
    files |= {
        "features/test/whisper_asr.zip": make_zip([("transcription-000003.tar.gz", transcripts)]),
        "features/test/paddle_ocr.zip": make_zip(frames),
        "features/test/Qwen3-Omni-30B-A3B-Instruct_captions.jsonl": _lines(captions),
    }
    return {f"multivent/{name}": content for name, content in files.items()}


# -- MMEB-V2 ---------------------------------------------------------------------------------------

#: Kinds of the queries and candidates of image tasks: text (t), image (i) or both (it).
IMAGE_TASKS = {
    "CIRR": ("it", "i"),
    "VisDial": ("t", "i"),
    "VisualNews_t2i": ("t", "i"),
    "VisualNews_i2t": ("i", "t"),
    "MSCOCO_t2i": ("t", "i"),
    "MSCOCO_i2t": ("i", "t"),
    "NIGHTS": ("i", "i"),
    "WebQA": ("t", "it"),
    "FashionIQ": ("it", "i"),
    "Wiki-SS-NQ": ("t", "i"),
    "OVEN": ("it", "it"),
    "EDIS": ("t", "it"),
}
VIDEO_TASKS = ("MSR-VTT", "DiDeMo", "MSVD", "VATEX", "YouCook2")


def mmeb_image() -> dict[str, bytes]:
    """Returns image tasks of MMEB-V2. The first candidate of each query is relevant."""
    files: dict[str, bytes] = {}
    for task, (query, candidate) in IMAGE_TASKS.items():
        folder = f"mmeb/image-tasks/{task}"
        files |= {f"{folder}/{n}.jpg": photo.content for n, photo in enumerate(_photos()[:8])}
        rows = []
        for number in range(NUM_QUERIES // 2):
            order = [number + 1, number + 2, number + 3]
            texts = [f"{_photos()[n].captions[0]} {n}" if "t" in candidate else "" for n in order]
            images = [f"{task}/{n}.jpg" if "i" in candidate else "" for n in order]
            mark = "<|image_1|>\n"
            rows.append(
                {
                    "qry_inst": f"{mark if 'i' in query else ''}Find a match:",
                    "qry_text": _photos()[number].captions[1] if "t" in query else "",
                    "qry_img_path": f"{task}/{number}.jpg" if "i" in query else "",
                    "tgt_inst": f"{mark}Represent the image." if "i" in candidate else "",
                    "tgt_text": texts,
                    "tgt_img_path": images,
                }
            )
        files |= _snapshot(f"mmeb/MMEB_Test_Instruct/{task}", {"": _parquet(rows)})
    return {name.replace("//", "/"): content for name, content in files.items()}


@functools.cache
def _frame(number: int) -> bytes:
    """Returns a photo with the size of the frames of a video."""
    stream = io.BytesIO()
    photo = Image.open(io.BytesIO(_photos()[number % NUM_IMAGES].content))
    photo.resize((160, 120)).save(stream, "JPEG")
    return stream.getvalue()


def mmeb_video() -> dict[str, bytes]:
    """Returns the video retrieval tasks of MMEB-V2, with a folder of frames per video."""
    files: dict[str, bytes] = {}
    for task in VIDEO_TASKS:
        rows = []
        for number in range(4):
            video = f"video{number}"
            for frame in range(10):
                name = f"mmeb/video-tasks/frames/video_ret/{task}/{video}/frame_{frame}.jpg"
                files[name] = _frame(number + frame)
            caption = f"{_photos()[number].captions[0]} {number}"
            rows.append({"video_id": video, "caption": caption})
        files[f"mmeb/video/{task}/test-00000-of-00001.parquet"] = _parquet(rows)
    return files


def seeded(write: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Returns a function that writes a checkpoint whose weights do not depend on earlier calls."""

    def write_seeded(folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            write(folder)

    return write_seeded


def writers(data_sets: Iterable[str]) -> dict[str, Callable[[Path], Any]]:
    """Returns the function that writes each data set of `data.yaml` into a folder."""
    functions: dict[str, Callable[[], dict[str, bytes]]] = {
        function.__name__: function
        for function in (
            *(ms_marco, colpali_train, visdoc, flickr30k, flickr30k_entities, coco),
            *(edje_pretraining, imagecode_mteb, msrvtt, multivent),
            *(mmeb_image, mmeb_video),
        )
    }
    functions |= {"colpali_test": colpali_train, "multivent_test": multivent}
    for name in data_sets:
        family, _, member = name.partition("_")
        if family == "beir":
            functions[name] = functools.partial(beir, member)
        elif family == "vidore":
            version, _, member = member.partition("_")
            folder = f"vidore_{version}/{member}"
            functions[name] = functools.partial(vidore, folder, int(version.removeprefix("v")))
    found = {name: functools.partial(_write, function) for name, function in functions.items()}
    return {
        **found,
        "imagecode": lambda folder: imagecode(folder / "imagecode"),
        "binding": lambda folder: write_collection(folder / "binding", evaluation_pairs(2)),
        "blip_l16": lambda folder: seeded(blip)(folder / "checkpoints/blip-itm-large-coco"),
    }


def _write(files: Callable[[], dict[str, bytes]], folder: Path) -> None:
    write_files(folder, list(files().items()))
