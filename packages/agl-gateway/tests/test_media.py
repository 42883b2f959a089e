"""Pictures, audio and files in requests are in the store before the spans of their calls, once each."""

import base64
import hashlib
import io
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from agl.contracts import REDACTED, Upstream
from agl.episodes import EpisodeOptions, build_episode
from agl.schemas import Blob, MediaSpan, ModelCall, Rollout, Span
from agl.stores import MemoryStore
from agl_gateway.record import media
from agl_gateway.record.redaction import Patterns
from agl_gateway.record.spool_file import SpooledCall, SpoolFile
from agl_gateway.service import GatewayService
from agl_testing.stores.samples import make_call, make_span, start_one

from .conftest import listening
from .test_spool import FickleStore, open_attempt

PNG = b"\x89PNG\r\n\x1a\n"
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>fetch('/store')</script></svg>"
HUGE = PNG + b"\x00\x00\x00\rIHDR" + (10_000).to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{coded(data)}"


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "main_llm", "messages": [{"role": "user", "content": [*parts]}], "max_tokens": 5}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def base64_image(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": coded(data)}}


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


class ListingStore(FickleStore):
    """A store that lists what it is given: the digests of payloads, and the inputs of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    async def save_blobs(self, blobs: Sequence[Blob]) -> None:
        self._check()
        self.log += [f"blob {blob.digest}" for blob in blobs]
        await super().save_blobs(blobs)

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await super().append_spans(spans)
        self.log += [f"call {' '.join(span.call.inputs)}" for span in spans if span.call]


async def post(it: GatewayService, token: str, body: Any, path: str = "/v1/chat/completions", **headers: str) -> int:
    sent = {"authorization": f"Bearer {token}", "content-type": "application/json", **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(it.url + path, data=io.BytesIO(data), headers=sent) as reply,
    ):
        await reply.read()
        return reply.status


async def calls_of(it: GatewayService, attempt_id: str) -> list[ModelCall]:
    await it.recorder.settle(attempt_id)
    found = await it.store.spans(attempt_id.rpartition(".")[0], attempt_id=attempt_id)
    return [span.call for span in found if span.call is not None]


PICTURE = PNG + b"a picture"
TOOL = {"type": "function", "id": "t", "function": {"name": "look", "arguments": "{}"}}
INLINE = {"inlineData": {"mimeType": "image/jpeg", "data": coded(PICTURE)}}
GOOGLE = "/v1beta/models/main_llm:generateContent"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", said(image(data_url(PICTURE)))),
        ("/v1/chat/completions", said(image(f"data:image/png;base64,{base64.encodebytes(PICTURE).decode()}"))),
        (
            "/v1/chat/completions",
            {
                "model": "main_llm",
                "messages": [
                    {"role": "user", "content": "look"},
                    {"role": "assistant", "content": None, "tool_calls": [TOOL]},
                    {"role": "tool", "tool_call_id": "t", "content": [image(data_url(PICTURE))]},
                ],
            },
        ),
        (
            "/v1/responses",
            {"model": "main_llm", "input": [{"role": "user", "content": [input_image(data_url(PICTURE))]}]},
        ),
        (
            "/v1/responses",
            {
                "model": "main_llm",
                "input": [
                    {"role": "user", "content": "look"},
                    {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "t", "output": [input_image(data_url(PICTURE))]},
                ],
            },
        ),
        ("/v1/messages", said(base64_image(PICTURE))),
        ("/v1/messages", said({"type": "tool_result", "tool_use_id": "t", "content": [base64_image(PICTURE)]})),
        (GOOGLE, {"contents": [{"role": "user", "parts": [INLINE]}]}),
        (
            GOOGLE,
            {"contents": [{"parts": [{"functionResponse": {"name": "look", "response": {}, "parts": [INLINE]}}]}]},
        ),
    ],
)
async def test_picture_of_each_api_is_stored_before_its_span_with_the_type_of_its_bytes(serving, path, body):
    store = ListingStore()
    async with serving(store=store) as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == await post(it, token, body, path)
        (call,) = await calls_of(it, attempt_id)
        assert (digest(PICTURE),) == call.inputs
        assert coded(PICTURE) not in repr(call)
        assert [f"blob {digest(PICTURE)}", f"call {digest(PICTURE)}"] == store.log
        expected = [Blob(digest=digest(PICTURE), media_type="image/png", data=PICTURE)]
        assert expected == await store.blobs([digest(PICTURE)])


@pytest.mark.parametrize(
    ("part", "data", "kind"),
    [
        ({"type": "input_audio", "input_audio": {"data": "{}", "format": "wav"}}, b"RIFF0000WAVEfmt ", "audio/wav"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,{}"}}, b"%PDF-1.7", "application/pdf"),
        (image("data:image/svg+xml;base64,{}"), SVG, "application/octet-stream"),
        (image("data:image/png;base64,{}"), HUGE, "image/png"),
    ],
)
async def test_other_payloads_are_stored_unread(serving, part, data, kind):
    """A script in a picture is not shown as a picture, and a header that promises 100 megapixels costs nothing."""
    async with serving() as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == await post(it, token, json.dumps(said(part)).replace("{}", coded(data)).encode())
        await calls_of(it, attempt_id)
        assert [Blob(digest=digest(data), media_type=kind, data=data)] == await it.store.blobs([digest(data)])


async def test_screenshot_of_every_turn_is_written_once(serving, monkeypatch):
    store = ListingStore()
    async with serving(store=store) as it:
        attempt_id, token = await open_attempt(it)
        for turn in range(10):
            pictures = [image(data_url(PNG + bytes([number]))) for number in (0, *range(turn // 5 + 1))]
            assert 200 == await post(it, token, said(*pictures))
        calls = await calls_of(it, attempt_id)
        assert [2] * 5 + [3] * 5 == [len(call.inputs) for call in calls]
        assert [f"blob {digest(PNG + bytes([number]))}" for number in (0, 1)] == [
            line for line in store.log if line.startswith("blob")
        ]
        monkeypatch.setattr(media, "_WRITTEN_S", 0.0)  # as when the store may have removed it
        assert 200 == await post(it, token, said(image(data_url(PNG + bytes([0])))))
        await calls_of(it, attempt_id)
        assert 3 == sum(line.startswith("blob") for line in store.log)


async def test_pictures_survive_a_store_that_is_gone_and_a_gateway_that_ends(serving, tmp_path):
    store = ListingStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == await post(it, token, said(image(data_url(PNG + b"before"))))
        store.is_gone = True
        for turn in range(5):
            seen = PNG + (b"before" if turn else b"first")
            pictures = [*map(image, map(data_url, (PNG + b"x" * 100_000, PNG + bytes([turn]), seen)))]
            assert 200 == await post(it, token, said(*pictures))
        assert 5 == it.recorder.spool.calls
        assert 100_000 < it.recorder.spool.size < 200_000
        it.recorder.spool._task.cancel()  # it ends as a killed one does: nothing is written any more
        store.log.clear()
    store.is_gone = False
    async with serving(store=store, spool=tmp_path) as it:
        calls = await calls_of(it, attempt_id)
        assert 6 == len(calls)
        wanted = list(dict.fromkeys(reference for call in calls for reference in call.inputs))
        assert wanted == [blob.digest for blob in await store.blobs(wanted)]
        assert 0 == it.recorder.spool.size
        assert "call" not in "".join(line[:4] for line in store.log[:6])
        assert f"blob {digest(PNG + b'before')}" in store.log  # the store may have lost it meanwhile


async def test_payload_that_spooled_calls_share_is_read_once_and_counted_once(tmp_path):
    file = SpoolFile(tmp_path / "s.spool", store_id="s", store_url="memory://")
    data = PNG + bytes(100_000)
    shared = Blob(digest=digest(data), media_type="image/png", data=data)
    call = replace(make_call(range(3), range(3)), inputs=(shared.digest,))
    spans = [make_span(await start_one(MemoryStore()), call=call)]
    file.add([SpooledCall(attempt_id="a", spans=spans, blobs=[shared]) for _ in range(3)])
    first, *others = file.oldest(limit=9, max_bytes=2 * len(data))
    assert [data] == [blob.data for blob in first.blobs]
    assert [True, True] == [each.blobs[0] is first.blobs[0] for each in others]
    assert 1 == len(file.oldest(limit=9, max_bytes=len(data)))
    file.remove([first, *others])
    file.close()


class Blurring:
    """A redactor that makes some pictures unrecognisable, and removes others."""

    def redact(self, text: str) -> str:
        return text

    def redact_blob(self, blob: Blob) -> bytes | None:
        if b"secret" in blob.data:
            return None
        return blob.data.replace(b"face", b"****")


class TextsOnly:
    def redact(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    ("redactor", "given", "stored"),
    [
        (Blurring(), b"a landscape", b"a landscape"),
        (Blurring(), b"a face", b"a ****"),
        (Blurring(), b"a secret", None),
        (TextsOnly(), b"a landscape", None),
        (None, b"a face", b"a face"),
    ],
)
async def test_redacted_picture_is_stored_redacted_and_does_not_train(serving, redactor, given, stored):
    store = ListingStore()
    async with serving(redactor=redactor, store=store) as it:
        attempt_id, token = await open_attempt(it)
        for _ in range(2):
            assert 200 == await post(it, token, said(image(data_url(PNG + given))))
        calls = await calls_of(it, attempt_id)
        for call in calls:
            assert (given != stored) == (call.ids_missing == REDACTED)
            reference = digest(PNG + (stored or given))
            assert (reference,) == call.inputs
            assert reference in json.dumps(call.request)
        found = await store.blobs([digest(PNG + b) for b in {given, stored or given}])
        assert ([PNG + stored] if stored else []) == [blob.data for blob in found]
        assert (1 if stored else 0) == sum(line.startswith("blob") for line in store.log)


async def test_url_of_a_picture_is_redacted_in_the_inputs_of_its_call(serving):
    async with serving(redactor=Patterns()) as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == await post(it, token, said(image("https://a.com/ann@example.org/a.png")))
        (call,) = await calls_of(it, attempt_id)
        assert ("https://a.com/[email]/a.png",) == call.inputs
        assert "ann@" not in repr(call)


async def test_requests_that_differ_in_a_picture_are_no_retries_of_each_other(serving):
    async with serving() as it:
        attempt_id, token = await open_attempt(it)
        for content in (b"a", b"b", b"a"):
            body = said(image(data_url(PNG + content)))
            assert 200 == await post(it, token, body, **{"x-stainless-retry-count": "1"})
        one, two, again = [call.request_id for call in await calls_of(it, attempt_id)]
        assert (one, True) == (again, one != two)


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,!!!", "data:image/png;base64,QUJ", "data:image/png", "data:", "file:///etc/passwd"]
)
async def test_broken_payload_is_passed_on_and_not_stored(serving, server, url):
    store = ListingStore()
    async with serving(store=store) as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == await post(it, token, said(image(url)))
        assert url == server.calls[-1].json["messages"][0]["content"][0]["image_url"]["url"]
        (call,) = await calls_of(it, attempt_id)
        assert 1 == len(call.inputs)
        assert 1 == len(store.log)


async def test_payload_larger_than_a_store_accepts_is_recorded_by_its_digest(serving, caplog):
    async with serving() as it:
        attempt_id, token = await open_attempt(it)
        data = PNG + bytes(20_000_000)
        for _ in range(2):
            await post(it, token, said(image(data_url(data)), image(data_url(PICTURE))))  # too large for this model too
        call, _ = await calls_of(it, attempt_id)
        assert (digest(data), digest(PICTURE)) == call.inputs
        assert [PICTURE] == [blob.data for blob in await it.store.blobs(call.inputs)]
    assert 1 == caplog.text.count("recorded by its digest only")


async def test_data_url_of_200_mb_is_refused_before_it_is_read(serving):
    async with serving() as it:
        _, token = await open_attempt(it)

        async def body():
            yield b'{"model":"main_llm","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"'
            yield b"data:image/png;base64,"
            for _ in range(200):
                yield b"A" * 1_000_000

        tracemalloc.start()
        headers = {"authorization": f"Bearer {token}", "content-length": "200000100"}
        async with aiohttp.ClientSession() as session:
            url = f"{it.url}/v1/chat/completions"
            async with session.post(url, data=body(), headers=headers) as reply:
                assert 413 == reply.status
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000_000


async def test_ten_thousand_pictures_in_a_request_are_stored(serving):
    async with serving() as it:
        attempt_id, token = await open_attempt(it)
        datas = [PNG + number.to_bytes(2) for number in range(10_000)]
        assert 200 == await post(it, token, said(*(image(data_url(data)) for data in datas)))
        (call,) = await calls_of(it, attempt_id)
        assert 10_000 == len(call.inputs)
        assert 10_000 == len(await it.store.blobs(call.inputs))


async def test_request_without_media_asks_the_store_for_nothing(serving):
    store = ListingStore()
    async with serving(store=store) as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == await post(it, token, said({"type": "text", "text": "an image file"}))
        await calls_of(it, attempt_id)
        assert ["call "] == store.log


GRID = {"offset": 1, "length": 2, "modality": "image", "digest": digest(PICTURE), "grid": [1, 4, 4]}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_spans_of_pictures_come_from_the_model_server_to_the_row(stage, is_streamed):
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}}
    head = {"id": "c", "prompt_token_ids": [1, 9, 9, 2], "prompt_media": [GRID], "processor": "Looking 1 abcd"}

    async def answer(request):
        message = {"role": "assistant", "content": "red"}
        if not is_streamed:
            return web.json_response({**head, "choices": [{**choice, "message": message}]})
        chunk = json.dumps({**head, "choices": [{**choice, "delta": message}]})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async with listening(answer) as url:
        upstream = Upstream(name="main_llm", base_url=f"{url}/v1", model="looking", is_trained=True)
        async with stage(upstreams=[upstream]) as it:
            attempt_id, token = await it.open_attempt()
            for part in (image(data_url(PICTURE)), image("http://example.com/a.png")):
                assert 200 == await post(it, token, {**said(part), "stream": is_streamed})
            spans = await it.spans(attempt_id)
            assert (MediaSpan(**{**GRID, "grid": (1, 4, 4)}),) == spans[0].call.media
            assert "prompt_media" not in repr(spans[0].call.response)
            rollout = Rollout(rollout_id=spans[0].rollout_id, task=1, status="succeeded", attempt_id=attempt_id)
            (attempt,) = await it.store.attempts(rollout.rollout_id)
            episode = build_episode(rollout, attempt, spans, options=EpisodeOptions(processor="Looking 1 abcd"))
            assert [digest(PICTURE)] == [one.digest for row in episode.rows for one in row.media]
            assert "list its host in fetch_media" in episode.transitions[1].detail
