"""Typed specs: loading from YAML, dotted overrides, sweeps, and serialisation.

A spec defines *what* is computed. The numbers of CPUs, GPUs and actors are set in a resources
profile (`pipeline.stage`), which is chosen at submission and affects neither results nor
fingerprints.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
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

#: Prefix of the hash of trained weights, which replaces their folder in stored specs.
WEIGHTS_HASH = "sha256:"
#: Maximum number of characters of a value shown in a message.
MAX_SHOWN_CHARACTERS = 400


def close_match(name: object, names: Iterable[str]) -> str:
    """Returns "; did you mean 'NAME'?" for the most similar of `names`, else an empty string.

    >>> close_match("hpol", ["hpool", "samer"])
    "; did you mean 'hpool'?"
    >>> close_match("x", ["hpool", "samer"])
    ''
    """
    matches = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"; did you mean {matches[0]!r}?" if matches else ""


class SpecError(ValueError):
    """Invalid user input. The message names the field, the rule it breaks and the value.

    Jobs print the message and exit with code 2.

    Args:
        field: Dotted path of the field.
        value: The value given.
        rule: What the value must be, a phrase that follows "must be".
        problem: What is wrong with the value, a verb phrase that follows "which".
        note: Text that follows the value or problem as is, such as " (line 3)".

    >>> str(SpecError("num_vectors", 0, "an integer >= 1"))
    'num_vectors must be an integer >= 1, got 0'
    >>> str(SpecError("path", "x", "an existing file", "does not exist"))
    "path must be an existing file, got 'x', which does not exist"

    Long values are shortened to their beginning and end.

    >>> len(str(SpecError("query", "a" * 1_000_000, "a text of at most 512 tokens"))) < 500
    True
    """

    def __init__(
        self, field: str, value: Any, rule: str, problem: str | None = None, note: str = ""
    ):
        self.field, self.value, self.rule = field, value, rule
        self.problem, self.note = problem, note
        super().__init__(self._message())

    @classmethod
    def unknown_name(
        cls, field: str, value: Any, names: Iterable[str], problem: str | None = None
    ) -> SpecError:
        """Returns the error for a value that is not one of `names`, with the closest of them.

        >>> str(SpecError.unknown_name("score", "lat", ["late", "single"]))
        "score must be one of late, single, got 'lat'; did you mean 'late'?"
        """
        names = list(names)
        rule = f"one of {', '.join(names)}" if len(names) > 1 else repr("".join(names))
        return cls(field, value, rule, problem, close_match(value, names))

    def _message(self) -> str:
        problem = f", which {self.problem}" if self.problem else ""
        return f"{self.field} must be {self.rule}, got {_shown(self.value)}{problem}{self.note}"

    def __reduce__(self) -> tuple[type[SpecError], tuple[Any, ...]]:
        """Pickles the error as it was before Ray wrapped it on its way out of a task."""
        error = getattr(self, "cause", self)
        return type(error), (error.field, error.value, error.rule, error.problem, error.note)

    def at(self, field: str) -> SpecError:
        """Returns the same error for another field."""
        kind, (_, *arguments) = self.__reduce__()
        return kind(field, *arguments)

    def below(self, prefix: str) -> SpecError:
        """Returns the same error as seen from the spec that holds this one under `prefix`."""
        return self.at(".".join(part for part in (prefix, self.field) if part))

    def _location(self) -> str:
        parent = self.field.rpartition(".")[0]
        return f" in {parent}" if parent else ""


class UnknownField(SpecError):
    """A spec has a field that does not exist; `rule` lists the valid fields."""

    def _message(self) -> str:
        name = self.field.rpartition(".")[2]
        match = close_match(name, self.rule.split(", ")) or ";"
        return f"unknown field {name!r}{self._location()}{match} valid fields: {self.rule}"


class RenamedField(SpecError):
    """A spec has a field that was renamed; `rule` is the present name."""

    def _message(self) -> str:
        name = self.field.rpartition(".")[2]
        return f"field {name!r}{self._location()} was renamed to {self.rule!r}"


class MissingField(SpecError):
    """A required field is missing; `rule` is what it must be, if known."""

    def _message(self) -> str:
        name = self.field.rpartition(".")[2]
        rule = f"; it must be {self.rule}" if self.rule else ""
        return f"field {name!r} is required{self._location()}{rule}"


def _shown(value: Any) -> str:
    shown = repr(value)
    if len(shown) > MAX_SHOWN_CHARACTERS:  # queries can be long
        half = MAX_SHOWN_CHARACTERS // 2
        shown = f"{shown[:half]} ... {shown[-half:]}"
    return shown


class JobError(RuntimeError):
    """Failure of a job that its input did not cause. Jobs print it and exit with code 1."""


class Stopped(Exception):
    """Raised when SIGTERM stops a job; completed work is committed, and the exit code is 143."""


class Spec(BaseModel):
    """Base class of all specs, which are immutable and reject unknown fields.

    Attributes:
        renamed: New names of renamed fields by old name, for error messages.
        unnamed: Fields that default column names omit.

    >>> class Budget(Spec):
    ...     renamed: ClassVar = {"size": "num_vectors"}
    ...     num_vectors: int = 32
    >>> parse(Budget, {"size": 8})
    Traceback (most recent call last):
    ...
    pipeline.config.RenamedField: field 'size' was renamed to 'num_vectors'
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    unnamed: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key, value in data.items():
                if key in cls.renamed and key not in cls.model_fields:
                    raise RenamedField(str(key), value, cls.renamed[key])
                if key not in cls.model_fields:
                    raise UnknownField(str(key), value, ", ".join(cls.model_fields))
        return data

    @field_validator("*", mode="wrap")
    @classmethod
    def _reject_booleans_as_numbers(cls, value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
        parsed = parse(value)
        if isinstance(value, bool) and isinstance(parsed, int | float) and parsed is not value:
            raise SpecError("", value, "a number")  # pydantic converts `true` to 1
        return parsed


class ComponentSpec(Spec):
    """Base class of the specs of registered components.

    Subclasses narrow the type of the name: `name: Literal["hpool"] = "hpool"`.
    """

    name: str
    """Name under which the component is registered."""


class TrainedSpec(ComponentSpec):
    """Base class of the specs of components with trained weights.

    An index stores the weights themselves and, in the spec, their hash in place of the folder.
    """

    unnamed: ClassVar[Collection[str]] = ("weights",)

    weights: str | None = None
    """Folder of a training run with the weights; null only in training, which starts from random
    ones."""

    @field_validator("weights")
    @classmethod
    def _make_folder_absolute(cls, weights: str | None) -> str | None:
        if weights is None or weights.startswith(WEIGHTS_HASH):
            return weights
        return absolute(weights)


def absolute(uri: str) -> str:
    """Returns the absolute form of a local path; URIs are unchanged.

    Paths must be absolute because workers may run in other working directories.

    Raises:
        SpecError: The path begins with `~` and an unknown user name.
    """
    try:
        return uri if "://" in uri else str(Path(uri).expanduser().absolute())
    except RuntimeError:
        raise SpecError(
            "", uri, "a path whose ~ can be expanded", "names an unknown user"
        ) from None


def check_exists(path: str, field: str, rule: str = "the path of an existing file") -> None:
    """Checks that a local path exists; URIs with a scheme are not checked.

    Commands check all paths before slow imports.

    Raises:
        SpecError: The path does not exist; the error names `field`.
    """
    with within(field):
        location = absolute(path)
    if "://" not in location and not Path(location).exists():
        raise SpecError(field, path, rule, "does not exist")


def _uri(value: str) -> str:
    if not value.strip():
        raise SpecError("", value, "a path or URI", "is empty")
    return absolute(value)


#: Type of fields with a path or URI; local paths are made absolute.
Uri = Annotated[str, AfterValidator(_uri)]


@contextlib.contextmanager
def within(field: str) -> Iterator[None]:
    """Prefixes the field of each `SpecError` raised inside the block with `field`."""
    try:
        yield
    except SpecError as error:
        raise error.below(field) from None


SpecT = TypeVar("SpecT", bound=Spec)
ComponentSpecT = TypeVar("ComponentSpecT", bound=ComponentSpec)


def parse(spec_class: type[SpecT], data: Mapping[str, Any]) -> SpecT:
    """Validates `data` and raises the first validation error as a `SpecError`.

    >>> class Budget(Spec):
    ...     num_vectors: int = 32
    >>> parse(Budget, {"num_vector": 3})
    Traceback (most recent call last):
    ...
    pipeline.config.UnknownField: unknown field 'num_vector'; did you mean 'num_vectors'? valid \
fields: num_vectors
    """
    try:
        return spec_class.model_validate(data)
    except ValidationError as error:
        raise describe(error) from None


def describe(error: ValidationError) -> SpecError:
    """Converts the first error of a pydantic validation to a `SpecError` with the dotted field."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause.below(field)
    if first["type"] == "missing":
        return MissingField(field, None, "")
    field = field or "spec"
    if first["type"] == "literal_error":
        expected = first["ctx"]["expected"]
        names = re.findall(r"'([^']*)'", expected)
        if len(names) == len(re.split(", | or ", expected)):  # else some are not names
            return SpecError.unknown_name(field, first["input"], names)
    return SpecError(field, first["input"], rule_text(first["msg"]))


def rule_text(message: str) -> str:
    """Converts a pydantic message to a phrase that follows "must be".

    >>> rule_text("Input should be a valid integer, unable to parse string as an integer")
    'an integer'
    >>> rule_text("List should have at least 1 item after validation, not 0")
    'a list with at least 1 item'
    """
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    message = re.sub(r"^(\w+) should have ", lambda kind: f"a {kind[1].lower()} with ", message)
    message = re.sub(r" after validation, not \d+$|, unable to parse .*", "", message)
    message = message.replace("a valid dictionary", "a mapping").replace("a valid int", "an int")
    return message.replace("a valid ", "a ")


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys in mappings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [
            self.construct_object(key, deep=True)
            for key, _ in node.value
            if key.tag != "tag:yaml.org,2002:merge"  # keys override those merged by `<<: *anchor`
        ]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"duplicate key {key!r}"
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
        SpecError: The file is missing or not a YAML mapping, or a field is invalid.
    """
    return parse(spec_class, override(read(path, what), overrides))


def read(path: str, what: str) -> dict[str, Any]:
    """Reads a YAML file with a mapping.

    Raises:
        MissingExtra: The storage needs a package that is not installed.
        SpecError: The file is missing or not a YAML mapping; the error names `what`.
    """
    require_storage(path)
    try:
        with fsspec.open(path, "r", encoding="utf-8") as file:
            data = yaml.load(file, _UniqueKeyLoader)
    except FileNotFoundError:
        raise SpecError(what, path, "the path of an existing YAML file", "does not exist") from None
    except (OSError, ValueError, ImportError, yaml.YAMLError) as error:
        problem = f"cannot be read ({_one_line(error)})"
        raise SpecError(what, path, "a YAML file", problem) from None
    if not isinstance(data, dict):
        raise SpecError(what, path, "a YAML file with a mapping of fields to values", "has none")
    return data


def override(data: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Applies assignments of the form `a.b=value` to nested mappings and lists.

    Values are parsed as YAML.

    >>> override({"encoder": {"layer": -1}}, ["encoder.layer=-2", "index=out/a"])
    {'encoder': {'layer': -2}, 'index': 'out/a'}
    >>> override({"sweep": {"compressor.num_vectors": [64]}}, ["sweep.compressor.num_vectors=[8]"])
    {'sweep': {'compressor.num_vectors': [8]}}
    """
    data = copy.deepcopy(data)
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise SpecError("override", assignment, "of the form dotted.field=value")
        try:
            value = yaml.load(value, _UniqueKeyLoader)
        except yaml.YAMLError as error:
            problem = f"cannot be parsed ({_one_line(error)})"
            raise SpecError(path, value, "a YAML value", problem) from None
        _assign(data, path, value, assignment)
    return data


def _assign(node: Any, path: str, value: Any, assignment: str) -> None:
    part, _, rest = path.partition(".")
    if isinstance(node, dict) and (path in node or not rest):
        node[path] = value  # keys of sweeps are dotted paths themselves
        return
    if isinstance(node, list) and not rest:
        _child(node, part, assignment)
        node[int(part)] = value
        return
    if isinstance(node, dict) and isinstance(node.get(part), str):
        node[part] = {"name": node[part]}  # expand `encoder: minilm` to `{name: minilm}`
    _assign(_child(node, part, assignment), rest, value, assignment)


def _child(node: Any, part: str, assignment: str) -> Any:
    if isinstance(node, dict):
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    problem = f"has {part!r} where the spec has "
    problem += f"a list of {len(node)}" if isinstance(node, list) else "no mapping"
    raise SpecError("override", assignment, "of the form dotted.field=value", problem)


def expand_sweep(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the Cartesian product of a sweep as nested mappings; the first key varies slowest.

    >>> expand_sweep({"compressor.name": ["hpool", "samer"], "compressor.num_vectors": [32, 16]})[1]
    {'compressor': {'name': 'hpool', 'num_vectors': 16}}
    >>> expand_sweep({"compressor": {"name": "hpool", "num_vectors": [32, 16]}})[0]
    {'compressor': {'name': 'hpool', 'num_vectors': 32}}
    """
    return [override({}, assignments(values)) for values in combinations(sweep)]


def combinations(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the Cartesian product of a sweep by dotted field; the first key varies slowest.

    >>> combinations({"compressor": {"name": "samer", "num_vectors": [8, 4]}})[1]
    {'compressor.name': 'samer', 'compressor.num_vectors': 4}
    """
    axes = []
    for field, values in _flatten(sweep):
        values = values if isinstance(values, list) else [values]
        if not values:
            raise SpecError(f"sweep.{field}", values, "a value or a list of at least one value")
        axes.append([(field, value) for value in values])
    return [dict(pairs) for pairs in itertools.product(*axes)]


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Converts values by dotted field to assignments for `override`."""
    return [f"{field}={json.dumps(value)}" for field, value in values.items()]


def _flatten(sweep: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a nested sweep by dotted name."""
    for field, values in sweep.items():
        if isinstance(values, Mapping):
            yield from _flatten(values, f"{prefix}{field}.")
        else:
            yield f"{prefix}{field}", values


def dump(spec: Spec) -> dict[str, Any]:
    """Converts a resolved spec to JSON types, including defaults."""
    return spec.model_dump(mode="json")


def dump_yaml(spec: Spec) -> str:
    """Converts a resolved spec to YAML, which `load` parses to an equal spec."""
    return yaml.safe_dump(dump(spec), sort_keys=False, allow_unicode=True)


def digest(value: Any) -> str:
    """Returns a stable hash (16 hexadecimal digits) of a spec or JSON value."""
    value = dump(value) if isinstance(value, Spec) else value
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def first_line(error: Exception) -> str:
    """Returns the first line of an error message, or the name of its type if it is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
