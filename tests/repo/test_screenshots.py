"""The pictures of the console in the documentation show the views as they are."""

import tomllib

import pytest

from tools.screenshots import DIGESTS, DRAWN_BY, TARGET, VIEWS, digest_of

DRAWN = tomllib.loads(DIGESTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DRAWN_BY)
def test_picture_is_not_older_than_its_view(name: str) -> None:
    assert (TARGET / f"{name}.png").is_file()
    assert DRAWN[name] == digest_of(name), (
        f"docs/images/{name}.png is older than {' and '.join(DRAWN_BY[name])}: draw it again with "
        "python3 -m nox -s demo demo_learn screenshots, or, if the view looks the same, run "
        "python3 -m tools.screenshots --unchanged"
    )


def test_every_picture_names_the_files_that_draw_it() -> None:
    assert sorted(DRAWN_BY) == sorted(name for views in VIEWS.values() for name in views)
