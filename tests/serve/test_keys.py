"""Tests of access keys and their file."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from pipeline.config import SpecError
from pipeline.serve.keys import ANONYMOUS, Key, Keys, hash_key, new_key, read_keys
from tests.serve.conftest import KEYS, write_keys


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path):
    write_keys(tmp_path / "keys.yaml", KEYS)
    return tmp_path / "keys.yaml"


def test_finds_new_key_by_hash(tmp_path):
    key = new_key()
    assert len(key) > 40 and key != new_key()
    write_keys(tmp_path / "k.yaml", {key: {"name": "ann"}})
    assert key not in (tmp_path / "k.yaml").read_text()
    keys = Keys(str(tmp_path / "k.yaml"))
    assert keys.find(key).name == "ann"
    assert keys.find(key[:-1]) is None and keys.find("") is None and keys.find("\udcff") is None


def test_reloads_changed_file(file):
    clock = Clock()
    keys = Keys(str(file), clock)
    assert keys.find("mr_few").name == "few"
    write_keys(file, {"mr_all": {"name": "all"}})
    assert keys.find("mr_few")  # not checked again yet
    clock.now += 2
    assert keys.find("mr_few") is None and keys.find("mr_all")


@pytest.mark.parametrize("corrupt", [lambda f: f.unlink(), lambda f: f.write_text("keys: 7")])
def test_unreadable_file_invalidates_all_keys(file, corrupt):
    clock = Clock()
    keys = Keys(str(file), clock)
    content = file.read_text()
    corrupt(file)
    clock.now += 2
    for _ in range(2):
        with pytest.raises(SpecError):
            keys.find("mr_all")
    file.write_text(content)
    assert keys.find("mr_all")


def test_reads_keys_from_environment_variable(file, monkeypatch):
    monkeypatch.setenv("MAXRAY_KEYS", file.read_text())
    assert Keys("").find("mr_all").name == "all"


def test_keys_expire():
    at = datetime(2026, 6, 1, tzinfo=UTC)
    for expires, expired in [(None, False), ("2026-06-01", True), ("2026-06-02", False)]:
        key = Key(name="a", sha256="0" * 64, expires=expires)
        assert key.has_expired(at) == expired
    assert Key(name="a", sha256="0" * 64, expires="2026-05-31T23:00:00-02:00").has_expired(
        datetime(2026, 6, 1, 1, tzinfo=UTC)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no list"),
        ("keys: [", "not valid YAML"),
        ("keys: [{name: a}]", "field 'sha256' is required in keys[0]"),
        ("keys: [{name: a, sha256: xyz}]", "keys[0].sha256"),
        (
            f"keys: [{{name: a, sha256: {'0' * 64}, indexs: []}}]",
            "unknown field 'indexs' in keys[0]; did you mean 'indexes'",
        ),
        (f"keys: [{{name: a, sha256: {'0' * 64}}}, {{name: a, sha256: {'1' * 64}}}]", "twice"),
        (f"keys: [{{name: a, sha256: {'0' * 64}}}, {{name: b, sha256: {'0' * 64}}}]", "twice"),
    ],
)
def test_rejects_invalid_file(text, message):
    text = text.replace("0" * 64, repr("0" * 64)).replace("1" * 64, repr("1" * 64))
    with pytest.raises(SpecError, match=re.escape(message)):
        read_keys(text)


def test_reads_entries_with_and_without_keys_mapping():
    entry = f"  - name: ann\n    sha256: {'0' * 63}a\n"
    for text in (entry, "keys:\n" + entry, entry + entry.replace("ann", "bob").replace("0a", "0b")):
        assert read_keys(text)[0].name == "ann"
    with pytest.raises(SpecError, match=r"keys\[0\].sha256 must match pattern .*, got 'xyz'"):
        read_keys("- {name: a, sha256: xyz}")


def test_rejects_missing_file(tmp_path):
    with pytest.raises(SpecError) as caught:
        Keys(str(tmp_path / "none.yaml"))
    assert caught.value.field == "keys"


def test_command_prints_entry_and_key(capsys):
    import yaml

    from jobs import serve

    serve.main(["key", "--name", "ann", "--indexes", "a", "b", "--expires", "2030-01-01"])
    printed = capsys.readouterr()
    (key,) = read_keys("keys:\n" + printed.out)
    assert key.name == "ann" and key.indexes == ["a", "b"] and not key.evaluate
    assert key.sha256 == hash_key(printed.err.split()[-1])
    assert yaml.safe_load(printed.out)[0]["sha256"] == key.sha256
    with pytest.raises(SpecError, match="requests_per_second must be .*0"):
        serve.main(["key", "--name", "ann", "--requests-per-second", "0"])


def test_label_does_not_contain_name():
    key = Key(name="ann", sha256=hash_key("mr_abc"))
    assert key.label == hash_key("mr_abc")[:8]
    assert ANONYMOUS.label == "anonymous"
