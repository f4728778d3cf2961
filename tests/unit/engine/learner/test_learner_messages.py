"""Frames between node and learner: what is packed comes back, and anything else is a ValueError."""

import msgspec
import numpy as np
import pytest

from engine.learner.messages import Checkpoint, Saved, Stop, pack, unpack_reply, unpack_request


def test_arrays_come_back_as_they_were_packed():
    arrays = {"ids": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2], "none": np.zeros((0, 4), np.float32)}
    request = Checkpoint(path="step-000001", version=1)
    message, received = unpack_request([bytes(frame) for frame in pack(request, arrays)])
    assert message == request
    assert list(received) == list(arrays)
    for name, array in arrays.items():
        assert received[name].dtype == array.dtype
        np.testing.assert_array_equal(received[name], array)


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
