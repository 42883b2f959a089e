"""URLs that people write: with and without credentials, well-formed or not."""

import pytest

from agl.stores import web_parts


@pytest.mark.parametrize("url", ["http://host", "https://me@host:8443/path?x=1", "http://[::1]:4318"])
def test_url_of_the_web_has_parts(url: str) -> None:
    parts = web_parts(url)
    assert parts is not None
    assert url == parts.geturl()


@pytest.mark.parametrize(
    "url",
    ["", "host", "ftp://host", "http://", "http://[x", "http://h:x", "http://h:0", "http://h:65536", "http://a b"],
)
def test_other_text_has_none(url: str) -> None:
    assert web_parts(url) is None
