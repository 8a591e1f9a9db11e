"""Multipart forms, which browsers and curl send with files, as bodies of searches."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from pipeline.schema import QUERY_FILES
from pipeline.serve.errors import ApiError

#: Media type of forms with files.
FORM = "multipart/form-data"
_NAME = re.compile(rb'^content-disposition:[^\r\n]*;\s*name="([^"\r\n]*)"', re.I | re.M)


def search_body(content_type: str, form: bytes) -> bytes:
    r"""Converts a form to the JSON body of a search.

    The parts are `text`, the files `image`, `audio` and `video`, and `options`, a JSON object with
    the other fields of the request.

    >>> form = b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\na wing\r\n--x--\r\n'
    >>> search_body("multipart/form-data; boundary=x", form)
    b'{"query": {"text": "a wing"}}'

    Raises:
        ApiError: The form is malformed or has an unknown part.
    """
    boundary = re.search(r'boundary="?([^";,]+)', content_type)
    parts = (b"\r\n" + form).split(b"\r\n--" + boundary[1].encode()) if boundary else [b""]
    if not parts[-1].startswith(b"--"):
        raise ApiError("bad_request", "the form must have a boundary and end with it")
    options: Any = {}
    query: dict[str, str] = {}
    for part in parts[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        found = _NAME.search(head.strip())
        name = found[1].decode(errors="replace") if found else ""
        try:
            if name in QUERY_FILES:
                query[name] = base64.b64encode(content).decode()
            elif name == "text":
                query[name] = content.decode()
            elif name == "options":
                options = json.loads(content)
            else:
                raise ApiError("invalid_argument", f"unknown field {name!r}", name)
        except ValueError as error:
            raise ApiError("bad_request", f"{name} must be valid: {error}", name) from None
    if not isinstance(options, dict):
        raise ApiError("invalid_argument", "options must be a JSON object", "options")
    return json.dumps({**options, "query": query}).encode()
