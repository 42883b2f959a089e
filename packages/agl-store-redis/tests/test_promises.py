"""A server that would lose or evict acknowledged data is refused, with the settings to change."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agl.errors import StoreError
from agl.schemas import Rollout
from agl_store_redis.store import RedisStore

from .conftest import PASSWORD, Server

pytestmark = pytest.mark.alone


def use(url: str) -> None:
    """Open the store, write once, and close it."""

    async def body() -> None:
        store = RedisStore(url)
        try:
            await store.enqueue([Rollout(rollout_id="a", task=None)])
        finally:
            await store.close()

    asyncio.run(body())


@pytest.fixture
def own() -> Iterator[Server]:
    """Start a server whose settings a test may change."""
    server = Server()
    yield server
    server.remove()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("appendonly", "no", "appendonly no and would lose.*CONFIG SET appendonly yes.*durability=none"),
        ("appendfsync", "everysec", "appendfsync everysec.*CONFIG SET appendfsync always.*durability=second"),
        ("appendfsync", "no", "appendfsync no.*durability=none"),
        ("no-appendfsync-on-rewrite", "yes", "no-appendfsync-on-rewrite yes.*while it rewrites"),
        ("maxmemory-policy", "allkeys-lru", "maxmemory-policy allkeys-lru.*noeviction.*durability=none"),
    ],
)
def test_server_that_would_lose_records_is_refused_unless_told(own: Server, name: str, value: str, says: str) -> None:
    own.run("CONFIG", "SET", name, value)
    with pytest.raises(StoreError, match=says):
        use(own.url())
    use(own.url(durability="none"))


def test_loss_of_a_second_is_accepted_where_the_url_says_so(own: Server) -> None:
    own.run("CONFIG", "SET", "appendfsync", "everysec")
    use(own.url(durability="second"))
    own.run("CONFIG", "SET", "appendfsync", "no")
    with pytest.raises(StoreError, match="CONFIG SET appendfsync everysec"):
        use(own.url(durability="second"))


def test_server_that_hides_its_configuration_is_refused_with_the_options_of_the_url(own: Server) -> None:
    own.run("ACL", "SETUSER", "guest", "on", f">{PASSWORD}", "~*", "&*", "+@all", "-config")
    url = own.url(user="guest:correct-horse%3Abattery%40staple@")
    with pytest.raises(StoreError, match=r"hides its configuration.*durability=second.*durability=none") as raised:
        use(url)
    assert "battery" not in str(raised.value)
    use(f"{url}&durability=second")
    own.run("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(StoreError, match="appendonly no"):
        use(f"{url}&durability=second")


def test_user_with_the_rights_that_the_documentation_lists_can_work(own: Server) -> None:
    rights = "+@read +@write +@scripting +@pubsub +@connection +info +time +multi +exec +config|get"
    own.run("ACL", "SETUSER", "worker", "on", f">{PASSWORD}", "~{agl}*", "resetchannels", "&{agl}*", *rights.split())
    use(own.url(user="worker:correct-horse%3Abattery%40staple@"))
    with pytest.raises(StoreError, match="the user needs the commands"):
        use(own.url(user="worker:correct-horse%3Abattery%40staple@", prefix="other"))


def test_wrong_password_is_told_and_not_repeated(own: Server) -> None:
    own.run("CONFIG", "SET", "requirepass", PASSWORD)
    for user in ("", ":wrong-word@", "nobody:wrong-word@"):
        with pytest.raises(StoreError, match="correct user and password") as raised:
            use(own.url(user=user))
        assert "wrong-word" not in str(raised.value)
    use(own.url(user=":correct-horse%3Abattery%40staple@"))


def test_replica_is_refused(own: Server, server: Server) -> None:
    own.run("REPLICAOF", "127.0.0.1", server.port)
    with pytest.raises(StoreError, match="is a replica; name the primary"):
        use(own.url())


def test_prefix_of_another_program_is_refused(own: Server) -> None:
    own.run("SET", "{agl}:meta", "mine")
    with pytest.raises(StoreError, match="keys of another program begin with this prefix"):
        use(own.url())
    assert b"mine" == own.run("GET", "{agl}:meta")


async def test_full_memory_refuses_writes_and_takes_deletions(own: Server) -> None:
    store = RedisStore(own.url())
    await store.enqueue([Rollout(rollout_id=f"r{at}", task="x" * 100_000) for at in range(20)])
    await store.cancel([f"r{at}" for at in range(20)])
    own.run("CONFIG", "SET", "maxmemory", "1000000")
    with pytest.raises(StoreError, match=r"memory is full.*agl runs gc"):
        await store.enqueue([Rollout(rollout_id="more", task=None)])
    assert 20 == await store.delete([f"r{at}" for at in range(20)])
    own.run("CONFIG", "SET", "maxmemory", "0")
    await store.enqueue([Rollout(rollout_id="more", task=None)])
    await store.close()


@contextmanager
def scripted(info: str) -> Iterator[int]:
    """Start a server that answers INFO with the text ``info``, and every other command with OK; yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as peer:
            while data := peer.recv(65536):
                text = info.encode()
                answer = b"$%d\r\n%b\r\n" % (len(text), text)
                peer.sendall(b"".join(answer if b"INFO" in part and b"SETINFO" not in part else b"+OK\r\n"
                                      for part in data.split(b"*")[1:]))  # fmt: skip

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(30)
        listener.close()


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ("redis_version:6.0.16\r\n", "is Redis 6.0.16; the store needs Redis 6.2 or Valkey 7.2"),
        ("redis_version:7.2.4\r\nvalkey_version:7.1.0\r\n", "is Valkey 7.1.0"),
    ],
)
def test_server_that_is_too_old_is_refused(info: str, says: str) -> None:
    with scripted(info) as port, pytest.raises(StoreError, match=says):
        RedisStore(f"redis://127.0.0.1:{port}")


def test_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_store_redis.store.START_WAIT_S", 0.2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(StoreError, match=f"redis://127.0.0.1:{port}/0 cannot be reached.*start the server"):
            RedisStore(f"redis://127.0.0.1:{port}/0")
