"""The file of authorities that agents' clients trust in addition to the system's."""

from pathlib import Path

import pytest

from agl_run.access.trust import trust_variables


def test_bundle_that_two_processes_of_one_number_make_at_once_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    own = tmp_path / "own.pem"
    own.write_bytes(b"an authority")
    replace, second = Path.replace, list[dict[str, str]]()

    def slow(path: Path, target: Path) -> Path:
        if not second:  # a container beside this one, whose process has the same number, is faster
            second.append({})
            second[0] |= trust_variables(own)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", slow)
    first = trust_variables(own)
    assert first == second[0]
    bundle = Path(first["SSL_CERT_FILE"])
    assert bundle.read_bytes().endswith(b"an authority")
    assert [bundle] == list(bundle.parent.iterdir())
