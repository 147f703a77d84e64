"""Errors as OpenAI's clients know them: a status, and a body of message, type, param and code."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from router.statuses import shortened
from tandem.errors import InvalidRequest, Overloaded, RequestError, Unauthenticated, Unavailable, UnknownModel

__all__ = ["Refusal", "body_of", "refusal_of"]

# From the pipeline's names to OpenAI's.
_PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "prompt": "prompt",
    "json_schema": "response_format",
    "json_object": "response_format",
    "regex": "structured_outputs",
    "choice": "structured_outputs",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """retry_after_s: 0: says nothing."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}


def refusal_of(error: RequestError | TimeoutError) -> Refusal:
    match error:
        case UnknownModel():
            return Refusal(404, "invalid_request_error", str(error), "model", "model_not_found")
        case InvalidRequest():
            param = _param(error.field)
            return Refusal(400, "invalid_request_error", f"{param}: {error.reason}", param)
        case Unauthenticated():
            return Refusal(401, "invalid_request_error", str(error), code="invalid_api_key")
        case Overloaded():
            wait_s = max(1, math.ceil(error.retry_after_s))
            return Refusal(429, "rate_limit_error", str(error), code="rate_limit_exceeded", retry_after_s=wait_s)
        case Unavailable():
            return Refusal(503, "service_unavailable_error", str(error), retry_after_s=1)
        case TimeoutError():
            return Refusal(504, "timeout_error", str(error) or "the deadline passed")
    return Refusal(499, "cancelled_error", str(error))


def body_of(refusal: Refusal) -> dict[str, Any]:
    """What of it quotes the client is cut."""
    param = None if refusal.param is None else shortened(refusal.param)
    error = {"message": shortened(refusal.message), "type": refusal.kind, "param": param, "code": refusal.code}
    return {"error": error}


def _param(field: str) -> str:
    field = field.removeprefix("sampling.")
    field = re.sub(r"^chat\.(messages|tools)", r"\1", field)
    field = field.replace("chat.template_options", "chat_template_kwargs")
    return _PARAMS.get(field, field)
