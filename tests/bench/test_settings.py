"""Tables of a TOML file become dataclasses, or an error that names the place, what it must be and what was found."""

import re
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedup.bench.settings import build, checked, config_of, convert, later
from fedup.errors import DataError, SettingError


@dataclass(frozen=True)
class Sample:
    """One field of each type that settings have."""

    name: str
    count: int
    share: float = 0.5
    ready: bool = False
    classes: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    rows: int | None = None
    cut: str | None = None
    policy: Literal["drop", "keep"] = "drop"
    notes: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise SettingError(f"count must be 0 or more; found {self.count}.")
        if self.count == 666:
            raise DataError("count is the number of the beast.")


GIVEN = {"name": "a", "count": 1}
tables = st.fixed_dictionaries(
    {"name": st.text(), "count": st.integers(0, 600)},
    optional={
        "share": st.floats(allow_nan=False) | st.integers(-1000, 1000),
        "ready": st.booleans(),
        "classes": st.lists(st.integers()),
        "shares": st.lists(st.floats(allow_nan=False) | st.integers(-1000, 1000)),
        "rows": st.integers(),
        "cut": st.text(),
        "policy": st.sampled_from(["drop", "keep"]),
        "notes": st.lists(st.text()),
    },
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tables)
def test_every_good_table_is_built_with_the_values_it_gives_and_the_defaults_of_the_others(table):
    built = build(Sample, table, "here")
    for name, value in vars(Sample("", 0)).items():
        found = getattr(built, name)
        expected = table.get(name, value)
        assert found == (tuple(expected) if isinstance(expected, list) else expected)
    assert type(built.share) is float
    assert all(type(share) is float for share in built.shares)
    hash(built)  # lists became tuples


WANTED = {
    **{
        "name": (str, "a text"),
        "cut": (str, "a text"),
        "count": (int, "a whole number"),
        "rows": (int, "a whole number"),
    },
    **{"share": (float | int, "a number"), "ready": (bool, "true or false"), "classes": (list, "a list")},
    "policy": (None, "one of 'drop', 'keep'"),
}
ANY = st.booleans() | st.integers(-9, 9) | st.floats() | st.text() | st.lists(st.integers()) | st.just({"a": 1})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(WANTED)), ANY)
@example("count", True)
@example("rows", True)
@example("policy", ["drop"])
def test_a_wrong_type_is_refused_with_its_place_what_it_must_be_and_what_was_found(key, value):
    type_, words = WANTED[key]
    if (value in ("drop", "keep") if type_ is None else isinstance(value, type_)) and (
        not isinstance(value, bool) or type_ is bool
    ):
        return
    with pytest.raises(SettingError) as caught:
        build(Sample, {**GIVEN, key: value}, "methods.mine")
    assert str(caught.value) == f"methods.mine.{key} must be {words}; found {value!r}."


def test_what_is_wrong_inside_a_list_or_by_itself_is_refused_with_its_place():
    for key, value, told in (
        ("classes", [1, "2"], "here.classes[1] must be a whole number; found '2'."),
        ("classes", [1, 2, True], "here.classes[2] must be a whole number; found True."),
        ("count", -1, "here: count must be 0 or more; found -1."),
        ("count", 666, "here: count is the number of the beast."),  # what the dataclass itself refuses
    ):
        with pytest.raises(SettingError) as caught:
            build(Sample, {**GIVEN, key: value}, "here")
        assert str(caught.value) == told
    for key in GIVEN:
        with pytest.raises(SettingError, match=rf"^here: {key} is missing\.$"):
            build(Sample, {name: value for name, value in GIVEN.items() if name != key}, "here")
    for table in (3, "text", [1], True, None):
        with pytest.raises(SettingError, match=r"^here must be a table; found"):
            checked(table, ["a"], "here")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.recursive(ANY, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5),
    st.sampled_from([int, float, str, bool, list, dict, tuple[int, ...], int | None, Literal["drop", "keep"]]),
)
def test_whatever_toml_can_hold_is_converted_or_refused_with_its_place(value, hint):
    try:
        found = convert(value, hint, "some.place")
    except SettingError as error:
        assert re.match(r"some\.place(\[\d+\])* must be (a|one|true)\b.*; found ", str(error), re.DOTALL)
    else:
        assert (
            found == (tuple(value) if isinstance(value, list) and hint is not list else value) or value != value
        )  # nan
        assert isinstance(value, bool) <= (hint is bool)


def test_an_unknown_key_is_refused_with_its_place_all_keys_and_the_nearest():
    for key, near in (("cuont", "count"), ("Name", "name"), ("class", "classes"), ("zzz", None)):
        with pytest.raises(SettingError) as caught:
            build(Sample, {**GIVEN, key: 1}, "scenarios.mine")
        told = str(caught.value)
        assert told.startswith(f"scenarios.mine: there is no key {key!r}; there are name, count, share, ")
        assert told.endswith(f"Did you mean {near!r}?" if near else "notes.")


def test_what_is_given_besides_the_table_is_no_key_of_it():
    assert build(Sample, {"name": "a"}, "here", also={"count": 3}) == Sample("a", 3)
    with pytest.raises(SettingError, match="here: there is no key 'count'"):
        build(Sample, GIVEN, "here", also={"count": 3})


@dataclass(frozen=True)
class Grown:
    """Settings to which four were added; before the last of them all was measured as if it were "old"."""

    rank: int = 3
    trigger: str | None = later(None)
    price: float = later(0.5)
    places: tuple[int, ...] = later(())
    kind: str = later("new", before="old")


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rank": st.sampled_from([3, 4]),
            "trigger": st.sampled_from([None, "patch"]),
            "price": st.sampled_from([0.5, 0.0]),
            "places": st.sampled_from([(), (1, 2)]),
            "kind": st.sampled_from(["old", "new", "other"]),
        },
    )
)
def test_what_was_added_later_is_told_just_where_it_is_not_what_was_before(given_):
    before = {"trigger": None, "price": 0.5, "places": (), "kind": "old"}
    values = {**vars(Grown()), **given_}
    assert config_of(Grown(**given_)) == {
        name: value for name, value in values.items() if name == "rank" or value != before[name]
    }
    assert build(Grown, {"price": 1, "places": [4]}, "here") == Grown(price=1.0, places=(4,))
    assert config_of(Sample("a", 1)) == vars(Sample("a", 1))
