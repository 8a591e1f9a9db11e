"""Tests of the modules of the page that need neither a server of items nor the document."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import zipfile

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.heavy]


@pytest.fixture
def page(browser, page_url):
    browser.open(page_url)
    return browser


def js(value: object) -> str:
    return json.dumps(value)


# -- state.js --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"q": "lift & drag? 100 % #1", "k": "20"},
        {"item": "a/b.pdf#page=1", "box": "0.1,0.2,0.3,0.4", "view": "compare", "rep2": "x@8"},
        {"filter": "title = 'it''s + 1'", "rerank": "vectors:full", "depth": "5"},
    ],
)
def test_state_survives_the_url(page, change):
    expression = f"m.parseState(m.formatState({{...m.DEFAULTS, ...{js(change)}}}))"
    state = page.module("state.js", expression)
    defaults = page.module("state.js", "m.DEFAULTS")
    assert state == {**defaults, **change}
    assert page.module("state.js", "m.formatState(m.DEFAULTS)") == ""


def test_search_bodies(page):
    def body(change: dict, attachment: dict | None = None, side: str = "a") -> dict:
        arguments = f"{{...m.DEFAULTS, ...{js(change)}}}, {js(attachment)}, {js(side)}"
        return page.module("state.js", f"m.searchBody({arguments})")

    assert body({"q": " wing ", "index": "i"}) == {"query": "wing", "index": "i", "k": 10}
    assert body({"q": "a"}, {"image": "AA"})["query"] == {"text": "a", "image": "AA"}
    assert body({}, {"audio": "AA"})["query"] == {"audio": "AA"}
    assert body({"q": "a", "negative": " b "})["negative"] == "b"
    item = body({"item": "x", "box": "0,0,0.5,1", "times": "1,2"})
    assert item["query"] == {"item": "x", "box": [0, 0, 0.5, 1], "times": [1, 2]}
    assert item["k"] == 11  # the item itself is not shown
    sides = {"q": "a", "rep": "full", "rep2": "hpool_4", "rerank2": "vectors:full", "depth": "7"}
    assert body(sides)["representation"] == "full" and "rerank" not in body(sides)
    right = body(sides, None, "b")
    assert right["representation"] == "hpool_4"
    assert right["rerank"] == {"name": "vectors", "representation": "full", "top": 7}
    model = body({"q": "a", "rerank": "edje", "depth": "7"})
    assert model["rerank"] == {"name": "edje", "optional": True, "top": 7}
    scores = {"q": "a", "score": "hybrid"}
    assert body(scores)["score"] == body(scores, None, "b")["score"] == "hybrid"
    assert body({**scores, "score2": "fused"}, None, "b")["score"] == "fused"
    assert "score" not in body({**scores, "score2": "maxsim"}, None, "b")
    assert body({"q": "a", "k": "many"})["k"] == "many"  # the API names the field
    assert body({"q": "a", "k": " "})["k"] == 10 and body({"item": "x", "k": ""})["k"] == 11


@pytest.mark.parametrize(
    "selected",
    [
        {"modality": ["page"], "source": []},
        {"modality": ["page", "text"], "source": ["it's", "a, 'b'"]},
        {"modality": [], "source": []},
    ],
)
def test_facet_filters(page, selected):
    columns = js(["modality", "source"])
    expression = f"m.parseFacetFilter(m.facetFilter({js(selected)}), {columns})"
    assert page.module("state.js", expression) == selected


@pytest.mark.parametrize(
    "filter",
    [
        "modality IN ('page','text') AND source='web'",
        " modality in('page' , 'text')and  source\n=  'web' ",
    ],
)
def test_facets_of_filters_with_other_white_space(page, filter):
    expression = f"m.parseFacetFilter({js(filter)}, {js(['modality', 'source'])})"
    selected = page.module("state.js", expression)
    assert selected == {"modality": ["page", "text"], "source": ["web"]}


@pytest.mark.parametrize(
    "filter",
    [
        "title = 'x'",
        "modality = 'a' OR 1 = 1",
        "modality = 'a",
        "modality <> 'a'",
        "modalityin ('a')",
    ],
)
def test_edited_filters_have_no_facets(page, filter):
    expression = f"m.parseFacetFilter({js(filter)}, {js(['modality'])})"
    assert page.module("state.js", expression) is None


# -- colours.js ------------------------------------------------------------------------------------


def test_luminance_of_the_scale_decreases(page):
    values = page.module(
        "colours.js", "Array.from({length: 101}, (_, i) => m.luminance(m.colour(i / 100)))"
    )
    assert all(a > b for a, b in itertools.pairwise(values))
    assert values[0] > 0.85 and values[-1] < 0.08


def test_text_on_the_scale_has_contrast(page):
    pairs = page.module(
        "colours.js",
        "Array.from({length: 101}, (_, i) => [m.luminance(m.colour(i / 100)),"
        " m.textColour(i / 100)])",
    )
    for luminance, text in pairs:
        other = 1.0 if text == "#ffffff" else 0.0
        low, high = sorted((luminance, other))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_positions(page):
    expression = "[0, 1, 2, 3, NaN, null].map((v) => m.position(v, [1, 2]))"
    assert page.module("colours.js", expression) == [0, 0, 1, 1, None, None]


def test_range_over_all_hits(page):
    """The scale begins at the lowest mean similarity and ends at the highest similarity."""
    hits = [
        {"matches": [{"similarity": 0.9, "contribution": 0.5}]},
        {"matches": [{"similarity": 0.4, "contribution": 0.2}]},
    ]
    low, high = page.module("colours.js", f"m.similarityRange({js(hits)})")
    assert (low, high) == (pytest.approx(0.2), 0.9)
    assert page.module("colours.js", f"m.contributionRange({js(hits)})") == [0, 0.5]


def test_shown_words(page):
    """Words that share a vector have its similarity only if it is the best one."""
    words = [
        {"vector": vector, "similarities": [0.1 * vector, 0.5], "highlight": 0.2}
        for vector in (0, 1, 1, 2)
    ]
    matches = [{"document_token": 1}, {"document_token": 0}]

    def shown(evidence: str, words: list[dict]) -> list[list[float | None]]:
        map = js({"words": words, "evidence": evidence})
        expression = f"m.shownWords({map}, {js(matches)}, 'hpool_2')"
        return [word["similarities"] for word in page.module("map.js", expression)]

    words[3] |= {"vector": None, "similarities": [None, None]}
    assert shown("hpool_2", words) == [[None, 0.5], [0.1, None], [0.1, None], [None, None]]
    assert shown("full", words) == [word["similarities"] for word in words]
    single = [words[0], words[1]]
    assert shown("hpool_2", single) == [word["similarities"] for word in single]


def test_range_of_words(page):
    words = [
        {"similarities": [0.2, 0.9], "highlight": 0.3},
        {"similarities": [0.4, 0.5], "highlight": 0.1},
        {"similarities": [None, None], "highlight": 0.0},
    ]
    assert page.module("colours.js", f"m.wordRange({js(words)}, null)") == [0, 0.3]
    assert page.module("colours.js", f"m.wordRange({js(words)}, 1)") == pytest.approx([0.7, 0.9])


# -- ranks.js --------------------------------------------------------------------------------------


def test_ranks_equal_literal_implementations(page):
    generator = random.Random(0)
    for _ in range(5):
        one, other = (generator.sample("abcdefghij", 7) for _ in range(2))
        k = generator.randint(1, 8)
        both = f"{js(one)}, {js(other)}"
        found = page.module("ranks.js", f"m.overlap({both}, {k})")
        assert found == pytest.approx(len({*one[:k]} & {*other[:k]}) / min(k, 7))
        common = [i for i in one if i in other]
        pairs = [*itertools.combinations(common, 2)]
        signs = [math.copysign(1, other.index(b) - other.index(a)) for a, b in pairs]
        assert page.module("ranks.js", f"m.kendall({both})") == pytest.approx(
            sum(signs) / len(pairs)
        )
        assert page.module("ranks.js", f"m.lost({both})") == [i for i in other if i not in one]
        changes = page.module("ranks.js", f"[...m.changes({both})]")
        for item_id, change in changes:
            from_rank = other.index(item_id) + 1 if item_id in other else None
            by = 0 if from_rank is None else from_rank - one.index(item_id) - 1
            kinds = {True: "up", False: "down"}
            kind = "new" if from_rank is None else "same" if not by else kinds[by > 0]
            assert change == {"kind": kind, "by": abs(by), "from": from_rank}


def test_merged_rankings(page):
    """The first hits of merged rankings do not depend on how many hits each of them has."""
    contents = [("a", "A", 5), ("b", "B", 4), ("c", "A", 1)]
    captions = [("b", "B", 4.5), ("d", "D", 3)]
    rankings = [
        [{"item_id": item, "parent_id": parent, "score": score} for item, parent, score in ranking]
        for ranking in (contents, captions)
    ]
    expression = f"m.merge({js(rankings)}).map((hit) => [hit.item_id, hit.score])"
    merged = [["a", 5], ["b", 4.5], ["d", 3], ["c", 1]]
    assert page.module("ranks.js", expression) == merged
    first = js([ranking[:2] for ranking in rankings])
    expression = f"m.merge({first}).slice(0, 2).map((hit) => [hit.item_id, hit.score])"
    assert page.module("ranks.js", expression) == merged[:2]
    expression = f"m.merge({js(rankings)}, 'parent_id').map((hit) => hit.item_id)"
    assert page.module("ranks.js", expression) == ["a", "b", "d"]
    expression = f"m.alternate({js(rankings)}).map((hit) => [hit.item_id, hit.score])"
    assert page.module("ranks.js", expression) == [["a", 5], ["b", 4.5], ["d", 3], ["c", 1]]
    expression = f"m.alternate({js([rankings[1], []])}).map((hit) => hit.item_id)"
    assert page.module("ranks.js", expression) == ["b", "d"]


def test_pareto_front(page):
    points = [(4, 0.5), (2, 0.4), (2, 0.3), (8, 0.5), (8, 0.9), (1, 0.1)]
    given = [{"size": size, "quality": quality} for size, quality in points]
    front = page.module("ranks.js", f"m.pareto({js(given)})")
    assert [(p["size"], p["quality"]) for p in front] == [(1, 0.1), (2, 0.4), (4, 0.5), (8, 0.9)]
    front = page.module("ranks.js", f"m.pareto({js(given)}, 'MdR')")
    assert [(p["size"], p["quality"]) for p in front] == [(1, 0.1)]


# -- text.js ---------------------------------------------------------------------------------------


def test_pieces_count_code_points(page):
    """A character outside the Basic Multilingual Plane has one position, as in the API."""
    found = page.module("text.js", f"m.pieces({js('🐟 fish 🐟')}, [[2, 6], [4, 6]])")
    assert found == [
        {"text": "🐟 ", "marked": False},
        {"text": "fish", "marked": True},
        {"text": " 🐟", "marked": False},
    ]


def test_snippet_contains_the_highlights(page):
    words = [f"word{i}" for i in range(300)]
    text = " ".join(words)
    start = text.index("word200")
    found = page.module("text.js", f"m.snippet({js(text)}, [[{start}, {start + 7}]], 100)")
    shown = "".join(piece["text"] for piece in found)
    assert [piece["text"] for piece in found if piece["marked"]] == ["word200"]
    assert shown.startswith("… word") and shown.endswith(" …") and len(shown) < 110


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        ("bytes", 12, "12 B"),
        ("bytes", 24_576, "24.6 kB"),
        ("bytes", 150_000_000, "150 MB"),
        ("time", 65.2, "1:05"),
        ("time", 3723, "1:02:03"),
        ("milliseconds", 7.25, "7.3 ms"),
        ("milliseconds", 2300, "2.3 s"),
    ],
)
def test_numbers(page, function, value, expected):
    assert page.module("text.js", f"m.{function}({value})") == expected


def test_metadata_rows(page):
    metadata = {
        "label": None,
        "width": 612.0,
        "has_audio": False,
        "tags": ["a", 1],
        "frames": [[0, 0.0], [50, 2.0]],
        "camera": {"make": "x", "lens": {"mm": 35, "note": ""}},
    }
    assert page.module("text.js", f"m.metadataRows({js(metadata)})") == [
        ["width", "612"],
        ["has_audio", "false"],
        ["tags", "a, 1"],
        ["frames", "2 entries"],
        ["camera.make", "x"],
        ["camera.lens.mm", "35"],
    ]
    assert page.module("text.js", "m.metadataRows(null)") == []


def test_alternatives(page):
    parts = ["a", "b", "c"]
    found = [page.module("text.js", f"m.alternatives({js(parts[:n])})") for n in (1, 2, 3)]
    assert found == ["a", "a or b", "a, b, or c"]


def test_copied_commands(page):
    body = {"query": "it's", "k": 3, "rerank": {"name": "vectors"}}
    curl = page.module("text.js", f"m.asCurl('http://h/v1/search', {js(body)}, true)")
    assert "'http://h/v1/search'" in curl and "Bearer $MAXRAY_KEY" in curl
    assert "it'\\''s" in curl
    code = page.module("text.js", f"m.asPython('http://h', {js(body)})")
    compile(code, "copied", "exec")
    assert 'client.search("it\'s", k=3, rerank={"name": "vectors"})' in code
    assert "MAXRAY_KEY" not in code
    code = page.module("text.js", f"m.asPython('http://h', {js(body)}, true)")
    compile(code, "copied", "exec")
    assert code.startswith("import os\n\nfrom ")
    assert 'with Client("http://h", key=os.environ["MAXRAY_KEY"]) as client:' in code
    item = {"query": {"item": "a#t=1,2", "times": [1, 2]}, "k": 3}
    code = page.module("text.js", f"m.asPython('http://h', {js(item)})")
    compile(code, "copied", "exec")
    assert 'wire.StoredItem(item="a#t=1,2", times=[1, 2])' in code


def test_csv(page):
    text = 'a,b\n1,"x, ""y"""\n2,\n'
    found = page.module("text.js", f"m.parseCsv({js(text)})")
    assert found == [{"a": "1", "b": 'x, "y"'}, {"a": "2", "b": ""}]
    text = "a,b,c\n'=1,''-x,'y\n"
    found = page.module("text.js", f"m.parseCsv({js(text)})")
    assert found == [{"a": "=1", "b": "'-x", "c": "'y"}]  # the apostrophe before a formula


