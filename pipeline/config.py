"""Typed specs that are loaded from YAML files, with dotted overrides and sweeps.

A spec defines *what* is computed. The numbers of CPUs, GPUs and actors are set in a separate
resources profile (see `pipeline.index.stage`), which is chosen when a job is submitted. They affect
neither the results nor the fingerprints.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import itertools
import json
import os
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from pipeline.extras import MissingExtra
from pipeline.paths import is_uri, local_path, open_file

#: Prefix of the hash of trained weights, which replaces their folder in stored specs.
WEIGHTS_HASH = "sha256:"
#: Values that are longer than this number of characters are shortened in messages.
MAX_SHOWN_CHARACTERS = 400


def close_match(name: object, names: Iterable[str]) -> str:
    """Returns "; did you mean 'NAME'?" for a similar name, or an empty string if there is none.

    >>> close_match("hpol", ["hpool", "samer"])
    "; did you mean 'hpool'?"
    >>> close_match("x", ["hpool", "samer"])
    ''
    """
    matches = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"; did you mean {matches[0]!r}?" if matches else ""


def field_path(*parts: str | int) -> str:
    """Joins field names and list indices to the path of a field.

    >>> field_path("optimiser", "betas", 0), field_path("sources", "[1].path")
    ('optimiser.betas[0]', 'sources[1].path')
    """
    path = ""
    for part in parts:
        name = f"[{part}]" if isinstance(part, int) else part
        path += f".{name}" if path and name and not name.startswith("[") else name
    return path


class SpecError(ValueError):
    """Error for invalid user input.

    The message names the field, the rule that it breaks and the value. Jobs print the message and
    exit with code 2.

    Args:
        field: Dotted path of the field.
        value: The invalid value.
        rule: Description of valid values, which completes "must be ...".
        problem: Description of what is wrong with the value, which completes "which ...".
        note: Text to append to the message unchanged, for example " (line 3)".

    >>> str(SpecError("num_vectors", 0, "an integer >= 1"))
    'num_vectors must be an integer >= 1, got 0'
    >>> str(SpecError("path", "x", "an existing file", "does not exist"))
    "path must be an existing file, got 'x', which does not exist"

    Long values are shortened in the middle:

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
        """Returns the error for a value that is not one of `names`.

        The message suggests the most similar name.

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
        """Pickles the original error, because Ray wraps errors that are raised in tasks."""
        error = getattr(self, "cause", self)
        return type(error), (error.field, error.value, error.rule, error.problem, error.note)

    def at(self, field: str) -> SpecError:
        """Returns the same error for another field."""
        kind, (_, *arguments) = self.__reduce__()
        return kind(field, *arguments)

    def below(self, prefix: str) -> SpecError:
        """Returns the same error for a spec that is the value of the field `prefix`."""
        return self.at(field_path(prefix, self.field))

    def _location(self) -> str:
        parent = self.field.rpartition(".")[0]
        return f" in {parent}" if parent else ""


class UnknownField(SpecError):
    """Raised if a spec has a field that does not exist. `rule` lists the valid fields."""

    def _message(self) -> str:
        name = self.field.rpartition(".")[2]
        match = close_match(name, self.rule.split(", ")) or ";"
        return (
            f"unknown field {name!r}{self._location()}{match} valid fields: {self.rule}{self.note}"
        )


class MissingField(SpecError):
    """Raised if a required field is missing. `rule` describes valid values, if they are known."""

    def _message(self) -> str:
        name = self.field.rpartition(".")[2]
        rule = f"; it must be {self.rule}" if self.rule else ""
        return f"field {name!r} is required{self._location()}{rule}"


class InvalidValue(SpecError):
    """Raised if pydantic rejects a value. `rule` is the message of pydantic.

    >>> str(InvalidValue("k", 0, "Input should be greater than or equal to 1"))
    'k must be greater than or equal to 1, got 0'
    """

    def _message(self) -> str:
        message = self.rule.removesuffix(", got a number with a fractional part")
        subject, _, rule = message.partition(" should ")
        rule = f" must {rule}" if rule else f": {subject}"
        return f"{self.field}{rule}, got {_shown(self.value)}"


def _shown(value: Any) -> str:
    shown = repr(value)
    if len(shown) > MAX_SHOWN_CHARACTERS:  # queries can be long
        half = MAX_SHOWN_CHARACTERS // 2
        shown = f"{shown[:half]} ... {shown[-half:]}"
    return shown


class JobError(RuntimeError):
    """Raised if a job fails for a reason other than invalid input.

    Jobs print it and exit with code 1.
    """


class Stopped(Exception):
    """Raised when SIGTERM stops a job.

    Completed work has been committed at that point, and the job exits with code 143.
    """


class Spec(BaseModel):
    """Base class of all specs.

    Specs are immutable and reject unknown fields.

    Attributes:
        unnamed: Fields that default column names omit.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )
    unnamed: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                names = ", ".join(cls.model_fields)
                raise UnknownField(str(key), value, names, note=cls.unknown_field_note(str(key)))
            if isinstance(value, bool):  # pydantic converts `true` to 1
                types = set(_union_members(cls.model_fields[key].annotation))
                if types <= {int, float, NoneType}:
                    raise SpecError(key, value, "a number")
        return data

    @classmethod
    def unknown_field_note(cls, name: str) -> str:
        """Returns the end of the message about an unknown field."""
        return ""

    def require(self, holds: bool, field: str, rule: str) -> None:
        """Raises `SpecError` for a field that contradicts another one.

        Args:
            holds: True if the fields agree.
            field: Name of the field.
            rule: Valid values of the field, see `SpecError`.
        """
        if not holds:
            raise SpecError(field, self.model_dump(mode="json", include={field})[field], rule)


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
    """Converts a local path to an absolute path and returns URIs unchanged.

    Relative paths would be ambiguous, because Ray workers may run in other working directories.

    Raises:
        SpecError: The path begins with `~` and an unknown user name.
    """
    if is_uri(uri):
        return uri
    if os.path.expanduser(uri).startswith("~") and not Path(uri).exists():
        raise SpecError("", uri, "a path whose ~ can be expanded", "names an unknown user")
    return local_path(uri)


