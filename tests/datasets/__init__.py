"""Miniatures of published data sets in the formats in which they are distributed."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.images import noise, png
from tests.media import frame_times, make_tar, tones, write_video

ROOT = Path(__file__).parents[2]
PHOTOS = ROOT / "jobs/data/photos/images"
CLIP = ROOT / "jobs/data/clips/tables.mp4"


def photos(number: int) -> list[bytes]:
    """Returns photos of the repository, as the content of JPEG files."""
    files = sorted(PHOTOS.glob("*.jpg"))[:number]
    assert len(files) == number
    return [file.read_bytes() for file in files]


def csv_text(header: list[str], rows: list[list[str]], newline: str = "\n") -> bytes:
    """Returns a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator=newline).writerows([header, *rows])
    return file.getvalue().encode()


def make_tar_gz(members: list[tuple[str, bytes]]) -> bytes:
    """Returns a compressed tar archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def make_zip(members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Returns a ZIP archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


def small_video(folder: Path, seconds: float = 1.0, sound: bool = False) -> bytes:
    """Returns a video of numbered frames."""
    path = folder / "video.mp4"
    audio = tones(seconds) if sound else None
    write_video(path, frame_times(seconds, 4), size=(64, 48), audio=audio)
    data = path.read_bytes()
    path.unlink()
    return data


def sound(folder: Path, seconds: float = 1.0) -> bytes:
    """Returns an .m4a file of tones."""
    path = folder / "sound.mp4"
    write_video(path, [], audio=tones(seconds))
    data = path.read_bytes()
    path.unlink()
    return data


def multivent(folder: Path) -> dict[str, str]:
    """Writes test videos of MultiVENT 2.0 with features, queries and judgments.

    Videos 200 to 203 are in the shard 000003; 203 is corrupted by a truncated archive. One member
    of the ASR archive has another format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test").mkdir()
    video, m4a = small_video(folder), sound(folder)
    info = {"caption": "a caption", "yt_meta_dict": {"info": {"title": None, "description": "Eng"}}}
    members = [
        ("200.m4a", m4a),
        ("200.mp4", video),
        ("200.json", json.dumps(info).encode()),
        ("201.mp4", video),
        ("202.mp4", video),
        ("203.mp4", video),
    ]
    data = make_tar(members)
    (folder / "test/000003.tar").write_bytes(data[: data.rindex(b"203.mp4") + 512 + 100])
    asr = [
        ("000003/200.m4a.csv", "good evening from the council"),
        ("000003/201.m4a.csv", "flood warning, stay home"),
    ]
    header = ["video_id", "text"]
    transcripts = [
        (f"speech_to_text/{name}", csv_text(header, [[name.removesuffix(".csv"), text]]))
        for name, text in asr
    ]
    transcripts.append(("speech_to_text/000003/202.m4a.csv", b"no,such,header\n1,2,3\n"))
    inner = make_tar_gz(transcripts)
    (folder / "whisper_asr.zip").write_bytes(make_zip([("transcription-000003.tar.gz", inner)]))
    frames = []
    for number in (0, 30):
        name = f"000003/200.mp4_frames/200_frame_{number}.png.csv"
        rows = [["000003/200.mp4", str(number), "0", "[[0, 0]]", "City\0 hall"]]
        frames.append((name, csv_text(["video_id", "image_id", "ocr_nbr", "bbox", "text"], rows)))
    (folder / "paddle_ocr.zip").write_bytes(make_zip(frames))
    queries = [
        ["q1", "City council vote, spring 2021"],
        ["q2", "flood"],
        ["q3", "not judged"],
    ]
    (folder / "queries.csv").write_bytes(csv_text(["Query_id", "query"], queries, "\r\n"))
    extra = {"video_type": "", "video_modality": "", "query_event_type": ""}
    judgments = [
        {"query_id": "q1", "doc_id": "200", "relevance": 3, "video_language": "korean", **extra},
        {"query_id": "q1", "doc_id": "201", "relevance": 1, "video_language": "arabic", **extra},
        {"query_id": "q1", "doc_id": "202", "relevance": 0, "video_language": "korean", **extra},
        {"query_id": "q2", "doc_id": "201", "relevance": 2, "video_language": "arabic", **extra},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in judgments)
    (folder / "judgments.jsonl").write_text(lines)
    return {
        "path": str(folder / "test"),
        "asr": str(folder / "whisper_asr.zip"),
        "ocr": str(folder / "paddle_ocr.zip"),
    }


