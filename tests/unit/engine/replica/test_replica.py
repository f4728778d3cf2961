"""What a replica reads of a request before it sends it to its engine."""

import sys
from array import array

import pytest

from engine.replica.replica import largest_id


@pytest.mark.parametrize("kind", [list, lambda ids: array("i", ids)])
def test_the_largest_id_is_found(kind):
    assert [largest_id(kind(ids)) for ids in ([3, 9, 4], [7], [])] == [9, 7, 0]


def test_ids_may_grow_while_somebody_holds_the_frames_that_read_them():
    """The watch for stalls does so; a run on busy cores ended by "cannot resize an array that is exporting buffers"."""
    ids, held = array("i", [1, 2, 3]), []
    sys.setprofile(lambda frame, event, argument: held.append(frame))
    try:
        largest_id(ids)
    finally:
        sys.setprofile(None)
    ids.append(4)
    assert len(held) > 0
    assert ids.tolist() == [1, 2, 3, 4]
