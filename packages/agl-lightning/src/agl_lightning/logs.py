"""Logging as Agent Lightning sets it up, with the standard library and rich."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

H = TypeVar("H", bound=logging.Handler)

_FORMAT = logging.Formatter("%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s")


def setup_logging(
    level: int | str = "INFO",
    *,
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Iterable[logging.Handler] = (),
    apply_to: Iterable[str] = (),
    files: str | Mapping[str, str] = "",
) -> None:
    """Send the logs of ``agl``, ``agl_run``, this package and ``apply_to`` to the terminal and to files.

    Args:
        level: Lowest level to log.
        console: Log to the terminal.
        color: Use colours there; a mapping holds arguments of rich's handler.
        propagate: Also pass records to the loggers above.
        submodule_levels: Levels of further loggers, by name.
        extra_handlers: Handlers to add.
        apply_to: Names of further loggers to treat alike.
        files: A file for all, or one for each logger by name.
    """
    shared = [*extra_handlers, *([_console(color)] if console else [])]
    if isinstance(files, str) and files:
        shared.append(_plain(logging.FileHandler(files, delay=True)))
    for name in ("agl", "agl_run", "agl_lightning", *apply_to):
        setup_module_logging(level, name=name, console=False, propagate=propagate).handlers[:] = shared
    for name, file in files.items() if isinstance(files, Mapping) else ():
        _write_to(logging.getLogger(name), file)
    for name, own in (submodule_levels or {}).items():
        logging.getLogger(name).setLevel(own)


def setup_module_logging(
    level: int | str = "INFO",
    *,
    name: str = "agl",
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
) -> logging.Logger:
    """Log one logger and those below it to the terminal, and return it."""
    logger = logging.getLogger(name)
    logger.handlers[:] = [_console(color)] if console else []
    logger.propagate = propagate
    logger.setLevel(level)
    return logger


def configure_logger(level: int = logging.INFO, name: str = "agl") -> logging.Logger:
    """Send the logs of a logger to the terminal in plain lines; return the logger."""
    return setup_module_logging(level, name=name, color=False)


def _write_to(logger: logging.Logger, file: str) -> None:
    """Let a logger write to a file, in place of the handler of an earlier call."""
    made = _plain(logging.FileHandler(file, delay=True))
    for old in list(logger.handlers):
        if isinstance(old, logging.FileHandler) and old.baseFilename == made.baseFilename:
            logger.removeHandler(old)
            old.close()
    logger.addHandler(made)


def _console(color: bool | Mapping[str, Any]) -> logging.Handler:
    if color is False:
        return _plain(logging.StreamHandler())
    from rich.logging import RichHandler

    return RichHandler(**(color if isinstance(color, Mapping) else {"show_path": False}))


def _plain(handler: H) -> H:
    handler.setFormatter(_FORMAT)
    return handler