def location(value: Any, field: str) -> str:
    """Returns the absolute path or the URI that an argument of a Python call contains."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise SpecError(field, value, "a path or a URI")
    with within(field), reading("", value, "a path or a URI"):
        Path(path).exists()  # raises an error for a long name
        return absolute(path)


@contextlib.contextmanager
def reading(
    field: str, value: Any, rule: str, *errors: type[Exception], problem: str = "cannot be read"
) -> Iterator[None]:
    """Converts `OSError` and the given errors inside the block to a `SpecError`.

    `problem` precedes the message of the error; see `SpecError` for the other arguments.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except (SpecError, MissingExtra):
        raise
    except FileNotFoundError as error:
        name = PurePath(error.filename or "").name
        if is_uri(str(value)) or not Path(str(value)).exists():
            problem = "does not exist"
        else:  # a folder without a file, which libraries do not always name
            problem = f"has no {name}" if name else f"{problem} ({one_line(error)})"
        raise SpecError(field, value, rule, problem) from None
    except kinds as error:
        if "out of memory" in str(error).lower():
            raise
        raise SpecError(field, value, rule, f"{problem} ({one_line(error)})") from None


def check_exists(path: str, field: str, rule: str = "the path of an existing file") -> None:
    """Raises `SpecError` if a local path does not exist. Paths with a URI scheme are not checked.

    Commands call this function before slow imports, so that typing errors are reported immediately.
    """
    with within(field):
        location = absolute(path)
    if not is_uri(location) and not Path(location).exists():
        raise SpecError(field, path, rule, "does not exist")


#: Type of spec fields that contain a path or a URI. Local paths are made absolute.
Uri = Annotated[str, Field(min_length=1), AfterValidator(absolute)]


@contextlib.contextmanager
def within(field: str) -> Iterator[None]:
    """Prepends `field` to the field of every `SpecError` that is raised inside the block."""
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
        return spec_class.model_validate(_with_types(data, spec_class))
    except ValidationError as error:
        raise describe(error.errors()) from None


