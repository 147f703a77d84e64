"""The page at `/` and its two files. A browser may load nothing else for it, and show it in no frame."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["page_routes"]

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {
    "/": ("page.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
}


def page_routes() -> list[Route]:
    """Read once, here."""
    folder = files("router.http") / "page"
    return [_route(path, (folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()]


def _route(path: str, content: bytes, kind: str) -> Route:
    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return Route(path, endpoint, methods=["GET"])
