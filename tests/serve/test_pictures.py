"""Pictures as queries over HTTP equal those in process."""

from __future__ import annotations

import pytest

from pipeline import config, open_index
from pipeline.index import job
from pipeline.serve.client import Client, ServerError
from tests.pictures import noise, png

pytestmark = pytest.mark.heavy


def test_pictures_as_queries(briefly, checkpoint, tmp_path):
    (tmp_path / "photos").mkdir()
    photos = {f"{seed}.png": png(noise(60 + seed, 50, seed)) for seed in range(5)}
    for name, photo in photos.items():
        (tmp_path / "photos" / name).write_bytes(photo)
    given = {
        "index": str(tmp_path / "index"),
        "source": {"name": "images", "path": str(tmp_path / "photos")},
        "encoder": {"name": "colqwen2", "model": checkpoint("colqwen2"), "dtype": "float32"},
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "hpool", "num_vectors": 8}},
        ],
    }
    spec = config.parse(job.IndexSpec, given)
    job.run(spec, job.IndexResources(), job="1", report=lambda line: None)
    url = briefly({"indexes": {"i": {"uri": given["index"]}}}, "pictures")
    photo = photos["3.png"]
    with Client(url, tries=20) as client:
        assert client.indexes()[0].representations[0].queries == ["text", "image", "vectors"]
        searcher = open_index(given["index"])
        assert client.search(photo, k=1).hits[0].item_id == "3.png"
        for query in (photo, "a bird"):
            found = client.search(query, representation="hpool_8", k=5, explain="map")
            expected = searcher.search(query, "hpool_8", k=5)
            assert [hit.item_id for hit in found.hits] == [hit.item_id for hit in expected]
            scores = [hit.score for hit in expected]
            assert [hit.score for hit in found.hits] == pytest.approx(scores, rel=1e-4)
            places = [place for match in found.hits[0].matches for place in match.places]
            assert places and all(place.box for place in places)
            assert all(word.box and not word.text for word in found.hits[0].map.words)
        both = client.search_batch([photo, "a bird", photo], representation="full", k=1)
        assert both.results[0] == both.results[2] != both.results[1]
        assert len(client.encode([photo, "a bird"]).queries[0].vectors) > 4
        with pytest.raises(ServerError, match="cannot be read"):
            client.search(b"GIF89a")
