"""Logging as Agent Lightning sets it up, with the standard library and rich."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

_FORMAT = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"


def setup_logging(
    level: int | str = "INFO",
    *,
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Iterable[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    apply_to: Iterable[str] | None = None,
    files: str | Mapping[str, str] | None = None,
    capture_warnings: bool = False,
    disable_existing_loggers: bool = False,
) -> None:
    """Send the logs of ``agl``, ``agl_run``, this package and ``apply_to`` to the terminal and to files.

    Args:
        level: Lowest level to log.
        console: Log to the terminal.
        color: Use colours there; a mapping holds arguments of rich's handler.
        propagate: Also pass records to the loggers above.
        submodule_levels: Levels of further loggers, by name.
        extra_handlers: Handlers to add.
        formatter: The format of the lines in files and without colours.
        apply_to: Names of further loggers to treat alike.
        files: The file for all loggers, or one file for each logger by name.
        capture_warnings: Log warnings of the program too.
        disable_existing_loggers: Silence every other logger.
    """
    if disable_existing_loggers:
        for logger in list(logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):
                logger.disabled = True
    lines = formatter or logging.Formatter(_FORMAT)
    apart: Mapping[str, str] = files if isinstance(files, Mapping) else {}
    shared = [*([_console(color, lines)] if console else []), *(extra_handlers or ())]
    shared += [_formatted(logging.FileHandler(files, delay=True), lines)] if isinstance(files, str) else []
    for name in ("agl", "agl_run", "agl_lightning", *(apply_to or ())):
        _set_up(name, level, shared, propagate=propagate)
    for name, file in apart.items():
        _write_to(logging.getLogger(name), logging.FileHandler(file, delay=True), lines)
    for name, own in (submodule_levels or {}).items():
        logging.getLogger(name).setLevel(own)
    logging.captureWarnings(capture_warnings)


def setup_module_logging(
    level: int | str = "INFO",
    *,
    name: str = "agl",
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
) -> logging.Logger:
    """Send the logs of a logger and the loggers below it to the terminal; return the logger."""
    handlers = [_console(color, logging.Formatter(_FORMAT))] if console else []
    return _set_up(name, level, handlers, propagate=propagate)


def configure_logger(level: int = logging.INFO, name: str = "agl") -> logging.Logger:
    """Send the logs of a logger to the terminal in plain lines; return the logger."""
    return setup_module_logging(level, name=name, color=False)


def _set_up(name: str, level: int | str, handlers: Iterable[logging.Handler], *, propagate: bool) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.handlers[:] = handlers
    logger.disabled = False
    logger.propagate = propagate
    logger.setLevel(level)
    return logger


def _write_to(logger: logging.Logger, handler: logging.FileHandler, lines: logging.Formatter) -> None:
    """Let a logger write to a file, replacing the handler for the same file that an earlier call added."""
    for old in list(logger.handlers):
        if isinstance(old, logging.FileHandler) and old.baseFilename == handler.baseFilename:
            logger.removeHandler(old)
            old.close()
    logger.addHandler(_formatted(handler, lines))


def _console(color: bool | Mapping[str, Any], lines: logging.Formatter) -> logging.Handler:
    if color is False:
        return _formatted(logging.StreamHandler(), lines)
    from rich.logging import RichHandler

    return RichHandler(**(color if isinstance(color, Mapping) else {"show_path": False}))


def _formatted(handler: logging.Handler, lines: logging.Formatter) -> logging.Handler:
    handler.setFormatter(lines)
    return handler
