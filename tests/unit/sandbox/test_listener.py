"""Where an HTTP server may listen: on loopback, or with a token."""

import pytest

from sandbox.http.listener import Address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_an_address_that_others_reach_needs_a_token(host):
    with pytest.raises(ValueError, match=r"host .* token"):
        Address(host=host)
    assert Address(host=host, token="t").host == host


@pytest.mark.parametrize("port", [-1, 1 << 16])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ValueError, match=f"port .*got {port}"):
        Address(port=port)
