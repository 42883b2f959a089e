"""URLs: which parts libpq gets, which parts the store reads, and what messages show."""

from urllib.parse import quote

import pytest
from psycopg.conninfo import conninfo_to_dict

from agl.errors import ConfigError
from agl.urls import shown_url
from agl_store_postgres.urls import sharded_target_of, target_of

SECRET = "p@ss/w?rd#"
QUOTED = "p%40ss%2Fw%3Frd%23"


def test_url_is_taken_apart_and_shown_without_its_password() -> None:
    url = (
        f"postgresql://me:{QUOTED}@db.example:6432/runs?sslmode=require&schema=team%20a&readers=9&options=-cgeqo%3Doff"
    )
    target = target_of(url)
    parts = conninfo_to_dict(target.conninfo)
    assert (SECRET, "db.example", "6432", "runs") == (parts["password"], parts["host"], parts["port"], parts["dbname"])
    assert ("require", "-cgeqo=off", "agl") == (parts["sslmode"], parts["options"], parts["application_name"])
    assert ("team a", 9) == (target.schema, target.readers)
    assert "postgresql://me@db.example:6432/runs?schema=team a" == target.shown
    assert SECRET not in repr(target)


def test_defaults_are_filled_in_and_the_url_wins() -> None:
    target = target_of("postgres://db.example/runs?connect_timeout=3")
    parts = conninfo_to_dict(target.conninfo)
    assert ("3", "30") == (parts["connect_timeout"], parts["keepalives_idle"])
    assert ("agl", 4, "postgresql://db.example/runs") == (target.schema, target.readers, target.shown)


def test_plus_stands_for_itself_as_for_libpq() -> None:
    target = target_of("postgresql://db.example/runs?password=a+b%2Bc%20d&schema=team+a")
    assert ("a+b+c d", "team+a") == (conninfo_to_dict(target.conninfo)["password"], target.schema)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"mysql://me:{SECRET}@host/runs", "mysql"),
        (f"postgresql://me:{QUOTED}@host/runs?colour=red", "colour"),
        (f"postgresql://me:{QUOTED}@[host/runs", "postgresql://USER@HOST"),
        (f"postgresql://me:{QUOTED}@host/runs?readers=0", "1 to 64"),
        (f"postgresql://me:{QUOTED}@host/runs?schema=pg_mine", "pg_mine"),
        (f"postgresql://me:{QUOTED}@host/runs?schema=", "1 to 63 bytes"),
    ],
)
def test_wrong_urls_are_refused_by_name_and_without_the_password(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        target_of(url)
    assert reason in str(caught.value)
    assert SECRET not in str(caught.value)
    assert QUOTED not in str(caught.value)
    assert caught.value.__cause__ is None


def test_url_of_shards_is_taken_apart_and_shown_without_passwords() -> None:
    whole = quote(f"postgresql://you:{QUOTED}@two:6433/spans?schema=a,b&sslmode=require", safe="")
    url = (
        f"postgresql+shards://me:{QUOTED}@control:6432/runs?schema=mine&"
        f"shards=postgresql://us:{QUOTED}@one/spans?sslmode=disable,{whole}&readers=2"
    )
    target = sharded_target_of(url)
    control, first, second = (conninfo_to_dict(each.conninfo) for each in (target.control, *target.shards))
    assert [SECRET] * 3 == [parts["password"] for parts in (control, first, second)]
    assert ("control", "6432", "runs") == (control["host"], control["port"], control["dbname"])
    assert ("us", "one", "disable") == (first["user"], first["host"], first["sslmode"])
    assert ("you", "two", "6433", "require") == (second["user"], second["host"], second["port"], second["sslmode"])
    assert [("mine", 2), ("agl", 4), ("a,b", 4)] == [(e.schema, e.readers) for e in (target.control, *target.shards)]
    assert (
        "postgresql+shards://me@control:6432/runs?schema=mine&"
        "shards=postgresql://us@one/spans,postgresql://you@two:6433/spans?schema=a,b"
    ) == target.shown
    assert SECRET not in repr(target)
    for password in (SECRET, QUOTED, quote(QUOTED, safe="")):
        assert password not in shown_url(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://control/runs?shards=postgresql://one/spans", "postgresql+shards://"),
        (f"postgresql+shards://me:{QUOTED}@control/runs", "names them once"),
        (f"postgresql+shards://me:{QUOTED}@control/runs?shards=", "names them once"),
        (f"postgresql+shards://me:{QUOTED}@control/runs?shards=postgresql://one/s,,postgresql://two/s", "shard 2"),
        (f"postgresql+shards://control/runs?shards=postgresql://me:{QUOTED}@one/s,mysql://you:{QUOTED}@two/s", "mysql"),
        (f"postgresql+shards://control/runs?shards=postgresql://me:{QUOTED}@one/s?colour=red", "colour"),
        (f"postgresql+shards://control/runs?shards=postgresql://me:{QUOTED}@one/s?readers=2", "whole store"),
        (f"postgresql+shards://control/runs?shards=postgresql://me:{SECRET}@one/s", "shard 1"),
    ],
)
def test_wrong_urls_of_shards_are_refused_by_place_and_without_a_password(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sharded_target_of(url)
    assert reason in str(caught.value)
    assert SECRET not in str(caught.value)
    assert QUOTED not in str(caught.value)