def msrvtt(folder: Path) -> Path:
    """Writes three videos of MSR-VTT, two of them in the test split."""
    (folder / "videos").mkdir(parents=True)
    video = small_video(folder)
    for number in (0, 9770, 9771):
        (folder / f"videos/video{number}.mp4").write_bytes(video)
    rows = [
        ["ret0", "msr9770", "video9770", "a person is fixing a bike, slowly"],
        ["ret1", "msr9771", "video9771", "a car drives"],
    ]
    header = ["key", "vid_key", "video_id", "sentence"]
    (folder / "MSRVTT_JSFUSION_test.csv").write_bytes(csv_text(header, rows))
    (folder / "MSRVTT_train.9k.csv").write_bytes(csv_text(["video_id"], [["video0"]]))
    data = {
        "info": {},
        "videos": [{"id": i, "video_id": f"video{i}", "split": "train"} for i in (0, 9770, 9771)],
        "sentences": [
            {"sen_id": 7, "video_id": "video0", "caption": "a dog"},
            {"sen_id": 8, "video_id": "video9770", "caption": "a bike"},
        ],
    }
    (folder / "MSRVTT_data.json").write_text(json.dumps(data))
    return folder


def karpathy(folder: Path, num_images: int = 4, as_zip: bool = False) -> Path:
    """Writes a Karpathy file in the format of COCO, with two captions per test image."""
    folder.mkdir(parents=True, exist_ok=True)
    images, members = [], []
    for number, data in enumerate(photos(num_images + 1)):
        name = f"COCO_val2014_{number:012}.jpg"
        members.append((f"val2014/{name}", data))
        sentences = [{"raw": f"Photo {number}, sentence {i}. ", "tokens": []} for i in range(2)]
        images.append(
            {
                "filepath": "val2014",
                "filename": name,
                "cocoid": 100 + number,
                "imgid": number,
                "split": "test" if number < num_images else "restval",
                "sentids": [2 * number, 2 * number + 1],
                "sentences": sentences,
            }
        )
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    if as_zip:
        (folder / "val2014.zip").write_bytes(make_zip(members))
    else:
        write_files(folder, members)
    return folder


def flickr30k(folder: Path) -> Path:
    """Writes one image of Flickr30K with two captions and Flickr30K Entities."""
    folder.mkdir(parents=True, exist_ok=True)
    sentences = [{"raw": "Two men in red shirts."}, {"raw": "Two men outside."}]
    image = {"filename": "11.jpg", "imgid": 0, "split": "test", "sentids": [0, 1]}
    data = {"images": [{**image, "sentences": sentences}], "dataset": "flickr30k"}
    (folder / "dataset_flickr30k.json").write_text(json.dumps(data))
    (folder / "images").mkdir()
    (folder / "images/11.jpg").write_bytes(photos(1)[0])
    for name in ("Sentences", "Annotations"):
        (folder / name).mkdir()
    (folder / "Sentences/11.txt").write_text(
        "[/EN#101/people Two men] in [/EN#102/clothing red shirts] .\n"
        "[/EN#101/people Two men] outside .\n"
    )
    (folder / "Annotations/11.xml").write_text(
        "<annotation><filename>11.jpg</filename>"
        "<size><width>500</width><height>400</height><depth>3</depth></size>"
        "<object><name>101</name><bndbox><xmin>51</xmin><ymin>1</ymin><xmax>250</xmax>"
        "<ymax>400</ymax></bndbox></object>"
        "<object><name>102</name><scene>0</scene><nobndbox>1</nobndbox></object></annotation>"
    )
    return folder


SETS = ("open-images-1a", "MSR-VTT-videoTestVideo_video1-shot1_0")


