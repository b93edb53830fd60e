"""Tables of a TOML file become dataclasses, or an error that names the place, what it must be and what was found."""

import math
import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.bench.settings import build, checked, closest, config_of, convert, later
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


@settings(max_examples=100, deadline=None, derandomize=True)
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


def test_a_table_as_toml_reads_it_is_built():
    table = tomllib.loads('name = "a"\ncount = 1_000\nshare = 1\nclasses = [1, 2]\nrows = 5\npolicy = "keep"')
    assert build(Sample, table, "here") == Sample("a", 1000, 1.0, classes=(1, 2), rows=5, policy="keep")


WRONG = [
    ("name", 1, "a text"),
    ("name", ["a"], "a text"),
    ("name", {}, "a text"),
    ("count", True, "a whole number"),
    ("count", "1", "a whole number"),
    ("count", 1.0, "a whole number"),
    ("count", [1], "a whole number"),
    ("count", {"a": 1}, "a whole number"),
    ("share", False, "a number"),
    ("share", "0.5", "a number"),
    ("share", [0.5], "a number"),
    ("ready", 1, "true or false"),
    ("ready", "true", "true or false"),
    ("classes", 1, "a list"),
    ("classes", "12", "a list"),
    ("classes", {}, "a list"),
    ("rows", "all", "a whole number"),
    ("rows", True, "a whole number"),
    ("rows", 0.5, "a whole number"),
    ("cut", 1, "a text"),
    ("policy", "droop", "one of 'drop', 'keep'"),
    ("policy", True, "one of 'drop', 'keep'"),
    ("policy", ["drop"], "one of 'drop', 'keep'"),
    ("policy", {"a": 1}, "one of 'drop', 'keep'"),
]


@pytest.mark.parametrize(("key", "value", "wanted"), WRONG)
def test_a_wrong_type_is_refused_with_its_place_what_it_must_be_and_what_was_found(key, value, wanted):
    with pytest.raises(SettingError) as caught:
        build(Sample, {**GIVEN, key: value}, "methods.mine")
    assert str(caught.value) == f"methods.mine.{key} must be {wanted}; found {value!r}."


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1, "2"], r"here\.classes\[1\] must be a whole number; found '2'"),
        ([1, 2, True], r"here\.classes\[2\] must be a whole number; found True"),
        ([[1]], r"here\.classes\[0\] must be a whole number; found \[1\]"),
        ([{}], r"here\.classes\[0\] must be a whole number; found \{\}"),
    ],
)
def test_a_wrong_type_inside_a_list_is_refused_with_its_place_in_the_list(value, told):
    with pytest.raises(SettingError, match=told):
        build(Sample, {**GIVEN, "classes": value}, "here")


@pytest.mark.parametrize("hint", [list, dict])
@pytest.mark.parametrize("value", [3, "text", True, 0.5])
def test_a_value_that_must_be_a_list_or_a_table_is_refused_in_words(hint, value):
    with pytest.raises(SettingError, match=r"^here must be a (list|table)\b.*; found"):
        convert(value, hint, "here")


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e308])
def test_any_number_is_a_number(value):
    assert convert(value, float, "here") == value


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
    st.sampled_from([int, float, str, bool, tuple[int, ...], int | None, str | None, Literal["drop", "keep"]]),
)
def test_whatever_toml_can_hold_is_converted_or_refused_with_its_place(value, hint):
    try:
        found = convert(value, hint, "some.place")
    except SettingError as error:
        assert str(error).startswith("some.place")
        assert "must be" in str(error)
    else:
        assert found == (tuple(value) if isinstance(value, list) else value) or value != value  # nan
        assert isinstance(value, bool) <= (hint is bool)


@pytest.mark.parametrize(
    ("key", "near"), [("cuont", "count"), ("Name", "name"), ("class", "classes"), ("row", "rows"), ("share_", "share")]
)
def test_an_unknown_key_is_refused_with_its_place_all_keys_and_the_nearest(key, near):
    with pytest.raises(SettingError) as caught:
        build(Sample, {**GIVEN, key: 1}, "scenarios.mine")
    told = str(caught.value)
    assert told.startswith(f"scenarios.mine: there is no key {key!r}; there are name, count, share, ")
    assert told.endswith(f"Did you mean {near!r}?")