# -- evaluations.js, plot.js -----------------------------------------------------------------------


def test_default_rows_have_the_same_score(page):
    runs = ["bm25", "full.maxsim", "full.hybrid", "hpool_8.maxsim", "hpool_8.hybrid"]
    metrics = [{"reference": "full.maxsim"}, {"reference": "full.hybrid"}]
    expression = f"m.defaultRuns({js(metrics)}, {js(runs)})"
    assert page.module("evaluations.js", expression) == ["full.maxsim", "hpool_8.maxsim"]
    expression = f"m.defaultRuns([], {js(runs[:2])})"
    assert page.module("evaluations.js", expression) == ["bm25", "full.maxsim"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.67, 0.83], [0.65, 0.7, 0.75, 0.8, 0.85]),
        ([0.02, 0.9], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([1, 1], [0.98, 0.985, 0.99, 0.995, 1]),
        ([0, 0], [0, 0.005, 0.01, 0.015, 0.02]),
        ([3, 40], [0, 10, 20, 30, 40]),  # a median rank
    ],
)
def test_ticks(page, values, expected):
    assert page.module("plot.js", f"m.niceTicks({values})") == expected


def test_rows_at_0_are_not_plotted(page):
    def names(*values: float) -> list[str]:
        rows = [
            {"representation": f"r{i}", "score": "", "all_bytes": "8", "AP": str(value)}
            for i, value in enumerate(values)
        ]
        points = page.module("evaluations.js", f"m.pointsOf({js(rows)}, 'AP')")
        return [point["name"] for point in points]

    assert names(0.8, 0, 0.7) == ["r0", "r2"]
    assert names(0, 0) == ["r0", "r1"]


