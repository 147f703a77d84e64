from __future__ import annotations

import pytest

from tandem.address import check_address
from tandem.errors import ConfigError


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:x", "head:0", "head:70000", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--head .* is no HOST:PORT"):
        check_address(address, "--head")


def test_addresses_of_both_families_are_read() -> None:
    assert check_address("head:6379", "--head") == ("head", 6379)
    assert check_address("[fd00::1]:6379", "--head") == ("fd00::1", 6379)
