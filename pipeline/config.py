"""Typed specs: load YAML, apply dotted overrides, expand sweeps, dump what was resolved.

A spec says *what* is computed. How many CPUs, GPUs and actors do it stands in a resources profile
(`pipeline.stage`), chosen at submission, and never changes a result or a fingerprint.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import fsspec
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from pipeline.extras import require_storage

#: Characters of a value in a message.
MOST_SHOWN = 400


class SpecError(ValueError):
    """A user's input is not legal: names the field, the value and what is legal.

    Jobs print it as one sentence and exit with code 2.

    >>> str(SpecError("num_vectors", 0, "an integer >= 1"))
    'num_vectors: 0 is not legal; legal: an integer >= 1'

    Of a long value the message has the beginning and the end.

    >>> len(str(SpecError("query", "a" * 1_000_000, "a text of at most 512 tokens"))) < 500
    True
    """

    def __init__(self, field: str, value: Any, legal: str, problem: str = "is not legal"):
        self.field, self.value, self.legal, self.problem = field, value, legal, problem
        shown = repr(value)
        if len(shown) > MOST_SHOWN:  # a query may be a book
            half = MOST_SHOWN // 2
            shown = f"{shown[:half]} ... {shown[-half:]}"
        super().__init__(f"{field}: {shown} {problem}; legal: {legal}")

    def __reduce__(self):  # crosses process boundaries in Ray
        return SpecError, (self.field, self.value, self.legal, self.problem)

    def below(self, prefix: str) -> SpecError:
        """The same error, seen from the spec that holds this one under `prefix`."""
        field = ".".join(part for part in (prefix, self.field) if part)
        return SpecError(field, self.value, self.legal, self.problem)


class JobError(RuntimeError):
    """A job cannot go on, through no fault of its input: one sentence, exit code 1."""


class Stopped(Exception):
    """A job was asked to stop (SIGTERM); what was finished is committed. Exit code 143."""


class Spec(BaseModel):
    """Base class of all specs: immutable, and an unknown field is an error.

    Attributes:
        renamed: Former field names and the present one of each, for the error message.

    >>> class Budget(Spec):
    ...     renamed: ClassVar = {"size": "num_vectors"}
    ...     num_vectors: int = 32
    >>> parse(Budget, {"size": 8})
    Traceback (most recent call last):
    ...
    pipeline.config.SpecError: size: 8 is the former name of num_vectors; legal: num_vectors
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key, value in data.items():
                if key in cls.renamed and key not in cls.model_fields:
                    new = cls.renamed[key]
                    raise SpecError(str(key), value, new, f"is the former name of {new}")
                if key not in cls.model_fields:
                    legal = ", ".join(cls.model_fields)
                    raise SpecError(str(key), value, legal, "stands under an unknown key")
        return data

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_booleans_as_numbers(cls, value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
        parsed = parse(value)
        if isinstance(value, bool) and isinstance(parsed, int | float) and parsed is not value:
            raise SpecError("", value, "a number")  # pydantic takes `true` for 1
        return parsed


class ComponentSpec(Spec):
    """Base of the specs of registered components: `name` is the one under which it is registered.

    Subclasses narrow the type: `name: Literal["hpool"] = "hpool"`.
    """

    name: str


def absolute(uri: str) -> str:
    """A local path made absolute (workers may run elsewhere); a URI with a scheme as it is.

    Raises:
        SpecError: the path begins with ~ and the name of nobody.
    """
    try:
        return uri if "://" in uri else str(Path(uri).expanduser().absolute())
    except RuntimeError:
        raise SpecError("", uri, "a path, or ~/ and a path", "names no user's home") from None


def check_exists(path: str, field: str, legal: str = "the path of an existing file") -> None:
    """Checks that a local path exists; a URI with a scheme is not looked at.

    Commands call it for all paths they are given before they import anything slow.

    Raises:
        SpecError: For `field`: nothing exists at the path.
    """
    with within(field):
        location = absolute(path)
    if "://" not in location and not Path(location).exists():
        raise SpecError(field, path, legal, "does not exist")


def _uri(value: str) -> str:
    if not value.strip():
        raise SpecError("", value, "a path or URI", "is empty")
    return absolute(value)


#: A field that holds a path or URI.
Uri = Annotated[str, AfterValidator(_uri)]


@contextlib.contextmanager
def within(field: str) -> Iterator[None]:
    """Names the field that holds the spec of which a `SpecError` inside speaks."""
    try:
        yield
    except SpecError as error:
        raise error.below(field) from None


SpecT = TypeVar("SpecT", bound=Spec)
ComponentSpecT = TypeVar("ComponentSpecT", bound=ComponentSpec)


def parse(spec_class: type[SpecT], data: Mapping[str, Any]) -> SpecT:
    """Validates `data`, turning the first of pydantic's errors into a `SpecError`.

    >>> class Budget(Spec):
    ...     num_vectors: int = 32
    >>> parse(Budget, {"num_vector": 3})
    Traceback (most recent call last):
    ...
    pipeline.config.SpecError: num_vector: 3 stands under an unknown key; legal: num_vectors
    """
    try:
        return spec_class.model_validate(data)
    except ValidationError as error:
        raise describe(error) from None


def describe(error: ValidationError) -> SpecError:
    """The first error of a pydantic validation as a `SpecError` with the full dotted field."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause.below(field)
    if first["type"] == "missing":
        return SpecError(field, None, "a value (the field is required)", "is missing")
    legal = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    legal = legal.replace("a valid list", "a list").replace("a valid dictionary", "a mapping")
    return SpecError(field or "spec", first["input"], legal)


class _NoKeyTwice(yaml.SafeLoader):
    """YAML's plain types; a key that stands twice in a mapping is an error, not the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [
            self.construct_object(key, deep=True)
            for key, _ in node.value
            if key.tag != "tag:yaml.org,2002:merge"  # `<<: *anchor`, which its own keys override
        ]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"the key {key!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def load(
    spec_class: type[SpecT], path: str, overrides: Iterable[str] = (), *, what: str = "spec"
) -> SpecT:
    """Reads a YAML spec and applies dotted overrides such as `encoder.layer=-2`.

    Args:
        spec_class: Class of the spec.
        path: Path or URI of a YAML file.
        overrides: Assignments of the form `dotted.field=value`.
        what: Name of the file's role, for error messages.

    Raises:
        SpecError: The file is missing or not a YAML mapping, or a field is not valid.
    """
    return parse(spec_class, override(read(path, what), overrides))