def test_sides_of_two_rows(page):
    expression = "m.sidesOf('full.maxsim', 'kcenter_16.hybrid')"
    assert page.module("evaluations.js", expression) == {
        "rep": "full",
        "score": "maxsim",
        "rep2": "kcenter_16",
        "score2": "hybrid",
    }
    for run in ("bm25", "minilm_pooled", "full.hybrid-1-0.25"):
        assert page.module("evaluations.js", f"m.sidesOf('full.maxsim', '{run}')") is None


# -- controls.js -----------------------------------------------------------------------------------


def test_representation_that_is_compared(page):
    def representation(name: str, **fields: str) -> dict:
        return {"name": name, "role": "search", "encoder": "e", "field": "content", **fields}

    found = [representation(name) for name in ("full", "k_32", "k_16")]
    found.append(representation("caption_full", field="caption"))
    found.append(representation("tokens", role="rerank"))
    sizes = {"full": 100, "k_32": 32, "k_16": 16, "caption_full": 9, "tokens": 1}
    facets = {
        "sizes": [
            {"name": name, "bytes_per_item": size, "vectors_per_item": size}
            for name, size in sizes.items()
        ]
    }

    def other(left: str, facets: dict | None = facets) -> str:
        expression = f"m.smallestOther({js(left)}, {js(found)}, {js(facets)})"
        return page.module("controls.js", expression)

    assert other("full") == other("k_32@8") == "k_16"
    assert other("k_16") == "k_32"
    assert other("caption_full") == "k_16"  # no other of captions
    assert other("full", None) == "k_32"  # unknown sizes
    found[1:] = []
    assert other("full") == "full"


