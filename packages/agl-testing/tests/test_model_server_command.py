"""``python -m agl_testing.model_server`` serves a text, and names a port that is in use in one line."""

import socket
import subprocess
import sys

import openai
import pytest

from agl_testing.model_server.__main__ import main


def test_port_in_use_is_named_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} cannot be opened .*leave --port out for any free one"):
            main(["--port", str(port), "--text", "hello"])
    assert "" == capsys.readouterr().out


def test_command_serves_the_text_on_the_printed_address() -> None:
    command = [sys.executable, "-m", "agl_testing.model_server", "--text", "hello"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with openai.OpenAI(base_url=url, api_key="k") as client:
                answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert "hello" == answer.choices[0].message.content
        finally:
            process.kill()
