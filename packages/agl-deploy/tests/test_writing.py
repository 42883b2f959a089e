"""Generated files never overwrite files that somebody has edited."""

from pathlib import Path

import pytest

from agl.errors import ConfigError
from agl_deploy.needs import LONGEST, deployed_name
from agl_deploy.writing import DIGESTS, states, write


def test_files_that_nobody_touched_are_replaced_and_edited_ones_are_not(tmp_path: Path) -> None:
    assert {"a": "new", "b/c": "new"} == write(tmp_path, {"a": "1", "b/c": "1"}, force=False)
    assert {"a": "changed", "b/c": "same"} == write(tmp_path, {"a": "2", "b/c": "1"}, force=False)
    (tmp_path / "b" / "c").write_text("mine")

    with pytest.raises(ConfigError, match=r"edited or come from elsewhere: b/c; nothing was written.*--force"):
        write(tmp_path, {"a": "3", "b/c": "3"}, force=False)
    assert ["2", "mine"] == [(tmp_path / name).read_text() for name in ("a", "b/c")]

    assert {"a": "changed", "b/c": "edited"} == write(tmp_path, {"a": "3", "b/c": "3"}, force=True)
    assert ["3", "3"] == [(tmp_path / name).read_text() for name in ("a", "b/c")]


def test_kinds_of_files_share_a_folder(tmp_path: Path) -> None:
    write(tmp_path, {"a": "1"}, force=False)
    write(tmp_path, {"b": "1"}, force=False)
    assert {"a": "changed"} == states(tmp_path, {"a": "2"})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}'])
def test_file_counts_as_edited_where_the_list_of_digests_is_broken(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"a": "1"}, force=False)
    (tmp_path / DIGESTS).write_text(text)
    assert {"a": "edited"} == states(tmp_path, {"a": "2"})


def test_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="edited"):
        write(tmp_path / "out", {"a": "1"}, force=False)
    write(tmp_path / "out", {"a": "1"}, force=True)
    assert "mine" == (tmp_path / "elsewhere").read_text()


def test_folder_that_is_a_link_out_of_the_output_is_refused(tmp_path: Path) -> None:
    for name in ("elsewhere", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "b").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match=r"out/b' is a link to a folder elsewhere"):
        write(tmp_path / "out", {"b/c": "1"}, force=True)
    assert [] == list((tmp_path / "elsewhere").iterdir())


def test_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*choose another --output"):
        write(tmp_path / "out", {"a": "1"}, force=False)


@pytest.mark.parametrize(
    "text", ["a", "answers", "Answers", "my_run", "x" * 200, "7", "-", "ü", "[bold]", "\x1b[31m", "../../etc", "a-"]
)
def test_name_is_a_dns_label_with_room_for_what_is_appended(text: str) -> None:
    name = deployed_name(text)

    assert len(name) <= LONGEST
    assert name[0].isalpha()
    assert name[-1].isalnum()
    assert name.isascii()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name == deployed_name(text)


def test_names_that_look_alike_stay_apart() -> None:
    assert "answers" == deployed_name("answers")
    assert 5 == len({deployed_name(text) for text in ("my-run", "my_run", "My-run", "my--run_", "my.run")})
