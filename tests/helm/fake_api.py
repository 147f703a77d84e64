"""As much of a Kubernetes API server as Helm and kubectl need: discovery, objects, server-side apply, watches, scale.

What controllers do is done at once: a pod has succeeded, a workload is ready, as soon as it is written. Every write is kept in
a journal, so that tests can say what was touched.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.helm.fake_discovery import collection, discovery, is_collection

Object = dict[str, Any]

_WATCH_LOOK_S = 0.05
_WATCH_MOST_S = 30.0


class Store:
    """Objects by path, with the journal of writes: (verb, path)."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.journal: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self._events: list[tuple[int, str, str, Object]] = []  # version, type, path, object
        self.version = 1

    def write(self, verb: str, path: str, new: Object | None) -> Object:
        with self.changed:
            self.version += 1
            self.journal.append((verb, path))
            old = self.objects.pop(path, None)
            if new is None:
                assert old is not None
                self._events.append((self.version, "DELETED", path, old))
                self.changed.notify_all()
                return old
            made = _settled(copy.deepcopy(new), old, self.version)
            self.objects[path] = made
            self._events.append((self.version, "MODIFIED" if old else "ADDED", path, made))
            self.changed.notify_all()
            return made

    def below(self, path: str) -> list[Object]:
        with self.changed:
            return [thing for where, thing in self.objects.items() if where.rpartition("/")[0] == path]

    def events_after(self, version: int, path: str) -> list[tuple[int, str, Object]]:
        return [(v, kind, thing) for v, kind, where, thing in self._events if v > version and where.rpartition("/")[0] == path]


def _settled(thing: Object, old: Object | None, version: int) -> Object:
    """With what the server and the controllers add."""
    metadata = thing["metadata"]
    metadata.setdefault("uid", (old or {}).get("metadata", {}).get("uid") or f"uid-{version}")
    metadata["resourceVersion"] = str(version)
    metadata["generation"] = version
    metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
    if thing["kind"] == "Pod":
        thing["status"] = {"phase": "Succeeded", "conditions": []}
    if thing["kind"] in ("Deployment", "StatefulSet"):
        size = thing["spec"].get("replicas", 1)
        counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas", "availableReplicas", "currentReplicas"), size)
        conditions = [
            {"type": "Available", "status": "True"},
            {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
        ]
        thing["status"] = {
            "observedGeneration": version,
            **counts,
            "conditions": conditions,
            "currentRevision": "1",
            "updateRevision": "1",
        }
    return thing


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for the client's word
    store: Store

    def log_message(self, *arguments: object) -> None:
        pass

    # ---- answers ----

    def _send(self, thing: Object, status: int = HTTPStatus.OK) -> None:
        body = json.dumps(thing).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, reason: str) -> None:
        self._send(
            {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": reason, "code": status},
            status,
        )

    def _body(self) -> Object:
        """JSON and YAML are both YAML."""
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return dict(yaml.safe_load(text) or {})

    # ---- verbs ----

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if (answer := discovery(url.path)) is not None:
            self._send(answer)
        elif (thing := self.store.objects.get(url.path)) is not None:
            self._send(thing)
        elif is_collection(url.path):
            self._watch(url.path, query) if "watch" in query else self._list(url.path, query)
        else:
            self._fail(HTTPStatus.NOT_FOUND, "NotFound")

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        thing = self._body()
        where = f"{path}/{thing['metadata']['name']}"
        if where in self.store.objects:
            self._fail(HTTPStatus.CONFLICT, "AlreadyExists")
        else:
            self._send(self.store.write("create", where, thing), HTTPStatus.CREATED)

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path
        self._send(self.store.write("update", path, self._body()))

    def do_PATCH(self) -> None:
        path = urlsplit(self.path).path
        patch = self._body()
        target = path.removesuffix("/scale")
        old = self.store.objects.get(target)
        if "apply-patch" in self.headers["Content-Type"]:
            self._send(self.store.write("apply", target, patch))  # one manager only: what it gives is all there is
        elif old is None:
            self._fail(HTTPStatus.NOT_FOUND, "NotFound")
        elif target != path:
            self._send(_scale_of(self.store.write("scale", target, _merged(old, patch))))
        else:
            self._send(self.store.write("patch", target, _merged(old, patch)))

    def do_DELETE(self) -> None:
        path = urlsplit(self.path).path
        self._body()  # its options; left unread it would be taken for the next request
        if path in self.store.objects:
            self._send(self.store.write("delete", path, None))
        else:
            self._fail(HTTPStatus.NOT_FOUND, "NotFound")

    # ---- collections ----

    def _list(self, path: str, query: dict[str, list[str]]) -> None:
        group, kind = collection(path)
        items = [thing for thing in self.store.below(path) if _chosen(thing, query)]
        self._send(
            {
                "kind": f"{kind}List",
                "apiVersion": group,
                "metadata": {"resourceVersion": str(self.store.version)},
                "items": items,
            }
        )

    def _watch(self, path: str, query: dict[str, list[str]]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        group, kind = collection(path)
        try:
            for event in self._events(path, query, group, kind):
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _events(self, path: str, query: dict[str, list[str]], group: str, kind: str) -> Iterator[Object]:
        last = int(query.get("resourceVersion", ["0"])[0] or 0)
        if query.get("sendInitialEvents") == ["true"]:
            last = self.store.version
            for thing in self.store.below(path):
                if _chosen(thing, query):
                    yield {"type": "ADDED", "object": thing}
            marks = {"resourceVersion": str(last), "annotations": {"k8s.io/initial-events-end": "true"}}
            yield {"type": "BOOKMARK", "object": {"kind": kind, "apiVersion": group, "metadata": marks}}
        waited_s = 0.0
        while waited_s < _WATCH_MOST_S and not self.server.closing:  # type: ignore[attr-defined]
            with self.store.changed:
                news = self.store.events_after(last, path)
                if not news:
                    self.store.changed.wait(_WATCH_LOOK_S)
                    waited_s += _WATCH_LOOK_S
            for version, event, thing in news:
                last = version
                if _chosen(thing, query):
                    yield {"type": event, "object": thing}


def _chosen(thing: Object, query: dict[str, list[str]]) -> bool:
    for selector in query.get("fieldSelector", []):
        key, _, value = selector.partition("=")
        if key == "metadata.name" and thing["metadata"]["name"] != value:
            return False
    labels = thing["metadata"].get("labels", {})
    wanted = [part.partition("=") for text in query.get("labelSelector", []) for part in text.split(",")]
    return all(labels.get(key) == value for key, _, value in wanted)


def _merged(old: Object, patch: Object) -> Object:
    """RFC 7386."""
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result


def _scale_of(workload: Object) -> Object:
    metadata = {key: workload["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    size = workload["spec"]["replicas"]
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": size},
        "status": {"replicas": size},
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    closing = False


@contextmanager
def api_server() -> Iterator[tuple[str, Store]]:
    """Its URL, and what it holds."""
    store = Store()
    for namespace in ("default", "serving"):
        store.write(
            "create",
            f"/api/v1/namespaces/{namespace}",
            {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": namespace}},
        )
    handler = type("Handler", (_Handler,), {"store": store})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="api server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", store
    finally:
        server.closing = True
        server.shutdown()
        server.server_close()
        thread.join()
