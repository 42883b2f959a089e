"""The Lua scripts that run on the server, each atomically."""

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from agl_store_redis.connections import Server


@cache
def _text(name: str) -> tuple[str, str]:
    text = files("agl_store_redis.scripts").joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


def call(server: Server, name: str, base: str, *args: bytes | str | int | float) -> Any:
    """Run the script ``name`` over the keys that begin with ``base``; redis-py's errors pass through."""
    text, digest = _text(name)
    try:
        return server.run("EVALSHA", digest, 1, base, *args)
    except NoScriptError:  # a server that restarted, or another node, has not seen it
        return server.run("EVAL", text, 1, base, *args)
