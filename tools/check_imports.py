"""Who may import what, enforced. The rules are data; the checker reads the source, it imports nothing.

Run as `python tools/check_imports.py [ROOT]`: one line per breach, exit 1 when there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

__all__ = ["ONLY_IN", "PURE", "ROOMS", "UNSAFE", "Breach", "Owners", "breaches", "check_source", "main"]

ROOMS = ("tandem", "transfer", "router", "controller", "prefill_worker", "decode_worker")


@dataclass(frozen=True, slots=True)
class Owners:
    """Who may import a package. Everything else may not, not even inside a function."""

    whose: str
    files: tuple[str, ...]


ONLY_IN = {
    "ray": Owners(
        "the actors and what launches them",
        (
            "prefill_worker/actor.py",
            "decode_worker/actor.py",
            "controller/actor.py",
            "controller/burial.py",
            "controller/launch.py",
            "controller/ray_workers.py",
            "controller/signals.py",
            "controller/store.py",
        ),
    ),
    "opentelemetry": Owners("the tracer", ("tandem/otel.py",)),
    "nixl": Owners("the one transfer agent", ("transfer/nixl_agent.py",)),
    "grpc": Owners(
        "the service and client modules",
        (
            "tandem/guard.py",
            "tandem/rpc.py",
            "tandem/client/asynchronous.py",
            "tandem/client/messages.py",
            "tandem/client/synchronous.py",
            "tandem/cli/client_tls.py",
            "tandem/cli/generate.py",
            "tandem/cli/health.py",
            "tandem/cli/operations.py",
            "tandem/cli/status.py",
            "tandem/cli/verify.py",
            "prefill_worker/host.py",
            "prefill_worker/pairing.py",
            "prefill_worker/peers.py",
            "prefill_worker/service.py",
            "decode_worker/host.py",
            "decode_worker/service.py",
            "router/gate.py",
            "router/handles.py",
            "router/kserve.py",
            "router/main.py",
            "router/membership.py",
            "router/operations.py",
            "router/reader.py",
            "router/server.py",
            "router/statuses.py",
            "router/writer.py",
            "controller/membership.py",
            "controller/node/watch.py",
        ),
    ),
}
# Packages that belong to one of the above.
SAME_AS = {
    "grpc_health": "grpc",
    "grpc_reflection": "grpc",
    "nixl_cu12": "nixl",
    "nixl_cu13": "nixl",
    "tandem.v1.inference_pb2_grpc": "grpc",
    "tandem.v1.kserve_pb2_grpc": "grpc",
    "tandem.v1.operations_pb2_grpc": "grpc",
    "tandem.v1.worker_pb2_grpc": "grpc",
}

# Reading them runs what their writer wished: nothing that comes through a socket or file of ours is in such a format.
UNSAFE = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle")

# Decisions: plain Python, tested in milliseconds.
PURE = (
    "tandem/errors.py",
    "tandem/request.py",
    "tandem/trace_context.py",
    "tandem/tracing.py",
    "tandem/config.py",
    "tandem/config_json.py",
    "tandem/environment.py",
    "tandem/secret.py",
    "tandem/trust.py",
    "tandem/clock.py",
    "tandem/cache/budget.py",
    "tandem/cache/checkpoints.py",
    "tandem/cache/names.py",
    "tandem/cache/pool.py",
    "tandem/cache/prefix.py",
    "tandem/cli/errors.py",
    "tandem/cli/main.py",
    "transfer/kept_index.py",
    "transfer/lease.py",
    "transfer/lease_state.py",
    "transfer/outgoing_state.py",
    "transfer/plan.py",
    "transfer/record.py",
    "prefill_worker/scheduler.py",
    "prefill_worker/waste.py",
    "decode_worker/scheduler.py",
    "router/admission.py",
    "router/estimates.py",
    "router/local_prefill.py",
    "router/placement.py",
    "router/prefixes.py",
    "controller/autoscale.py",
    "controller/events.py",
    "controller/lives.py",
    "controller/reconcile.py",
    "controller/roster.py",
    "controller/saved.py",
    "controller/controller.py",
    "controller/fake_launcher.py",
    "controller/node/node.py",
    "controller/node/place.py",
    "controller/node/ray_process.py",
)
NOT_PURE = ("torch", "ray", "grpc", "nixl", "transformers")

# Written by a generator.
SKIPPED = ("tandem/v1/*",)


@dataclass(frozen=True, slots=True)
class Breach:
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def breaches(root: Path) -> list[Breach]:
    """Every import under `root` that a rule forbids, in order of file and line."""
    found: list[Breach] = []
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if not any(fnmatch(path, pattern) for pattern in SKIPPED):
                found += check_source(path, file.read_text(encoding="utf-8"))
    return found


def check_source(path: str, source: str) -> list[Breach]:
    """The breaches of one file; `path` is relative to the root, with slashes."""
    found = []
    for line, module in _imported(ast.parse(source, path)):
        package = _package(module)
        if package in UNSAFE:
            found.append(Breach(path, line, f"imports {module}; what it reads can run code: use JSON or a proto"))
        elif package in ONLY_IN and path not in ONLY_IN[package].files:
            found.append(Breach(path, line, f"imports {module}; {package} belongs to {ONLY_IN[package].whose}"))
        elif path in PURE and package in NOT_PURE:
            found.append(Breach(path, line, f"imports {module}, but this module decides only: no {', '.join(NOT_PURE)}"))
    return found


def _package(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if owner := SAME_AS.get(".".join(parts[:length])):
            return owner
    return parts[0]


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import; imports that only a type checker sees are left out."""
    for node in _walk_runtime(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in child.orelse:
                yield from _walk_runtime(statement)
        else:
            yield from _walk_runtime(child)


def main(argv: list[str]) -> int:
    root = Path(argv[1]) if len(argv) > 1 else Path(__file__).resolve().parent.parent
    found = breaches(root)
    for breach in found:
        print(breach)
    if found:
        print(f"{len(found)} forbidden imports; the rules stand in tools/check_imports.py")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
