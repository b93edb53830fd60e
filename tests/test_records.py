"""Objects in columns are the same as in a list."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedup.records import Records


@dataclass(frozen=True)
class Sent:
    client: int
    size: float
    name: str = ""
    kind: str = "a"


NAMES = st.sampled_from(["", "0" * 64, "A" * 64, "f" * 64, "é", "f" * 63, f"{7:064x}", f"{8:064x}"])
SENT = st.builds(Sent, st.integers(0, 2**64 - 1), st.floats(allow_nan=False), NAMES, st.sampled_from("ab"))


def records(objects):
    return Records(Sent, {"client": "Q", "size": "d"}, "name", objects)


@given(st.lists(SENT, max_size=8), st.lists(SENT, max_size=4), st.integers(0, 9))
def test_objects_in_columns_are_those_that_were_put_there_and_a_part_stays_as_it_was(first, then, start):
    own = records(first)
    part = own[start:]
    for each in then:
        own.append(each)
    assert own == [*first, *then] and part == first[start:] and len(own) == len(first) + len(then)
    assert [own[place] for place in range(-len(own), 0)] == list(own)


@given(st.lists(SENT, max_size=8), st.integers(0, 8), st.lists(SENT, max_size=4))
def test_what_is_cut_off_is_gone_whatever_comes_after_it(first, length, then):
    own = records(first)
    own.cut(length)
    for each in then:
        own.append(each)
    assert own == [*first[:length], *then]


@given(st.lists(SENT, max_size=4), SENT, st.sampled_from([{"client": 2**64}, {"client": -1}, {"size": "many"}]))
def test_an_object_that_does_not_fit_leaves_all_others_as_they_are(first, then, wrong):
    own = records(first)
    with pytest.raises((OverflowError, TypeError)):
        own.append(replace(then, kind="c", **wrong))
    own.append(then)
    assert own == [*first, then]


def test_no_object_is_beyond_the_end():
    with pytest.raises(IndexError):
        records([Sent(1, 2.0)])[1]
