"""The versions to which rollbacks of a label lead."""

import pytest

from agl.contracts import LabelMove
from agl_inspect.records.labels import label_path


@pytest.mark.parametrize(
    ("moves", "path"),
    [
        ([], []),
        ([("v1", False), ("v2", False), ("v1", True)], ["v1"]),
        ([("v1", False), ("v2", False), ("v3", False), ("v2", True), ("v1", True)], ["v1"]),
        ([("v1", True)], ["v1"]),
        ([("v1", False), ("v2", True)], ["v1", "v2"]),
    ],
)
def test_path_ends_where_the_label_points(moves: list[tuple[str, bool]], path: list[str]) -> None:
    made = [LabelMove(name="prompt", label="live", version=version, is_back=is_back) for version, is_back in moves]
    assert path == label_path(made)
