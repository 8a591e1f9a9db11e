"""MSR-VTT on miniatures."""

from __future__ import annotations

import json

import pytest

from pipeline.config import SpecError
from tests import datasets
from tests.data.listing import build, read
from tests.datasets.loading import load
from tests.train.data.files import build_data
from tests.train.data.media import write_msrvtt


def test_videos_of_a_split(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    videos = str(folder / "videos")
    for file, names in (
        ("MSRVTT_JSFUSION_test.csv", ["video9770", "video9771"]),
        ("MSRVTT_train.9k.csv", ["video0"]),
    ):
        items, rejects = read(
            build(
                "msrvtt", ("frames",), path=videos, video_ids=str(folder / file), sampling="uniform"
            )
        )
        assert list(items) == names and not rejects
        assert all(len(item.payload["frames"]) for item in items.values())


def test_zip_of_videos(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    members = [(f"all/{file.name}", file.read_bytes()) for file in (folder / "videos").iterdir()]
    (folder / "zipped").mkdir()
    (folder / "zipped/MSRVTT.zip").write_bytes(datasets.make_zip(members))
    fields = {"path": str(folder / "zipped"), "video_ids": str(folder / "MSRVTT_JSFUSION_test.csv")}
    items, rejects = read(build("msrvtt", ("frames",), **fields, sampling="uniform"))
    assert sorted(items) == ["video9770", "video9771"] and not rejects


def test_missing_videos_are_named(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    (folder / "videos/video9771.mp4").unlink()
    fields = {
        "path": str(folder / "videos"),
        "video_ids": str(folder / "MSRVTT_JSFUSION_test.csv"),
    }
    with pytest.raises(SpecError, match=r"lacks 1 of them: video9771\.mp4; add them"):
        build("msrvtt", **fields)
    assert list(read(build("msrvtt", **fields, missing="skip"))[0]) == ["video9770"]


NINE, TESTS = "MSRVTT_train.9k.csv", "MSRVTT_JSFUSION_test.csv"


def build_msrvtt(folder, batch_size=2, **more):
    if "splits" not in more:
        more = {"ids": folder / NINE, **more}
    path, videos = folder / "MSRVTT_data.json", folder / "videos"
    return build_data(batch_size, name="msrvtt", path=path, videos=videos, **more)


def test_msrvtt_format(tmp_path):
    folder = write_msrvtt(tmp_path, trained=2, tested=2, has_audio=False)
    (folder / "videos/all").mkdir()  # any folder below
    (folder / "videos/video1.mp4").rename(folder / "videos/all/video1.mp4")
    data = build_msrvtt(
        folder, 4, validation={"path": str(folder / TESTS)}, media={"inputs": ["frames"]}
    )
    asked = {(row.query, data.training.documents[row.document].id) for row in data.training.rows}
    assert asked == {
        (f"{words} {n}", f"video{n}")
        for n in range(2)
        for words in ("a car drives", "somebody sings")
    }
    (batch,) = data.batches(0, 0, 0, 1)
    assert len(batch.documents) == 2 and all(document["frames"] for document in batch.documents)
    validation = data.validation()
    assert validation.queries == ["a car, red"] and len(validation.documents) == 2
    assert data.relevant(validation.query_labels, validation.document_labels).all()
    splits = build_msrvtt(folder, splits=["train"])
    assert [row.query for row in splits.training.rows] == [row.query for row in data.training.rows]
    # As written by spreadsheets.
    text = (folder / NINE).read_text().replace("\n", "\r\n")
    (folder / NINE).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert len(build_msrvtt(folder).training.rows) == 4


def change_file(folder, name, change):
    """Applies a change to a file."""
    path = folder / name
    if name.endswith(".json"):
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(change(path.read_bytes()))


FORM = "MSR-VTT's {videos: [{video_id, split}], sentences: [{video_id, caption}]}"


BAD_MSRVTT = [
    (
        *("MSRVTT_data.json", lambda value: value.pop("videos")),
        f"data.path must be {FORM}, got '{{}}/MSRVTT_data.json', which has another format (field"
        " 'videos' is required)",
    ),
    (
        *("MSRVTT_data.json", lambda value: value["videos"].append({"id": 9})),
        f"data.path must be {FORM}, got '{{}}/MSRVTT_data.json', which has another format (field"
        " 'video_id' is required in videos[3])",
    ),
    (
        *("MSRVTT_data.json", lambda value: value["sentences"][3].update(video_id="video9")),
        "data.path must be the video_id of a video, got 'video9' (sentence 3 of"
        " {}/MSRVTT_data.json)",
    ),
    (
        *("MSRVTT_data.json", lambda value: value["sentences"][1].update(caption=" ")),
        "data.path must be a text with at least one word, got ' ' (sentence 1 of"
        " {}/MSRVTT_data.json)",
    ),
    (
        *(NINE, lambda data: data + b"video77\n"),
        "data.ids must be the id of a video of {}/MSRVTT_data.json, got 'video77' (line 4 of"
        f" {{}}/{NINE})",
    ),
    (
        *(NINE, lambda data: data.replace(b"video_id", b"id")),
        f"data.ids must be 'id', got 'video_id', which is not a column of {{}}/{NINE}",
    ),
    (
        *(NINE, lambda data: data + b'"video1'),
        f"data.ids must be a valid CSV file, got '{{}}/{NINE}', which is malformed in line 4"
        " (unexpected end of data)",
    ),
    (
        *(NINE, lambda data: data + b"vid\xff"),
        f"data.ids must be a UTF-8 file, got '{{}}/{NINE}', which is malformed in line 4",
    ),
    (
        *(TESTS, lambda data: data + b"ret9,msr9,video9\n"),
        "data.validation.path must be a row of key, vid_key, video_id, sentence, got ['ret9',"
        f" 'msr9', 'video9'] (line 3 of {{}}/{TESTS})",
    ),
]


@pytest.fixture(scope="module")
def small_msrvtt(tmp_path_factory):
    return write_msrvtt(tmp_path_factory.mktemp("msrvtt"), trained=2, tested=1, has_audio=False)


@pytest.mark.parametrize(("name", "change", "message"), BAD_MSRVTT)
def test_malformed_msrvtt_files(name, change, message, small_msrvtt, tmp_path):
    for path in small_msrvtt.iterdir():
        (tmp_path / path.name).symlink_to(path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(data)
    change_file(tmp_path, name, change)
    with pytest.raises(SpecError) as error:
        build_msrvtt(tmp_path, validation={"path": str(tmp_path / TESTS)})
    assert str(error.value) == message.replace("{}", str(tmp_path))


def test_invalid_msrvtt_specs(small_msrvtt, tmp_path):
    cases = {
        "data.splits must be one of test, train, got 'val', which is not a split of"
        " {}/MSRVTT_data.json": {"splits": ["val"]},
        "ids must be a file of ids such as MSRVTT_train.9k.csv, or null when splits is set, got"
        " None": {"ids": None},
    }
    for message, fields in cases.items():
        with pytest.raises(SpecError) as error:
            build_msrvtt(small_msrvtt, **fields)
        assert str(error.value) == message.replace("{}", str(small_msrvtt))
    with pytest.raises(
        SpecError, match="^data.videos must be an existing file or folder, got '/nowhere'"
    ):
        path = small_msrvtt / "MSRVTT_data.json"
        build_data(2, name="msrvtt", path=path, videos="/nowhere", splits=["train"])


def test_msrvtt(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    judged = load("msrvtt", path=str(folder / "MSRVTT_JSFUSION_test.csv"), num_queries=2)
    assert judged.queries == {"ret0": "a person is fixing a bike, slowly", "ret1": "a car drives"}
    assert judged.qrels == {"ret0": {"video9770": 1}, "ret1": {"video9771": 1}}
    fields = {"path": str(folder / "MSRVTT_data.json")}
    train = load("msrvtt", **fields, video_ids=str(folder / "MSRVTT_train.9k.csv"))
    assert train.queries == {"0": "a dog"} and train.qrels == {"0": {"video0": 1}}