def describe(errors: Sequence[Mapping[str, Any]], root: str = "spec") -> SpecError:
    """Converts the first of several validation errors of pydantic to a `SpecError` about `root`.

    Missing fields come last, because those of a component depend on its name, which may be wrong.
    """
    first = min(errors, key=lambda error: error["type"] == "missing")
    place = list(first["loc"])
    if place and place[-1] in ("int", "float", "str"):  # the member of a union
        place.pop()
    field, cause = field_path(*place), first.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause.below(field)
    if first["type"] == "missing":
        return MissingField(field, None, "")
    return InvalidValue(field or root, first["input"], first["msg"])


class _UniqueKeyLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML loader that rejects duplicate keys in mappings. It is in C where PyYAML has it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [
            self.construct_object(key, deep=True)
            for key, _ in node.value
            if key.tag != "tag:yaml.org,2002:merge"  # `<<: *anchor`, which other keys override
        ]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"duplicate key {key!r}"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def load(
    spec_class: type[SpecT], path: str, overrides: Iterable[str] = (), *, role: str = "spec"
) -> SpecT:
    """Reads a YAML spec and applies dotted overrides such as `encoder.layer=-2`.

    Args:
        spec_class: Class of the spec.
        path: Path or URI of a YAML file.
        overrides: Assignments of the form `dotted.field=value`.
        role: Name of the file in error messages, such as `resources`.

    Raises:
        SpecError: The file is missing or not a YAML mapping, or a field is invalid.
    """
    return parse(spec_class, override(read(path, role), overrides))


def read(path: str, role: str) -> dict[str, Any]:
    """Reads a YAML file with a mapping.

    Raises:
        MissingExtra: The storage needs a package that is not installed.
        SpecError: The file is missing or not a YAML mapping; the error names `role`.
    """
    rule = "a YAML file with a mapping of fields to values"
    with (
        reading(role, path, rule, ValueError, ImportError, RecursionError, yaml.YAMLError),
        open_file(path, "r") as file,
    ):
        data = yaml.load(file.read(), _UniqueKeyLoader)
    if not isinstance(data, dict):
        raise SpecError(role, path, rule, "has none")
    return data


def override(data: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Applies assignments of the form `a.b=value` to nested mappings and lists.

    `parse` decides by the type of a field what its value is: the text as given for a text or a
    path, else the text parsed as YAML. `null` clears a field that may be null.

    >>> class Encoder(Spec):
    ...     layer: int = -1
    ...     prefix: str = ""
    >>> parse(Encoder, override({}, ["layer=-2", "prefix=query #1: "]))
    Encoder(layer=-2, prefix='query #1: ')
    """
    values = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise SpecError("override", assignment, "of the form dotted.field=value")
        values.append((path, Assigned(text)))
    return assign(data, values)


def assign(data: dict[str, Any], values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Assigns values to dotted fields of nested mappings and lists. Returns a changed copy.

    >>> assign({"sweep": {"compressor.ratio": [2]}}, [("sweep.compressor.ratio", [8]), ("a.b", 1)])
    {'sweep': {'compressor.ratio': [8]}, 'a': {'b': 1}}
    """
    data = copy.deepcopy(data)
    for path, value in values:
        # Later assignments may change fields within the value.
        _assign(data, path, copy.deepcopy(value), f"{path}={value}")
    return data


class Assigned(str):
    """Text that has been assigned to a field, until `parse` replaces it by a value of its type."""

    def parsed(self) -> Any:
        """Returns the text parsed as YAML."""
        errors = (ValueError, RecursionError, yaml.YAMLError)
        with reading("", str(self), "a YAML value", *errors, problem="cannot be parsed"):
            return yaml.load(str(self), _UniqueKeyLoader)


def _with_types(value: Any, annotation: Any) -> Any:
    """Replaces assigned texts in the value of a field by values of the declared types.

    Values of components remain, because `parse` is called with the spec of the component.
    """
    if not isinstance(value, Assigned | Mapping | list):
        return value  # most values of a search, where each microsecond counts
    types = list(_union_members(annotation))
    if isinstance(value, Assigned):
        return _with_type(value, types)
    for kind in types:
        parameters = get_args(kind) or (Any, Any)
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, Spec):
            fields = kind.model_fields
            types_by_name = {name: field.annotation for name, field in fields.items()}
        elif isinstance(value, Mapping) and (get_origin(kind) or kind) in (dict, Mapping, Any):
            types_by_name = dict.fromkeys(value, parameters[1])
        elif isinstance(value, list) and (get_origin(kind) or kind) in (list, tuple, Any):
            return [_with_types(item, parameters[0]) for item in value]
        else:
            continue
        typed = dict(value)
        for name in types_by_name.keys() & value.keys():
            with within(name):
                typed[name] = _with_types(value[name], types_by_name[name])
        return typed
    return value


