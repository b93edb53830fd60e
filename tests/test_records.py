"""Objects in columns are the same as in a list."""

from dataclasses import dataclass

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


def test_no_object_is_beyond_the_end():
    with pytest.raises(IndexError):
        records([Sent(1, 2.0)])[1]
