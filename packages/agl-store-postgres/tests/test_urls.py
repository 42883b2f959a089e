"""URLs: what goes to libpq, what is the store's own, and what is shown."""

import pytest
from psycopg.conninfo import conninfo_to_dict

from agl.errors import ConfigError
from agl_store_postgres.urls import target_of

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