def test_a_key_that_resembles_none_is_refused_without_an_offer():
    with pytest.raises(SettingError, match=r"no key 'zzz'; there are name, .*notes\.$"):
        build(Sample, {**GIVEN, "zzz": 1}, "here")


def test_what_is_given_besides_the_table_is_no_key_of_it():
    assert build(Sample, {"name": "a"}, "here", also={"count": 3}) == Sample("a", 3)
    with pytest.raises(SettingError, match="here: there is no key 'count'"):
        build(Sample, GIVEN, "here", also={"count": 3})


@pytest.mark.parametrize("key", ["name", "count"])
def test_a_key_without_a_default_that_is_missing_is_named(key):
    with pytest.raises(SettingError, match=rf"^here: {key} is missing\.$"):
        build(Sample, {name: value for name, value in GIVEN.items() if name != key}, "here")


@pytest.mark.parametrize(("count", "told"), [(-1, "count must be 0 or more; found -1."), (666, "of the beast.")])
def test_what_the_dataclass_itself_refuses_gets_the_place(count, told):
    with pytest.raises(SettingError) as caught:
        build(Sample, {**GIVEN, "count": count}, "methods.mine")
    assert str(caught.value).startswith("methods.mine: count")
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize("table", [3, "text", [1], True, None])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(SettingError, match=r"^here must be a table; found"):
        checked(table, ["a"], "here")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text(), st.lists(st.text(min_size=1), unique=True))
def test_the_closest_is_one_of_those_there_are(name, known):
    told = closest(name, known)
    assert told.startswith(f"there are {', '.join(known) or 'none'}.")
    offered = told.removeprefix(f"there are {', '.join(known) or 'none'}.")
    assert not offered or any(offered == f" Did you mean {one!r}?" for one in known)


def test_a_known_name_is_its_own_closest():
    assert closest("fedup", ["retrain", "fedup"]) == "there are retrain, fedup. Did you mean 'fedup'?"


@dataclass(frozen=True)
class Grown:
    """Settings to which four were added; before the last of them all was measured as if it were "old"."""

    rank: int = 3
    trigger: str | None = later(None)
    price: float = later(0.5)
    places: tuple[int, ...] = later(())
    kind: str = later("new", before="old")


ADDED = {"trigger": "patch", "price": 0.25, "places": (1, 2)}


@pytest.mark.parametrize("given", [(), *[(name,) for name in ADDED], ("trigger", "price"), tuple(ADDED)], ids=str)
def test_what_was_added_later_is_left_out_while_it_has_its_default_and_told_otherwise(given):
    changed = {name: ADDED[name] for name in given}
    assert config_of(Grown(**changed, kind="old")) == {"rank": 3, **changed}


@pytest.mark.parametrize(("kind", "told"), [("old", {}), ("new", {"kind": "new"}), ("other", {"kind": "other"})])
def test_a_default_that_is_not_what_was_before_is_told_and_what_was_before_is_not(kind, told):
    assert config_of(Grown(kind=kind)) == {"rank": 3, **told}
    assert ("kind" in config_of(Grown())) is True


def test_what_was_there_from_the_start_is_always_told():
    assert config_of(Sample("a", 1)) == vars(Sample("a", 1))
    assert config_of(Grown(rank=3, price=0.5, kind="old")) == {"rank": 3}  # a default that is said is a default
    assert config_of(Grown(price=0.0, kind="old")) == {"rank": 3, "price": 0.0}  # which is not nothing


def test_a_setting_that_was_added_later_is_a_setting_like_any_other():
    assert build(Grown, {"price": 1, "places": [4]}, "here") == Grown(price=1.0, places=(4,))
    with pytest.raises(SettingError, match=r"here\.price must be a number"):
        build(Grown, {"price": "1"}, "here")