def test_labels_of_representations(page):
    """Contents come before captions, most vectors first, and equal labels have the name."""
    rows = [
        ("caption_full", "caption", "none", None),
        ("k_16", "content", "kcenter", 16),
        ("h_32", "content", "hpool", 32),
        ("half", "content", "hpool", None),
        ("k_32", "content", "kcenter", 32),
        ("full", "content", "none", None),
    ]
    names = ("name", "field", "compressor", "num_vectors")
    found = [{"role": "search", **dict(zip(names, row, strict=True))} for row in rows]
    sizes = [{"name": "half", "vectors_per_item": 100.4, "bytes_per_item": 1}]
    for facets, half in (({"sizes": sizes}, "100 vectors"), (None, "half")):
        expression = (
            f"[...m.representationLabels({{representations: {js(found)}}}, {js(facets)}).values()]"
        )
        labels = page.module("controls.js", expression)
        assert {*labels} == {
            "all vectors",
            half,
            "32 vectors (h_32)",
            "32 vectors (k_32)",
            "16 vectors",
            "captions: all vectors",
        }
        assert labels[0] == "all vectors" and labels[-1] == "captions: all vectors"


# -- zip.js, map.js --------------------------------------------------------------------------------


def test_archives(page):
    files = {"a/texts.txt": "fish 🐟\n" * 1000, "ä.txt": "", "b/c/d": "\u0000"}
    expression = f"m.zip({js(files)}).arrayBuffer().then((b) => [...new Uint8Array(b)])"
    content = bytes(page.module("zip.js", expression))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name).decode() for name in archive.namelist()} == files
    values = "new TextEncoder().encode('123456789')"
    assert page.module("zip.js", f"m.crc32({values})") == 0xCBF43926


