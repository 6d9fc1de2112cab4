"""Logs: structlog events on stderr, one line each, with job, epoch and node if there is one.

Prompts, texts and secrets are never logged. ``FLOWSPEC_LOG`` sets the level (default ``warning``),
``FLOWSPEC_LOG_FORMAT=json`` gives one JSON object per line.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

import structlog

from flowspec.errors import ConfigError

#: How a line begins that a worker prints for its user and that is no error.
NOTE = "note: "
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def note(text: str) -> None:
    """A line for whoever started this process; no error."""
    sys.stderr.write(f"{NOTE}{text}\n")
    sys.stderr.flush()


def configure() -> None:
    """Set up logging for this process; ConfigError for an unknown level or format."""
    structlog.configure(
        **_settings(os.environ),
        logger_factory=lambda: structlog.PrintLogger(sys.stderr),  # the stderr of that moment
        cache_logger_on_first_use=True,
    )


def _settings(environment: Mapping[str, str]) -> dict[str, Any]:
    level = environment.get("FLOWSPEC_LOG", "warning").lower()
    style = environment.get("FLOWSPEC_LOG_FORMAT", "text").lower()
    if level not in _LEVELS:
        raise ConfigError(f"FLOWSPEC_LOG is {level!r}; expected one of {', '.join(_LEVELS)}")
    if style not in ("text", "json"):
        raise ConfigError(f"FLOWSPEC_LOG_FORMAT is {style!r}; expected text or json")
    renderer: Any = structlog.processors.JSONRenderer()
    if style == "text":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    processors = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        renderer,
    ]
    wrapper = structlog.make_filtering_bound_logger(_LEVELS[level])
    return {"processors": processors, "wrapper_class": wrapper}


def logger(**context: object) -> structlog.typing.FilteringBoundLogger:
    """A logger that adds ``context`` to every event.

    In a program that has not configured structlog it writes to stderr as a worker does: stdout is
    the program's own. There a wrong setting ends nothing: the events say it, as ``setting``.
    """
    if structlog.is_configured():
        found = structlog.get_logger()
    else:
        try:
            settings = _settings(os.environ)
        except ConfigError as error:
            settings, context = _settings({}), {**context, "setting": str(error)}
        found = structlog.wrap_logger(structlog.PrintLogger(sys.stderr), **settings)
    return cast(structlog.typing.FilteringBoundLogger, found.bind(**context))
