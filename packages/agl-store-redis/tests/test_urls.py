"""The URL names the server and the store, and no message repeats its password."""

import pytest

from agl.errors import ConfigError, StoreError
from agl_store_redis.store import RedisStore
from agl_store_redis.urls import target_of


def test_url_names_server_database_and_prefix() -> None:
    target = target_of("redis://user:p%40ss@db.example:6380/3?prefix=team:a&durability=second&readers=2")
    assert {
        "host": "db.example",
        "port": 6380,
        "db": 3,
        "ssl": False,
        "username": "user",
        "password": "p@ss",
    } == target.address
    assert ("{team:a}:", "second", 2) == (target.base, target.durability, target.readers)
    assert "redis://db.example:6380/3?prefix=team:a&durability=second" == target.shown


@pytest.mark.parametrize(
    ("scheme", "is_tls"), [("redis", False), ("valkey", False), ("rediss", True), ("valkeys", True)]
)
def test_scheme_says_whether_the_connection_is_encrypted(scheme: str, is_tls: bool) -> None:
    target = target_of(f"{scheme}://[::1]")
    assert ("::1", 6379, 0, is_tls) == tuple(target.address[name] for name in ("host", "port", "db", "ssl"))
    assert f"{scheme}://[::1]:6379/0" == target.shown


def test_files_of_tls_are_passed_on_and_need_tls() -> None:
    address = target_of("rediss://h?ca=/ca.pem&cert=/c.pem&key=/k.pem").address
    assert ("/ca.pem", "/c.pem", "/k.pem") == tuple(
        address[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    )
    with pytest.raises(ConfigError, match="write rediss://"):
        target_of("redis://h?ca=/ca.pem")


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("/0?durability=maybe", "always, second or none"),
        ("/0?prefix=", "1 to 64"),
        ("/0?prefix=a}b", "1 to 64"),
        ("/0?readers=0", "from 1 to 64"),
        ("/x", "the database"),
        ("/0?schema=a", "unknown option 'schema'"),
        ("/0?prefix=a&durability=none&prefix=b", "option prefix more than once"),
        ("/0?prefix=a#b", "write %23"),
        ("/0#b", "write %23"),
        (":port/0", "cannot be read"),
        ("/word/0", "the database"),
    ],
)
def test_refused_url_says_why_without_its_password(rest: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        target_of(f"redis://me:word-of-honour@host{rest}")
    assert "honour" not in str(raised.value)


def test_user_with_a_fragment_is_not_taken_for_the_host() -> None:
    with pytest.raises(ConfigError, match="write %23") as raised:
        target_of("redis://user#x@prod/0")
    assert "user" not in str(raised.value)
    assert ("prod", "user#x") == tuple(
        target_of("redis://user%23x@prod/0").address[name] for name in ("host", "username")
    )


def test_plus_stands_for_itself() -> None:
    assert "/c++/ca.pem" == target_of("rediss://h?ca=/c++/ca.pem").address["ssl_ca_certs"]


def test_password_with_characters_that_should_be_quoted_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_store_redis.store.START_WAIT_S", 0.0)
    for secret in ("hon#our", "hon/our", "hon:our", "hon our", "hon?our"):
        with pytest.raises((ConfigError, StoreError)) as raised:
            RedisStore(f"redis://me:{secret}@127.0.0.1:1/0")
        assert "our" not in str(raised.value).replace("your", "")
        assert raised.value.__cause__ is None or "our" not in str(raised.value.__cause__)
