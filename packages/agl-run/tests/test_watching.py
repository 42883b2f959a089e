"""A run that is asked to start the console, which is not possible."""

import pytest

from agl import PluginManager
from agl.errors import UnknownComponentError
from agl_run.cli.run import console_of


def test_console_that_is_not_installed_is_named_with_its_installation() -> None:
    with (
        pytest.raises(UnknownComponentError, match=r"'console'; run: pip install .*agl-console$"),
        console_of(PluginManager(), "sqlite:///runs/agl.db"),
    ):
        pass
