"""Opening a store by its URL, and the commands that messages propose for it."""

from agl_inspect.stores.hints import MEMORY, address_of, command, proposal
from agl_inspect.stores.opening import build_store, checked_store
from agl_inspect.stores.urls import SQLITE, as_url, check_store_url, located, refuse_directory, without_password

__all__ = [
    "MEMORY",
    "SQLITE",
    "address_of",
    "as_url",
    "build_store",
    "check_store_url",
    "checked_store",
    "command",
    "located",
    "proposal",
    "refuse_directory",
    "without_password",
]
