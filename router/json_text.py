"""JSON that a client wrote."""

from __future__ import annotations

import json
from typing import Any

from tandem.errors import InvalidRequest

__all__ = ["parse_json"]

_MARK = "\ufeff"


def parse_json(text: str | bytes, field: str) -> Any:
    """
    Raises:
        InvalidRequest: no UTF-8 (the only encoding of JSON between systems: RFC 8259, 8.1), no JSON, or nested too deeply;
            says where.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode().removeprefix(_MARK))
    except json.JSONDecodeError as error:
        raise InvalidRequest(field, f"is no valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, f"is no valid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise InvalidRequest(field, "is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise InvalidRequest(field, "holds a number that is too long") from error
