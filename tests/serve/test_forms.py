"""Forms with files as bodies of searches."""

from __future__ import annotations

import base64
import json

import httpx2
import pytest

from pipeline.serve.errors import ApiError
from pipeline.serve.forms import search_body


def body(**fields):
    """Returns the body of a form as a client encodes it."""
    request = httpx2.Request("POST", "http://x/v1/search", **fields)
    return json.loads(search_body(request.headers["content-type"], request.read()))


def test_files_become_parts_of_the_query():
    content = bytes(range(256)) + b"\r\n--x\r\n\r\n" + bytes(1000)
    options = json.dumps({"k": 3, "negative": {"text": "x"}})
    files = {"audio": ("a.wav", content, "audio/wav"), "video": ("b.mp4", b"")}
    found = body(data={"text": "façade", "options": options}, files=files)
    assert base64.b64decode(found["query"]["audio"]) == content
    assert found["query"]["text"] == "façade" and found["query"]["video"] == ""
    assert (found["k"], found["negative"]) == (3, {"text": "x"})


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        ({"k": "3"}, "invalid_argument", "k"),
        ({"options": "[]"}, "invalid_argument", "options"),
        ({"options": "{"}, "bad_request", "options"),
        ({"text": b"\xff"}, "bad_request", "text"),
    ],
)
def test_invalid_parts(data, code, field):
    with pytest.raises(ApiError) as error:
        body(data=data, files={"image": b"x"})
    assert (error.value.code, error.value.field) == (code, field)


@pytest.mark.parametrize("form", [b"", b"--x\r\n", b"--x\r\nContent-Disposition: form-data\r\n"])
@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=x", "multipart/form-data"])
def test_incomplete_forms(form, content_type):
    with pytest.raises(ApiError, match="must have a boundary and end with it"):
        search_body(content_type, form)
