"""``agl show`` describes stored media where they stand, and draws pictures in terminals that can, here a pty."""

import asyncio
import base64
import os
import pty
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl import Rollout, Span
from agl.schemas import Blob, Json, ModelCall, Outcome, digest_of
from agl_inspect.terminal.pictures import size_of
from agl_inspect.terminal.program import cli
from agl_store_sqlite import SQLiteStore

SOUND = b"RIFF\x00\x00\x00\x00WAVE" + b"\0" * 900
DOCUMENT = b"%PDF-1.7 " + b"x" * 5000
JPEG = bytes.fromhex("ffd8 ffe00010 4a46494600010100000100010000 ffc2000b 08 0003 0002 01 011100")


def png(width: int, height: int, *, body: int = 0) -> bytes:
    """Return the start of a PNG, which is all that is read of it, and a body of this many bytes."""
    header = struct.pack(">I4sII5B", 13, b"IHDR", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + header + bytes(at % 251 for at in range(body))


def part(data: bytes, kind: str = "image_url", key: str = "url") -> Json:
    return {"type": kind, kind: {key: digest_of(data)}}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that records a call with messages, and stores media, in ``runs/agl.db`` of an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    (tmp_path / "runs").mkdir()

    async def write(messages: Sequence[Json], media: dict[str, bytes]) -> None:
        store = SQLiteStore("sqlite:///runs/agl.db")
        await store.save_blobs(
            [Blob(digest=digest_of(data), media_type=kind, data=data) for kind, data in media.items()]
        )
        await store.enqueue([Rollout(rollout_id="ro-seen", task="look")])
        (claim,) = await store.claim(worker="w")
        call = ModelCall(request_id="r", dialect="chat", model="small", request={"messages": list(messages)})
        made = Span(rollout_id="ro-seen", attempt_id=claim.attempt.attempt_id, span_id="1" * 16, name="chat", call=call)
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=(made,))])
        await store.close()

    def use(*messages: Json, **media: bytes) -> None:
        asyncio.run(write(messages, {kind.replace("_", "/"): data for kind, data in media.items()}))

    return use