def read(path: str, what: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        MissingExtra: The package of its storage is not installed.
        SpecError: for `what`: the file is missing or not a YAML mapping.
    """
    require_storage(path)
    try:
        with fsspec.open(path, "r", encoding="utf-8") as file:
            data = yaml.load(file, _NoKeyTwice)
    except FileNotFoundError:
        raise SpecError(what, path, "the path of an existing YAML file", "does not exist") from None
    except (OSError, ValueError, ImportError, yaml.YAMLError) as error:
        raise SpecError(what, path, f"a readable YAML file ({_one_line(error)})") from None
    if not isinstance(data, dict):
        raise SpecError(what, path, "a YAML mapping of fields to values", "holds no mapping")
    return data


def override(data: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Applies `a.b=value` assignments to nested mappings and lists; values are read as YAML.

    >>> override({"encoder": {"layer": -1}}, ["encoder.layer=-2", "index=out/a"])
    {'encoder': {'layer': -2}, 'index': 'out/a'}
    >>> override({"sweep": {"compressor.num_vectors": [64]}}, ["sweep.compressor.num_vectors=[8]"])
    {'sweep': {'compressor.num_vectors': [8]}}
    """
    data = copy.deepcopy(data)
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise SpecError("override", assignment, "dotted.field=value")
        try:
            value = yaml.load(value, _NoKeyTwice)
        except yaml.YAMLError as error:
            legal = f"a value in YAML's form ({_one_line(error)})"
            raise SpecError(path, value, legal, "cannot be read") from None
        _assign(data, path, value, assignment)
    return data


def _assign(node: Any, path: str, value: Any, assignment: str) -> None:
    part, _, rest = path.partition(".")
    if isinstance(node, dict) and (path in node or not rest):
        node[path] = value  # the whole path where it is a key itself, as the keys of sweeps are
        return
    if isinstance(node, list) and not rest:
        _child(node, part, assignment)
        node[int(part)] = value
        return
    if isinstance(node, dict) and isinstance(node.get(part), str):
        node[part] = {"name": node[part]}  # `encoder: minilm` is short for {name: minilm}
    _assign(_child(node, part, assignment), rest, value, assignment)


def _child(node: Any, part: str, assignment: str) -> Any:
    if isinstance(node, dict):
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    legal = f"an index below {len(node)}" if isinstance(node, list) else "a field of a mapping"
    raise SpecError("override", assignment, f"{legal} at {part!r}")


def expand_sweep(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The product of a sweep's lists, as nested mappings; the first key varies slowest.

    >>> expand_sweep({"compressor.name": ["hpool", "samer"], "compressor.num_vectors": [32, 16]})[1]
    {'compressor': {'name': 'hpool', 'num_vectors': 16}}
    >>> expand_sweep({"compressor": {"name": "hpool", "num_vectors": [32, 16]}})[0]
    {'compressor': {'name': 'hpool', 'num_vectors': 32}}
    """
    return [override({}, assignments(values)) for values in combinations(sweep)]


def combinations(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The product of a sweep's lists, by dotted field; the first key varies slowest.

    >>> combinations({"compressor": {"name": "samer", "num_vectors": [8, 4]}})[1]
    {'compressor.name': 'samer', 'compressor.num_vectors': 4}
    """
    axes = []
    for field, values in _flat(sweep):
        values = values if isinstance(values, list) else [values]
        if not values:
            raise SpecError(f"sweep.{field}", values, "a value or a list of at least one value")
        axes.append([(field, value) for value in values])
    return [dict(chosen) for chosen in itertools.product(*axes)]


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Values by dotted field, as `override` reads them."""
    return [f"{field}={json.dumps(value)}" for field, value in values.items()]


def _flat(sweep: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a sweep by dotted name, however it is nested."""
    for field, values in sweep.items():
        if isinstance(values, Mapping):
            yield from _flat(values, f"{above}{field}.")
        else:
            yield f"{above}{field}", values


def dump(spec: Spec) -> dict[str, Any]:
    """The resolved spec as plain JSON types, defaults included."""
    return spec.model_dump(mode="json")


def dump_yaml(spec: Spec) -> str:
    """The resolved spec as YAML that `load` reads back to an equal spec."""
    return yaml.safe_dump(dump(spec), sort_keys=False, allow_unicode=True)


def digest(value: Any) -> str:
    """A short stable hash (16 hex digits) of a spec or of any JSON value."""
    value = dump(value) if isinstance(value, Spec) else value
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def first_line(error: Exception) -> str:
    """The first line of an error's message, or what kind of error it is."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
