"""Fills the templates of this package."""

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

_SPECIAL = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), 0xFEFF)}
"""Characters that JSON lets stand as they are, and YAML or a terminal does not."""


def quoted(value: Any) -> str:
    """Return a value as JSON on one line, which is YAML too."""
    return json.dumps(value, ensure_ascii=False).translate(_SPECIAL)


def in_compose(value: Any) -> str:
    """Return a value for a compose file, where ``$`` begins a variable and is doubled."""
    return quoted(value).replace("$", "$$")


_ENVIRONMENT = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
_ENVIRONMENT.filters |= {"json": quoted, "yaml": in_compose}


def template(name: str) -> str:
    """Return a file of the package's ``templates`` as it is."""
    return (files("agl_deploy") / "templates" / name).read_text(encoding="utf-8")


def fill(name: str, /, **values: Any) -> str:
    """Return a template with its values filled in; one that is missing is an error."""
    return _ENVIRONMENT.from_string(template(name)).render(**values)
