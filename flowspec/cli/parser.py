"""Checks of every command's flags: each is given once, in its range, and none is ignored."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from flowspec.errors import ConfigError

#: click's error for a wrong command line; typer bundles click under changing names.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

N = TypeVar("N", int, float, None)
T = TypeVar("T")


class Command(TyperCommand):
    """A command that takes a flag with a value once, unless the flag is meant to be repeated.

    Ended by a signal, it has that signal's exit status.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's, but a flag given twice is a usage error; click would keep the last value."""
        try:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except UsageError as error:
            error.ctx = error.ctx or ctx  # click leaves out some commands' names
            raise
        repeated: Counter[Any] = Counter(order)
        for param, times in repeated.items():
            if (
                times > 1
                and param.param_type_name == "option"
                and not (param.multiple or param.is_flag)
            ):
                ctx.fail(f"{param.opts[0]} is given {times} times; give it once")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """As click's, but an interrupt that names a signal gives that signal's exit status."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            if not interrupt.args:
                raise
            raise typer.Exit(128 + interrupt.args[0]) from None


def or_standard_input(value: str | None) -> str | None:
    """A prompt as given; ``-``: what standard input has. ConfigError if that is no text, or empty.

    Both are UTF-8, whatever the locale. The line end behind the last line is left out.
    """
    if value != "-":
        return value if value is None else _utf_8(value)
    try:
        said = sys.stdin.buffer.read().decode().removesuffix("\n")
    except ValueError:
        raise ConfigError("the prompt on standard input is not UTF-8 text") from None
    if not said:
        raise ConfigError("the prompt is -, but standard input is empty")
    return said


def _utf_8(argument: str) -> str:
    try:
        return os.fsencode(argument).decode()
    except UnicodeDecodeError:
        raise ConfigError("the prompt is not UTF-8 text") from None


def in_range(low: float, high: float, expected: str) -> Callable[[typer.CallbackParam, N], N]:
    """A callback that raises ConfigError, naming the flag, for a value outside ``low`` to ``high``.

    A flag that is not given passes.
    """

    def check(param: typer.CallbackParam, value: N) -> N:
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{param.opts[0]} is {value}; expected {expected}")
        return value

    return check


def taken_by(kind: Callable[..., object]) -> Callable[[typer.CallbackParam, N], N]:
    """A callback that raises ConfigError, naming the flag, for a value that ``kind`` refuses.

    ``kind`` is called with the value under the parameter's name.
    """

    def check(param: typer.CallbackParam, value: N) -> N:
        name = str(param.name)
        return _naming(param, lambda: kind(**{name: value}), value)

    return check


def checked_by(
    check: Callable[[str], object],
) -> Callable[[typer.CallbackParam, str | None], str | None]:
    """A callback that raises ConfigError, naming the flag, for a text that ``check`` refuses."""

    def checked(param: typer.CallbackParam, value: str | None) -> str | None:
        return value if value is None else _naming(param, lambda: check(value), value)

    return checked


def _naming(param: typer.CallbackParam, check: Callable[[], object], value: T) -> T:
    """``value``, once ``check`` has passed; its ConfigError is one of the flag."""
    try:
        check()
    except ConfigError as error:
        raise ConfigError(error.said, param.opts[0] if error.of else "") from None
    return value


def not_empty(expected: str) -> Callable[[typer.CallbackParam, str | None], str | None]:
    """A callback that raises ConfigError, naming the flag, for a value of nothing but spaces."""

    def check(param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ConfigError(f"{param.opts[0]} is empty; expected {expected}")
        return value

    return check


def positive(text: str) -> int:
    """A count; ValueError unless it is 1 or more."""
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def check_beside(ctx: typer.Context, *allowed: str) -> None:
    """ConfigError for flags other than ``allowed``, the first of which rules them out."""
    given = {
        param.opts[0]
        for param in ctx.command.params
        if getattr(ctx.get_parameter_source(str(param.name)), "name", "") == "COMMANDLINE"
    }
    others = sorted(given - set(allowed))
    if others:
        raise ConfigError(
            f"{allowed[0]} takes no {', '.join(others)}; leave out the one or the other"
        )
