"""Tables of a TOML file as frozen dataclasses: every key known, every value of the right type, or a clear error."""

import difflib
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, field, fields, is_dataclass, make_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedup.errors import FedUPError, SettingError

T = TypeVar("T")
_FORMER_NAMES = {"eraser_cut": "erase_at", "max_variance_loss": "most_price"}  # in stored results and their hashes
_TOLD_BY_ALL = "__told_by_all_results__"  # of a base class of borrowed settings; no setting has such a name
_OF_RUNS = ("seed", "replay_seed")  # no settings of a method


def later(default: Any, *, before: Any = MISSING) -> Any:
    """A field added after results were stored; they count as measured with `before` (by default, the default).
    `config_of` leaves the field out where it has that value, so that stored results stay valid."""
    return field(default=default, metadata={"before": default if before is MISSING else before})


def borrowed(*parts: Any, first: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    """A base class with all settings of other dataclasses.

    `first` are the settings that every stored result contains, with their values then. All others count as added
    `later`: results contain them where they differ from their value `before`.
    """
    was = {**first, **before}
    own: list[tuple[str, Any, Any]] = []
    for cls in parts:
        hints = get_type_hints(cls)
        own += [
            (one.name, hints[one.name], later(one.default, before=was.get(one.name, one.default)))
            for one in fields(cls)
            if one.name not in _OF_RUNS
        ]
    return make_dataclass("Borrowed", own, frozen=True, namespace={_TOLD_BY_ALL: first})


def lent(settings: Any, cls: type[T], **also: Any) -> T:
    """The borrowed settings as their original dataclass."""
    own = {one.name: getattr(settings, one.name) for one in fields(cls) if one.name not in _OF_RUNS}  # type: ignore
    return cls(**{**own, **also})


def config_of(settings: Any) -> dict[str, Any]:
    """A dataclass as plain data, for results and their hashes."""
    before = {one.name: one.metadata["before"] for one in fields(settings) if "before" in one.metadata}
    told = {name: value for name, value in asdict(settings).items() if name not in before or value != before[name]}
    return {
        _FORMER_NAMES.get(name, name): value for name, value in {**getattr(settings, _TOLD_BY_ALL, {}), **told}.items()
    }


def build(cls: type[T], table: object, where: str, *, also: Mapping[str, Any] | None = None) -> T:
    """An instance from the table at `where`; `also` holds values that no table may set."""
    if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise SettingError(f"{where}: {cls.__name__} must be a frozen dataclass.")
    hints, taken = get_type_hints(cls), also or {}
    known = [one.name for one in fields(cls) if one.name not in taken]
    values = {key: convert(value, hints[key], f"{where}.{key}") for key, value in checked(table, known, where).items()}
    missing = [
        one.name
        for one in fields(cls)
        if one.name in known and one.name not in values and one.default is MISSING and one.default_factory is MISSING
    ]
    if missing:
        raise SettingError(f"{where}: {missing[0]} is missing.")
    try:
        return cls(**values, **taken)
    except (FedUPError, ValueError, TypeError) as error:  # a user's own class may raise what it likes
        raise SettingError(f"{where}: {error}") from error


def checked(table: object, known: Collection[str], where: str) -> dict[str, Any]:
    """The table itself, if it is a table with known keys only."""
    if not isinstance(table, dict):
        raise SettingError(f"{where} must be a table; found {table!r}.")
    for key in table:
        if key not in known:
            raise SettingError(f"{where}: there is no key {key!r}; {closest(key, known)}")
    return table


def closest(name: str, known: Collection[str]) -> str:
    """The known names, and the one nearest to `name`."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"there are {', '.join(known) or 'none'}." + (f" Did you mean {near[0]!r}?" if near else "")


def convert(value: object, hint: Any, where: str) -> Any:
    """The value, if it has that type; integers count as floats, lists as tuples."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return convert(value, next(one for one in inner if one is not type(None)), where)
    if origin is tuple and isinstance(value, list):
        return tuple(convert(one, inner[0], f"{where}[{place}]") for place, one in enumerate(value))
    if origin is Literal and value in inner:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is not bool and isinstance(value, bool)):
        return value
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}
    wanted = "a list" if origin is tuple else words.get(hint, "a table")
    if origin is Literal:
        wanted = "one of " + ", ".join(map(repr, inner))
    raise SettingError(f"{where} must be {wanted}; found {value!r}.")
