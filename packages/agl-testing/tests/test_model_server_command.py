"""``python -m agl_testing.model_server`` names a port that is in use in one line."""

import socket

import pytest

from agl_testing.model_server.__main__ import main


@pytest.mark.parametrize("words", [(), ("--text", "hello")])
def test_port_in_use_is_named_with_the_way_out(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} cannot be opened .*leave --port out for any free one"):
            main(["--port", str(port), *words])
    assert "" == capsys.readouterr().out
