"""Where Ray may put a worker, in the words that Ray understands."""

import pytest

from controller import launch  # noqa: F401 - first: it sets what Ray reads when it is imported
from controller.ray_workers import elsewhere


@pytest.mark.parametrize(("avoid", "selector"), [({"ab"}, "!in(ab)"), ({"cd", "ab"}, "!in(ab,cd)")])
def test_nodes_to_avoid_stand_without_spaces_which_ray_would_take_for_a_part_of_their_ids(
    avoid: set[str], selector: str
) -> None:
    assert elsewhere(avoid) == {"ray.io/node-id": selector}