def test_values_of_a_strip(page):
    words = [
        {"times": [0, 1], "similarities": [0.5], "highlight": 0.1},
        {"times": [1, 2], "similarities": [1.0], "highlight": 0.2},
        {"times": None, "similarities": [9.0], "highlight": 9},
    ]
    view = {"token": 0, "range": [0, 1]}
    span = {"start": 0, "end": 4}
    found = page.module("map.js", f"m.stripValues({js(words)}, {js(span)}, {js(view)}, 8)")
    assert found == [0.5, 0.5, 1, 1, None, None, None, None]


def test_passages_of_a_text(page):
    text = "🐟 fresh fish is sold"
    words = [{"span": [i, i + n]} for i, n in ((2, 5), (8, 4), (13, 2), (16, 4))]
    passages = [{"span": [8, 15]}, {"span": [2, 12]}]  # the second overlaps with the first
    arguments = f"{js(text)}, {js(words)}, {js(passages)}, () => {{}}"
    expression = (
        f"[...m.mappedText({arguments}).paragraph.childNodes]"
        ".map((e) => [e.dataset?.passage ?? null, e.textContent])"
    )
    found = page.module("map.js", expression)
    assert found == [[None, "🐟 "], ["1", "fresh "], ["0", "fish is"], [None, " "], [None, "sold"]]


def test_one_frame_is_visible_at_a_time(page):
    words = [{"box": [0, 0, 1, 1], "times": times} for times in ([0, 2], [2, 4])]
    for seconds, expected in ((0, 0), (1.9, 0), (1.999, 1), (2, 1), (3.9, 1)):
        found = page.module("map.js", f"m.wordAt({js(words)}, 0.5, 0.5, {seconds})")
        assert found == words[expected]


def test_smallest_word_at_a_position(page):
    words = [{"box": [0, 0, 1, 1]}, {"box": [0.4, 0.4, 0.6, 0.6]}, {"box": None}]
    assert page.module("map.js", f"m.wordAt({js(words)}, 0.5, 0.5, null)") == words[1]
    assert page.module("map.js", f"m.wordAt({js(words)}, 0.1, 0.5, null)") == words[0]
