"""Errors of specs, assignments, and renamed fields: unchanged hashes and specs of old versions."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field

from pipeline.config import Spec, SpecError, Uri, assign, digest, dump, dump_stored, override, parse
from pipeline.eval.results import method_name
from pipeline.index.columns import Representation
from pipeline.index.recompress import RecompressResources
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import COMPRESSORS, ENCODERS, SOURCES, SPEECH
from pipeline.search.candidates_job import CandidatesResources
from pipeline.sources.video import Video
from pipeline.stage import PROFILE_JOBS, Profile
from pipeline.train.ray import Workers
from pipeline.training_data.media import Decoding, decoding_settings
from tests.conftest import ROOT

COLPALI = {
    "name": "colpali",
    "model": f"{ROOT}/jobs/data/models/shapes_colpali",
    "dtype": "float32",
    "output_tokens": "visual",
    "query_prefix": "",
    "num_augmentation": 0,
}
#: Spec with the field names of earlier versions, as in their `spec.yaml`.
FORMER = {
    "index": "/data/index",
    "source": {
        "name": "several",
        "sources": [
            {
                "name": "video",
                "path": "/data/videos",
                "sampling": "scenes",
                "look_fps": 4,
                "collection": "a",
                "limits": {"seconds": 60},
            },
            {"name": "text", "path": "/data/t.jsonl", "collection": "b"},
        ],
    },
    "encoder": {
        "name": "transcript",
        "ocr": None,
        "speech": {"name": "pocketsphinx", "longest": 10, "pause": 1},
    },
    "representations": [
        {"compressor": {"name": "samer", "num_vectors": 8}, "of": "caption", "codec": "int8"}
    ],
}
#: The same spec with the present names.
PRESENT = {
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


def without_new_fields(value: Any) -> Any:
    """Removes the fields that were added after the expected hashes were computed."""
    if isinstance(value, list):
        return [without_new_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    new = ("appended_tokens", "custom_template", "pooled_layer", "audio_rate")
    return {name: without_new_fields(v) for name, v in value.items() if name not in new}


def test_fingerprint_is_that_of_the_former_names():
    """The expected hashes were computed before the fields were renamed."""
    assert ENCODERS.build(ENCODERS.resolve(COLPALI)).fingerprint == "71286cdc61dea289"


def test_hashes_are_those_of_the_former_names():
    """The expected hashes were computed before the fields were renamed."""
    spec = parse(IndexSpec, PRESENT)
    hashed = {"source": dump_stored(spec.source), "encoder": dump_stored(spec.encoder)}
    assert spec.listing_job("/job").spec_digest == digest(hashed)
    assert digest(without_new_fields(hashed)) == "df203a46a6b70269"
    (representation,) = spec.representations
    assert representation.id == "caption_samer_8_int8"
    source = SOURCES.build(spec.source.sources[0], ("frames",))
    assert isinstance(source, Video)
    settings = source.spec.with_first_names(source.settings())
    assert settings["look_fps"] == 4 and "scene_detection_fps" not in settings
    media = Decoding(sampling="scenes", scene_detection_fps=4, inputs=("frames",))
    assert digest(decoding_settings(media)) == "6a8e4e90e6b89635"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen_vl", "5c3c4843c97339a5"),
        ("jina_v4", "0235f9ad6372d1b5"),
        ("qwen_omni", "29de3028b0df5287"),
        ("colqwen2", "b819d89d56efc3d7"),
        ("colmodernvbert", "f5aa4e5057a0fb5c"),
    ],
)
def test_encoder_specs_hash_as_before(name, expected):
    spec = ENCODERS.resolve({"name": name, "model": "/m"})
    assert digest(without_new_fields(dump_stored(spec))) == expected


def test_column_ids_have_the_former_names():
    """The expected names and hashes were computed before the fields were renamed."""
    adaptive = {"name": "adaptive", "num_vectors": 8, "min_budget": 0.5, "max_budget": 2}
    representation = parse(Representation, {"compressor": adaptive})
    assert representation.id == "adaptive_hpool_lowest0_5_highest2_0_8"
    assert digest(representation.compressor) == "bc9f3788fef672a2"
    light = {"name": "light_colpali", "num_vectors": 8, "distance_dtype": "float64"}
    representation = parse(Representation, {"compressor": light})
    assert representation.id == "light_colpali_float64_8"
    assert digest(representation.compressor) == "897a09619cc02551"
    stored = dump_stored(COMPRESSORS.resolve(adaptive))
    assert method_name(stored) == "adaptive (hpool) min_budget=0.5 max_budget=2.0"
    assert method_name(dump_stored(COMPRESSORS.resolve(light | {"distance_dtype": "float16"}))) == (
        "light_colpali"
    )


def test_stored_specs_with_former_names():
    spec = parse(IndexSpec, FORMER, stored=True)
    assert spec == parse(IndexSpec, PRESENT)
    assert dump(spec)["source"]["name"] == "combined"
    assert dump_stored(spec)["source"]["name"] == "several"
    assert parse(IndexSpec, dump_stored(spec), stored=True) == spec
    assert parse(IndexSpec, dump(spec)) == spec
    encoder = ENCODERS.resolve(COLPALI)
    stored = dump_stored(encoder)
    assert stored["keep"] == "visual" and "output_tokens" not in stored
    assert ENCODERS.resolve(stored, stored=True) == encoder


@pytest.mark.parametrize(
    ("spec_class", "fields", "name", "present"),
    [
        (Representation, {"compressor": "none", "of": "caption"}, "of", "field"),
        (
            Representation,
            {"compressor": "none", "keep_support": True},
            "keep_support",
            "keep_assignment",
        ),
        *(
            (ENCODERS.spec_class(name), {"model": "/m", "keep": "all"}, "keep", "output_tokens")
            for name in (
                "colpali",
                "colqwen2",
                "colmodernvbert",
                "jina_v4",
                "qwen_vl",
                "qwen_omni",
            )
        ),
        (
            COMPRESSORS.spec_class("adaptive"),
            {"num_vectors": 8, "lowest": 0},
            "lowest",
            "min_budget",
        ),
        (
            COMPRESSORS.spec_class("adaptive"),
            {"num_vectors": 8, "highest": 2},
            "highest",
            "max_budget",
        ),
        (
            COMPRESSORS.spec_class("light_colpali"),
            {"num_vectors": 8, "distances": "float64"},
            "distances",
            "distance_dtype",
        ),
        (Video.Spec, {"path": "/v", "look_fps": 4}, "look_fps", "scene_detection_fps"),
        (Decoding, {"look_fps": 4}, "look_fps", "scene_detection_fps"),
        (Decoding, {"wants": ["frames"]}, "wants", "inputs"),
        (Decoding, {"limits": {"seconds": 9}}, "limits.seconds", "max_seconds"),
        (Decoding, {"limits": {"memory_bytes": 9}}, "limits.memory_bytes", "max_memory_bytes"),
        (SPEECH.spec_class("pocketsphinx"), {"longest": 10}, "longest", "max_utterance_seconds"),
        (SPEECH.spec_class("pocketsphinx"), {"pause": 1}, "pause", "min_pause_seconds"),
    ],
)
def test_error_names_the_present_field(
    spec_class: Any, fields: dict[str, Any], name: str, present: str
):
    with pytest.raises(SpecError) as raised:
        parse(spec_class, fields)
    assert raised.value.field == name
    assert f"was renamed to {present!r}" in str(raised.value)


def test_errors_name_the_present_value():
    with pytest.raises(SpecError, match="^documents: .* was renamed to 'images'$"):
        ENCODERS.resolve({"name": "qwen_vl", "model": "/m", "documents": "pictures"})
    with pytest.raises(SpecError, match="^name: 'several' was renamed to 'combined'$"):
        SOURCES.resolve({"name": "several", "sources": [{"name": "text", "path": "/t"}]})
    stored = {"name": "jina_v4", "model": "/m", "documents": "pictures"}
    spec = ENCODERS.resolve(stored, stored=True)
    assert dump(spec)["documents"] == "images" and dump_stored(spec)["documents"] == "pictures"


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


def test_encoders_for_benchmarks_are_not_listed():
    assert ENCODERS.resolve("sleeping").name == "sleeping"
    assert "sleeping" not in ENCODERS.names()
    with pytest.raises(SpecError) as caught:
        ENCODERS.resolve("sleepin")
    assert "sleeping" not in str(caught.value)


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
        ("layer=a #b", "layer must be an integer, got 'a'"),
        ("layer=[1", r"layer must be a YAML value, got '\[1', which cannot be parsed"),
        ("nested.ids={", r"nested.ids must be a YAML value, got '{', which cannot be parsed"),
        ("mode=NO", "mode must be one of on, off, got 'NO'"),
    ):
        with pytest.raises(SpecError, match=message):
            parse(Fields, override({}, [assignment]))
