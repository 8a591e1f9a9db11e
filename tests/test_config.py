"""Errors, hashes and assignments of specs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field

from pipeline.config import Spec, SpecError, Uri, assign, digest, dump, override, parse
from pipeline.eval.results import method_name
from pipeline.index.columns import Representation
from pipeline.index.recompress import RecompressResources
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import PROFILE_JOBS, Profile
from pipeline.registry import ENCODERS, SOURCES
from pipeline.search.candidates_job import CandidatesResources
from pipeline.train.data.media import Decoding, decoding_settings
from pipeline.train.ray import Workers
from tests.conftest import ROOT
from tests.tiny import SLEEPING
from tests.tiny.sleeping import Sleeping

COLPALI = {
    "name": "colpali",
    "model": f"{ROOT}/jobs/data/models/shapes_colpali",
    "dtype": "float32",
    "output_tokens": "visual",
    "query_prefix": "",
    "num_augmentation": 0,
}
#: Spec of an index.
INDEX = {
    "index": "/data/index",
    "source": [
        {
            "name": "video",
            "path": "/data/videos",
            "sampling": "scenes",
            "scene_detection_fps": 4,
            "collection": "a",
            "limits": {"max_seconds": 60},
        },
        {"name": "text", "path": "/data/t.jsonl", "collection": "b"},
    ],
    "encoder": {
        "name": "transcript",
        "ocr": None,
        "speech": {"name": "pocketsphinx", "max_utterance_seconds": 10, "min_pause_seconds": 1},
    },
    "representations": [
        {"compressor": {"name": "samer", "num_vectors": 8}, "field": "caption", "codec": "int8"}
    ],
}


def test_fingerprint_of_the_shipped_model():
    """A change makes stored indexes and the shipped EDJE model unusable."""
    assert ENCODERS.build(ENCODERS.resolve(COLPALI)).fingerprint == "65c95467218123f3"


def test_hashed_specs():
    spec = parse(IndexSpec, INDEX)
    hashed = {"source": dump(spec.source), "encoder": dump(spec.encoder)}
    assert spec.listing_job("/job").spec_digest == digest(hashed)
    assert digest(spec.source) == digest(hashed["source"])
    (representation,) = spec.representations
    assert representation.id == "caption_samer_8_int8"
    media = Decoding(sampling="scenes", scene_detection_fps=4, inputs=("frames",))
    settings = decoding_settings(media)
    assert settings["scene_detection_fps"] == 4 and "limits" not in settings


def test_names_of_settings():
    adaptive = {"name": "adaptive", "num_vectors": 8, "min_budget": 0.5, "max_budget": 2}
    representation = parse(Representation, {"compressor": adaptive})
    assert representation.id == "adaptive_hpool_min_budget0_5_max_budget2_0_8"
    stored = dump(representation.compressor)
    assert method_name(stored) == "adaptive (hpool) min_budget=0.5 max_budget=2.0"


def test_dumped_specs_are_equal_when_parsed():
    spec = parse(IndexSpec, INDEX)
    assert dump(spec)["source"]["name"] == "combined"
    assert parse(IndexSpec, dump(spec)) == spec
    encoder = ENCODERS.resolve(COLPALI)
    assert ENCODERS.resolve(dump(encoder)) == encoder
    assert "output_tokens" not in dump(encoder, exclude=["output_tokens"])


@pytest.mark.parametrize(
    ("representation", "message"),
    [
        ({"compressor": "kcentre", "num_vectors": 32}, r"compressor\.name .* mean 'kcenter'\?$"),
        ({"compressor": {"name": "kcentre", "num_vector": 32}}, r"\.name .* mean 'kcenter'\?$"),
        ({"compressor": {"name": "adaptive", "method": "hpol"}}, r"method\.name .* mean 'hpool'"),
        (
            {"compressor": "kcenter", "num_vectors": 32},
            r"'num_vectors' is required in .*compressor",
        ),
        ({"compressor": "none", "num_vectors": 32}, r"unknown field 'num_vectors' in rep"),
    ],
)
def test_unknown_component_precedes_its_options(representation, message):
    fields = {"index": "x", "source": {"name": "text", "path": "x"}}
    with pytest.raises(SpecError, match=message):
        parse(IndexSpec, {**fields, "representations": [representation]})


PROFILES = [IndexResources, RecompressResources, CandidatesResources, Workers]


@pytest.mark.parametrize(
    ("profile", "field", "verbs"),
    [
        (RecompressResources, "read", "jobs.index and jobs.add tokens"),
        (
            CandidatesResources,
            "compress",
            "jobs.index, jobs.add tokens and jobs.add representations",
        ),
        (IndexResources, "fit", "jobs.add candidates"),
        (IndexResources, "num_workers", "jobs.train"),
        (Workers, "encode", "jobs.index, jobs.add tokens and jobs.add candidates"),
    ],
)
def test_field_of_the_profile_of_another_job(profile, field, verbs):
    message = f"unknown field '{field}'.*; '{field}' is a field of the profiles of {verbs}$"
    with pytest.raises(SpecError, match=message):
        parse(profile, {field: {}})


def test_fields_of_all_profiles_are_known():
    fields = {name for profile in PROFILES for name in profile.model_fields}
    common = {*Profile.model_fields, "num_cpus", "num_gpus"}
    assert fields - common == PROFILE_JOBS.keys()


def test_component_by_import_path():
    spec = ENCODERS.resolve({"class": SLEEPING, "dim": 8})
    assert ENCODERS.resolve(dump(spec)) == spec
    assert isinstance(ENCODERS.build(spec), Sleeping)
    with pytest.raises(SpecError, match="^class must be omitted if there is a name, got 'tests"):
        ENCODERS.resolve({"class": SLEEPING, "name": "minilm"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:Sleeping", "needs the missing module 'nowhere'"),
        ("tests.tiny.sleeping:Sleepin", "which is not a class with a Spec"),
        ("subprocess:Popen", "which is not a class with a Spec"),
        ("tests.tiny.sleeping", "must be one of colbert, .*, got 'tests.tiny.sleeping'"),
    ],
)
def test_import_path_without_component(path, message):
    with pytest.raises(SpecError, match=message):
        ENCODERS.resolve({"class": path})


class Nested(Spec):
    prefix: str = ""
    ids: list[str] = Field(default_factory=list)


class Fields(Spec):
    index: Uri = "/index"
    title: str = ""
    collection: str | None = None
    layer: int = -1
    ratio: float | str = "auto"
    names: list[str] | str = ""
    enabled: bool = False
    mode: Literal["on", "off"] = "on"
    nested: Nested = Nested()
    items: list[Nested] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    sweep: dict[str, Any] = Field(default_factory=dict)


TEXTS = ["out/run #2", "scans: 2026", "*a", "&a", "!a", "{a", "{a: b}", "[a]", "010", "12:30"]
TEXTS += ["NO", "on", "yes", "~", "2026-01-02", " a ", "'a'", '"a"', "1e3", "a: #b", "-", "", "a=b"]


@pytest.mark.parametrize("text", TEXTS)
def test_assigned_texts_are_unchanged(text):
    fields = ["title", "nested.prefix", "items.0.prefix", "labels.a"]
    spec = parse(
        Fields, override({"items": [{"prefix": "x"}]}, [f"{field}={text}" for field in fields])
    )
    assert (spec.title, spec.nested.prefix, spec.items[0].prefix) == (text, text, text)
    assert spec.labels == {"a": text} and type(spec.title) is str
    assert parse(Fields, override({}, [f"collection={text}"])).collection == (text or None)
    if text and text != "~":
        assert parse(Fields, override({}, [f"index=/a/{text}"])).index == f"/a/{text}"
        source = SOURCES.resolve(override({"name": "text", "path": "/a"}, [f"collection={text}"]))
        assert source.collection == text


ASSIGNED = [
    ("title=null", "null"),
    ("collection=null", None),
    ("layer=-2", -2),
    ("ratio=1", 1.0),
    ("ratio=auto", "auto"),
    ("ratio=NO", "NO"),
    ("names=[a, b]", ["a", "b"]),
    ("names=a: b", "a: b"),
    ("enabled=yes", True),
    ("mode=off", "off"),
    ("nested={prefix: a, ids: [b]}", Nested(prefix="a", ids=["b"])),
    ("items=[{prefix: a}]", [Nested(prefix="a")]),
    ("labels={a: b}", {"a": "b"}),
    ("sweep.a.b=[8, NO]", {"a": {"b": [8, False]}}),
]


@pytest.mark.parametrize(("assignment", "value"), ASSIGNED)
def test_assigned_values_have_the_type_of_the_field(assignment, value):
    spec = parse(Fields, override({}, [assignment]))
    assert getattr(spec, assignment.partition("=")[0].partition(".")[0]) == value


def test_assignments_build_on_each_other():
    fields = override({}, ["nested={prefix: a}", "nested.ids=[b]", "sweep=null", "sweep.x=1"])
    spec = parse(Fields, fields)
    assert spec.nested == Nested(prefix="a", ids=["b"]) and spec.sweep == {"x": 1}


def test_assigned_values_are_not_shared():
    shared = {"prefix": "a"}
    changed = assign({}, [("nested", shared), ("nested.prefix", "b")])
    assert changed == {"nested": {"prefix": "b"}} and shared == {"prefix": "a"}


def test_errors_of_assignments():
    for assignment, message in (
        ("layer=a #b", "layer must be a valid integer, unable to parse .*, got 'a'"),
        ("layer=[1", r"layer must be a YAML value, got '\[1', which cannot be parsed"),
        ("nested.ids={", r"nested.ids must be a YAML value, got '{', which cannot be parsed"),
        ("mode=NO", "mode must be 'on' or 'off', got 'NO'"),
    ):
        with pytest.raises(SpecError, match=message):
            parse(Fields, override({}, [assignment]))
