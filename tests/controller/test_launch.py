"""What `up` says when the Ray cluster that it shall join is not there."""

import socket

import pytest

from controller.launch import _check_reachable
from tandem.errors import TandemError


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
        _check_reachable(address)
    with pytest.raises(TandemError, match=r"nothing answers at 127\.0\.0\.1:.*RAY_ADDRESS"):
        _check_reachable(address)


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001", "head"])
def test_addresses_of_other_forms_are_left_to_ray(address: str) -> None:
    _check_reachable(address)
