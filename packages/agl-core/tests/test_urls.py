"""URLs that people write: with and without credentials, well-formed or not."""

import pytest

from agl.errors import ConfigError
from agl.urls import base_url_of, web_parts


@pytest.mark.parametrize(
    "url", ["http://host", "https://me@host:8443/path?x=1", "http://[::1]:4318", "http://müller.example"]
)
def test_url_of_the_web_has_parts(url: str) -> None:
    parts = web_parts(url)
    assert parts is not None
    assert url == parts.geturl()


@pytest.mark.parametrize(
    "url",
    [
        *("", "host", "ftp://host", "http://", "http://[x", "http://h:x", "http://h:0", "http://h:65536"),
        *("http://a b", "http://a\u2028b", "http://a\x7fb", "http://h\n", "http://h/ü", "http://h/a b"),
        *(
            "http://a\u200bb.example",
            "http://a\u2026",
            "http://\u2026",
            "http://“h”",
            "http://😀.example",
            "http://ü..example",
        ),
        *(f"http://{'ü' * 70}", "http://xn--ü", "http://\u00ad", "http://h\u2044x"),
    ],
)
def test_other_text_has_none(url: str) -> None:
    assert web_parts(url) is None


@pytest.mark.parametrize(
    "url",
    [
        *("http://host:8000/v1", "https://host", "http://[::1]:8000/v1", "https://host/messages/v1"),
        *("http://müller.example:8000/v1", "https://हिन्दी.example/v1"),
    ],
)
def test_base_url_loses_only_the_slash_at_its_end(url: str) -> None:
    assert [url] * 2 == [base_url_of(given, who="it") for given in (url, f"{url}/")]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8000/v1", "not a URL; write http://HOST:PORT/v1"),
        ("http://::1:8000/v1", r"not a URL; write http://\[IPV6\]:PORT/v1"),
        ("http://host/v1/chat/completions", "write http://host/v1$"),
        ("http://host/v1/messages/", "write http://host/v1$"),
        (
            "https://r.openai.azure.com/openai/deployments/d?api-version=1",
            "leave it out. Azure needs no",
        ),
        ("https://me:password@host?x=1", "^it 'https://host[?]x=1' has a query"),
    ],
)
def test_base_url_that_calls_cannot_extend_is_refused_with_what_to_write(url: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        base_url_of(url, who="it")