def _with_type(text: Assigned, types: list[Any]) -> Any:
    """Returns a text as it is, or parsed as YAML, for a field of one of the types."""
    names = [name for kind in types if get_origin(kind) is Literal for name in get_args(kind)]
    if not (str in types or any(isinstance(name, str) for name in names)):
        return text.parsed()
    others = {get_origin(kind) or kind for kind in types} - {str, Literal}
    others |= {type(name) for name in names} - {str}
    others |= {int} if float in others else set()
    others |= {list} if tuple in others else set()
    if not others or text in names:
        return str(text)
    try:
        parsed = text.parsed()
    except SpecError:
        return str(text)
    if type(parsed) not in others or (parsed is None and text not in ("", "null")):
        return str(text)
    return parsed


def _union_members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _union_members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _union_members(member)
    else:
        yield annotation


def _assign(node: Any, path: str, value: Any, assignment: str) -> None:
    part, _, rest = path.partition(".")
    if isinstance(node, dict) and (path in node or not rest):
        node[path] = value  # The keys of a sweep are dotted paths themselves.
        return
    if isinstance(node, list) and not rest:
        _child(node, part, assignment)
        node[int(part)] = value
        return
    if isinstance(node, dict) and isinstance(node.get(part), Assigned):
        node[part] = node[part].parsed()
    if isinstance(node, dict) and isinstance(node.get(part), str):
        node[part] = {"name": node[part]}  # Expands `encoder: minilm` to `encoder: {name: minilm}`.
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
    """Expands a sweep to the list of all combinations, as nested mappings.

    The last key varies fastest.

    >>> expand_sweep({"compressor.name": ["hpool", "samer"], "compressor.num_vectors": [32, 16]})[1]
    {'compressor': {'name': 'hpool', 'num_vectors': 16}}
    >>> expand_sweep({"compressor": {"name": "hpool", "num_vectors": [32, 16]}})[0]
    {'compressor': {'name': 'hpool', 'num_vectors': 32}}
    """
    return [assign({}, values.items()) for values in combinations(sweep)]


def combinations(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Expands a sweep to all combinations, as mappings of dotted fields to values.

    The last key varies fastest.

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


def _flatten(sweep: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields pairs of a dotted field name and its value from a nested sweep."""
    for field, values in sweep.items():
        if isinstance(values, Mapping):
            yield from _flatten(values, f"{prefix}{field}.")
        else:
            yield f"{prefix}{field}", values


def dump(spec: Spec, exclude: Iterable[str] = ()) -> dict[str, Any]:
    """Converts a spec to JSON types. Fields with default values are included."""
    return spec.model_dump(mode="json", exclude=set(exclude))


def dump_yaml(spec: Spec) -> str:
    """Converts a spec to YAML. `load` reads an equal spec from it."""
    return yaml.safe_dump(dump(spec), sort_keys=False, allow_unicode=True)


def digest(value: Any) -> str:
    """Returns a stable hash (16 hexadecimal digits) of a spec or JSON value."""
    value = dump(value) if isinstance(value, Spec) else value
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def first_line(error: Exception) -> str:
    """Returns the first line of an error message, or the name of the error type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def one_line(error: Exception) -> str:
    """Returns an error message without line breaks, shortened, or the name of the error type."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
