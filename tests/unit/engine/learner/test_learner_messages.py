"""Frames that are no message of node or learner are a ValueError."""

import msgspec
import pytest

from engine.learner.messages import Saved, Stop, pack, unpack_reply, unpack_request


@pytest.mark.parametrize(
    ("specs", "data"),
    [
        ([("a", "no dtype", (1,))], [b"\0"]),
        ([("a", "|O", (1,))], [b"\0" * 8]),
        ([("a", "<i4", (2,))], [b"\0" * 4]),
        ([("a", "<i4", (1,))], []),
        ({"a": 1}, []),
    ],
)
def test_frames_of_no_message_are_a_value_error(specs, data):
    for unpack, message in ((unpack_request, Stop()), (unpack_reply, Saved(path="file"))):
        with pytest.raises(ValueError, match=r"."):
            unpack([msgspec.msgpack.encode(message), msgspec.msgpack.encode(specs), *data])
    with pytest.raises(ValueError, match=r"."):
        unpack_request(pack(Saved(path="file")))
