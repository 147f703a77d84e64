"""What a process may take is bounded by every control group that it is in, of either version."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tandem import memory_limit
from tandem.memory_limit import available_bytes, room_in_groups

GIB = 1 << 30
V1_NO_LIMIT = str((1 << 63) - 4096)


def v2(folder: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n")


def v1(folder: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_a_pod_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    v2(tmp_path, str(6 * GIB), 2 * GIB, inactive_file=GIB)
    assert room_in_groups(tmp_path, "0::/\n") == 5 * GIB
    assert room_in_groups(tmp_path, "0::/kubepods/pod1/of-a-path-that-is-not-here\n") == 5 * GIB


def test_the_nearest_limit_counts_of_ours_and_those_above(tmp_path: Path) -> None:
    v2(tmp_path / "a" / "b", str(8 * GIB), GIB)
    v2(tmp_path / "a", str(4 * GIB), 3 * GIB)
    v2(tmp_path, "max", 9 * GIB)
    assert room_in_groups(tmp_path, "0::/a/b\n") == GIB
    assert room_in_groups(tmp_path, "0::/a\n") == GIB
    assert room_in_groups(tmp_path, "0::/\n") is None


def test_no_limit_is_none_in_both_versions(tmp_path: Path) -> None:
    v2(tmp_path / "two", "max", GIB)
    v1(tmp_path / "one" / "memory", V1_NO_LIMIT, GIB)
    assert room_in_groups(tmp_path / "two", "0::/\n") is None
    assert room_in_groups(tmp_path / "one", "4:memory:/\n") is None
    assert room_in_groups(tmp_path / "nothing", "0::/\n4:memory:/\n") is None
    assert room_in_groups(tmp_path, "") is None


def test_version_1_counts_what_its_whole_subtree_would_drop(tmp_path: Path) -> None:
    v1(tmp_path / "memory" / "docker" / "x", str(3 * GIB), 2 * GIB, inactive_file=GIB // 2)
    v1(tmp_path / "memory", V1_NO_LIMIT, 40 * GIB)
    groups = "5:cpu,cpuacct:/docker/x\n4:hugetlb,memory:/docker/x\n1:name=systemd:/docker/x\n0::/\n"
    assert room_in_groups(tmp_path, groups) == 3 * GIB // 2


def test_a_group_that_is_full_leaves_nothing_and_never_less(tmp_path: Path) -> None:
    v2(tmp_path, str(GIB), 2 * GIB)
    assert room_in_groups(tmp_path, "0::/\n") == 0


def test_a_path_out_of_the_namespace_is_not_followed(tmp_path: Path) -> None:
    v2(tmp_path, str(GIB), 0)
    v2(tmp_path / "mount", "max", 0)
    assert room_in_groups(tmp_path / "mount", "0::/../\n") is None


@pytest.mark.parametrize(("limit", "less_than_the_machine"), [(64 << 20, True), (1 << 50, False)])
def test_what_is_available_is_the_smaller_of_machine_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, less_than_the_machine: bool
) -> None:
    v2(tmp_path, str(limit), 0)
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(memory_limit, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_limit, "_OWN_GROUPS", tmp_path / "own")
    found, machine = available_bytes(), psutil.virtual_memory().total
    assert (found == limit) if less_than_the_machine else (0 < found <= machine)