def imagecode(folder: Path) -> Path:
    """Writes two sets of ImageCoDe, whose frame numbers have different numbers of digits."""
    folder.mkdir(parents=True, exist_ok=True)
    members = [
        (f"image-sets/{name}/img{3 * frame + 2}.jpg", data)
        for name in SETS
        for frame, data in enumerate(photos(10))
    ]
    members.sort()  # archives are in lexicographic order: img11 precedes img2
    (folder / "image-sets.zip").write_bytes(make_zip(members, zipfile.ZIP_STORED))
    captions = {
        SETS[0]: {"7": "The woman looks left."},
        SETS[1]: {"0": "A dog.", "9": "Both hands are up."},
    }
    (folder / "valid_data.json").write_text(json.dumps(captions))
    unlabelled = {SETS[0]: ["The woman looks left."]}
    (folder / "test_data_unlabeled.json").write_text(json.dumps(unlabelled))
    return folder


def mmeb(folder: Path) -> Path:
    """Writes tasks of MMEB-V2: composed queries, images as queries of texts, and videos."""
    images = folder / "image-tasks/CIRR"
    images.mkdir(parents=True)
    for number, data in enumerate(photos(4)):
        (images / f"{number}.jpg").write_bytes(data)
    instruction = "<|image_1|>\nGiven an image, find a similar image:"
    cirr = [
        {
            "qry_inst": instruction,
            "qry_text": "Show three bottles.",
            "qry_img_path": "CIRR/0.jpg",
            "tgt_inst": "<|image_1|>\nRepresent the given image.",
            "tgt_text": ["", "", ""],
            "tgt_img_path": ["CIRR/1.jpg", "CIRR/2.jpg", "CIRR/3.jpg"],
        },
        {
            "qry_inst": instruction,
            "qry_text": "But in red.",
            "qry_img_path": "CIRR/1.jpg",
            "tgt_inst": "<|image_1|>\nRepresent the given image.",
            "tgt_text": ["", "a caption"],
            "tgt_img_path": ["CIRR/3.jpg", "CIRR/2.jpg"],
        },
    ]
    write_table(folder / "CIRR/test-00000-of-00001.parquet", cirr)
    classes = [
        {
            "qry_inst": "<|image_1|>\nIdentify the object in the image:",
            "qry_text": "",
            "qry_img_path": "CIRR/0.jpg",
            "tgt_inst": "",
            "tgt_text": ["cat", "dog", "x" * 600],
            "tgt_img_path": ["", "", ""],
        }
    ]
    write_table(folder / "ImageNet/test-00000-of-00001.parquet", classes)
    frames = folder / "video-tasks/frames/video_ret/MSR-VTT"
    for video in ("video1", "video2"):
        (frames / video).mkdir(parents=True)
        for number in range(12):
            image = noise(32, 24, seed=number)
            (frames / video / f"frame_{number}.png").write_bytes(png(image))
    videos = [
        {"video_id": video, "video": f"{video}.mp4", "caption": f"caption of {video}"}
        for video in ("video1", "video2")
    ]
    write_table(folder / "MSR-VTT/test-00000-of-00001.parquet", videos)
    return folder


def vidore(folder: Path, box: dict[str, int] | None = None) -> Path:
    """Writes two pages of ViDoRe v3 with a query in two languages and a box."""
    pages = [png(noise(200, 100, seed)) for seed in range(2)]
    corpus = [
        {
            "corpus_id": number,
            "image": {"bytes": page, "path": None},
            "doc_id": "d1",
            "markdown": f"# Page {number}",
            "page_number_in_doc": number + 1,
        }
        for number, page in enumerate(pages)
    ]
    write_table(folder / "corpus/test-00000-of-00001.parquet", corpus)
    queries = [
        {"query_id": 7, "query": "What is the dose?", "language": "english", "answer": "5 mg"},
        {"query_id": 8, "query": "Welche Dosis?", "language": "german", "answer": "5 mg"},
    ]
    write_table(folder / "queries/test-00000-of-00001.parquet", queries)
    boxes = [box or {"annotator": 0, "x1": 20, "x2": 100, "y1": 10, "y2": 50}]
    qrels = [
        {"query_id": query, "corpus_id": page, "score": score, "bounding_boxes": found}
        for query in (7, 8)
        for page, score, found in ((0, 2, boxes), (1, 1, []))
    ]
    write_table(folder / "qrels/test-00000-of-00001.parquet", qrels)
    return folder


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_files(folder: Path, members: list[tuple[str, bytes]]) -> None:
    """Writes files below a folder."""
    for name, data in members:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