def shown() -> list[str]:
    return CliRunner().invoke(cli, ("show", "latest"), catch_exceptions=False).output.splitlines()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs ``agl show latest`` on a pty and returns the bytes that the terminal gets."""

    def use(**environment: str) -> str:
        for name in ("TERM", "TERM_PROGRAM", "KITTY_WINDOW_ID", "NO_COLOR", "TMUX", "STY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        master, slave = pty.openpty()
        with ThreadPoolExecutor(1) as reader:
            output = reader.submit(_read, master)
            with os.fdopen(slave, "w") as terminal, redirect_stdout(terminal):
                cli.main(("show", "latest"), standalone_mode=False)
            return output.result().decode()

    return use


def _read(terminal: int) -> bytes:
    found = b""
    try:
        while data := os.read(terminal, 65_536):
            found += data
    except OSError:  # Linux reports the end of a pty as an error
        pass
    os.close(terminal)
    return found


def test_show_describes_media_below_their_message_and_their_tool_result(record: Callable[..., None]) -> None:
    picture = png(640, 480, body=12_000)
    asked = {"role": "user", "content": [part(picture), {"type": "text", "text": "Look."}]}
    uses = [{"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}]
    record(
        asked,
        {"role": "assistant", "content": "", "tool_calls": uses},
        {"role": "tool", "tool_call_id": "c1", "content": [part(JPEG)]},
        {"role": "user", "content": [part(SOUND, "input_audio", "data"), part(DOCUMENT, "file", "file_data")]},
        {"role": "user", "content": [part(b"deleted")]},
        image_png=picture,
        image_jpeg=JPEG,
        audio_wav=SOUND,
        application_pdf=DOCUMENT,
    )
    names = [f"{digest_of(data)[:19]}…" for data in (picture, JPEG, SOUND, DOCUMENT, b"deleted")]
    lines = shown()
    at = next(number for number, line in enumerate(lines) if line.endswith(" Look."))
    assert f"    image {names[0]}, image/png, 640x480, 12 kB" == lines[at + 1]
    at = next(number for number, line in enumerate(lines) if line.startswith("    result: "))
    assert f"      image {names[1]}, image/jpeg, 2x3, 33 bytes" == lines[at + 1]
    assert f"    audio {names[2]}, audio/wav, 912 bytes" in lines
    assert f"    file {names[3]}, application/pdf, 5 kB" in lines
    assert f"    image {names[4]}, gone from the store" in lines


@pytest.mark.parametrize(
    "data",
    [
        png(2, 3),
        JPEG,
        b"GIF89a\x02\x00\x03\x00",
        bytes.fromhex("52494646240000005745425056503820180000003001009d012a02000300"),
        bytes.fromhex("524946461c000000574542505650384c0f0000002f01800000071011fd0f"),
        bytes.fromhex("524946463c00000057454250565038580a00000008000000010000020000"),
    ],
    ids=["png", "jpeg", "gif", "webp", "webp lossless", "webp extended"],
)
def test_size_is_read_from_the_header_of_every_kind_of_picture(data: bytes) -> None:
    assert (2, 3) == size_of(data)
    assert {None, (2, 3)} >= {size_of(data[:end]) for end in range(len(data))}


@pytest.mark.parametrize("data", [b"", SOUND, DOCUMENT, b"\xff\xd8" + b"\xff\xe0\x00\x00" * 1000, b"\xff\xd8\xff"])
def test_size_of_other_data_is_unknown(data: bytes) -> None:
    assert size_of(data) is None


def test_show_draws_a_large_picture_within_a_box_by_the_sequence_of_iterm(
    record: Callable[..., None], drawn: Callable[..., str]
) -> None:
    picture = png(640, 480, body=9000)
    record({"role": "user", "content": [part(picture)]}, image_png=picture)
    output = drawn(TERM="xterm-256color", TERM_PROGRAM="WezTerm")
    found = re.search(
        r"9 kB\x1b\[0m\r\n    \x1b\]1337;File=inline=1;size=9029;width=48;height=12:([^\a]*)\a\r\n", output
    )
    assert found
    assert picture == base64.b64decode(found[1])


@pytest.mark.parametrize(("size", "limits"), [((640, 480), ",r=12"), ((900, 80), ",c=48"), ((32, 32), "")])
def test_show_draws_png_in_chunks_by_the_protocol_of_kitty(
    size: tuple[int, int], limits: str, record: Callable[..., None], drawn: Callable[..., str]
) -> None:
    picture = png(*size, body=9000)
    record({"role": "user", "content": [part(picture)]}, image_png=picture)
    chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", drawn(TERM="xterm-kitty", TERM_PROGRAM="vscode"))
    assert [f"a=T,f=100,q=2{limits},m=1", "m=1", "m=0"] == [keys for keys, _ in chunks]
    assert picture == base64.b64decode("".join(text for _, text in chunks))


@pytest.mark.parametrize(
    "environment",
    [
        {"TERM": "xterm-256color"},
        {"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"},
        {"TERM": "xterm-kitty", "TMUX": "tmux-1,7,0"},
        {"TERM": "screen", "TERM_PROGRAM": "iTerm.app"},
        {"TERM": "xterm-kitty", "NO_COLOR": "1"},
    ],
)
def test_show_draws_nothing_where_a_terminal_would_print_the_sequence(
    environment: dict[str, str], record: Callable[..., None], drawn: Callable[..., str]
) -> None:
    record({"role": "user", "content": [part(png(3, 2))]}, image_png=png(3, 2))
    output = drawn(**environment)
    assert "image/png, 3x2, 29 bytes" in output
    assert [] == re.findall(r"\x1b[_\]]", output)


@pytest.mark.parametrize(
    "picture", [png(100_000, 100_000), png(0, 5), JPEG, b"\x89PNG\r\n\x1a\n"], ids=["huge", "empty", "jpeg", "cut"]
)
def test_show_only_describes_what_kitty_should_not_read(
    picture: bytes, record: Callable[..., None], drawn: Callable[..., str]
) -> None:
    record({"role": "user", "content": [part(picture)]}, image_png=picture)
    output = drawn(KITTY_WINDOW_ID="1")
    assert f"image {digest_of(picture)[:19]}…, image/png" in output
    assert "\x1b_G" not in output


def test_terminal_sequences_in_the_names_of_media_are_shown_and_not_obeyed(record: Callable[..., None]) -> None:
    kind = "image\x1b]0;owned\x07"
    record({"role": "user", "content": [{"type": kind, kind: {"url": "sha256:\x1b[2J"}}]})
    output = "\n".join(shown())
    assert "    image\\x1b]0;owned\\x07 sha256:\\x1b[2J…, gone from the store" in output
    assert "\x1b" not in output
