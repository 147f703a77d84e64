"""How much memory this process may still take: what the machine has, or less where a control group (of a pod, a container, a
systemd unit) limits it.

Format: https://docs.kernel.org/admin-guide/cgroup-v2.html and …/cgroup-v1/memory.html. Every group above ours limits us too. A
container sees its own group at the root of the mount, under whatever path; so where the path is not there, the root is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

__all__ = ["CGROUP_ROOT", "available_bytes", "room_in_groups"]

CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# v1 has no word for "no limit": it shows the greatest multiple of a page, which no machine has.
_NO_LIMIT = 1 << 60


def available_bytes() -> int:
    """The smaller of what the machine has available and what is left within the control groups of this process."""
    room = room_in_groups(CGROUP_ROOT, _read(_OWN_GROUPS))
    machine: int = psutil.virtual_memory().available
    return machine if room is None else min(machine, room)


def room_in_groups(root: Path, own_groups: str) -> int | None:
    """Bytes until the nearest limit; None: there is no limit. Pages of files that the kernel would drop count as room.

    root: where control groups are mounted. own_groups: the text of /proc/self/cgroup."""
    rooms = [room for group in _groups(root, own_groups) if (room := group.room()) is not None]
    return min(rooms, default=None)


@dataclass(frozen=True, slots=True)
class _Group:
    """Names of its files, which differ between the two versions."""

    folder: Path
    limit: str
    used: str
    droppable: str

    def room(self) -> int | None:
        limit, used = _number(_read(self.folder / self.limit)), _number(_read(self.folder / self.used))
        if limit is None or used is None or limit >= _NO_LIMIT:
            return None
        statistics = (line.split() for line in _read(self.folder / "memory.stat").splitlines())
        droppable = next((int(value) for name, value in statistics if name == self.droppable), 0)
        return max(0, limit - max(0, used - droppable))


def _groups(root: Path, own_groups: str) -> Iterator[_Group]:
    """Ours and all above it."""
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2
            for folder in _upwards(root, path):
                yield _Group(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(root / "memory", path):
                yield _Group(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    own = PurePosixPath(path.lstrip("/"))
    for part in (own, *own.parents):
        if ".." not in part.parts:  # a group outside of what this namespace sees
            yield mount / part


def _number(text: str) -> int | None:
    """None: "max", or nothing."""
    return int(text) if text.strip().isdigit() else None


def _read(path: Path) -> str:
    """Empty: there is no such file, or it is not ours to read."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
