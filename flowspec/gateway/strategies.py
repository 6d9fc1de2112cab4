"""Which strategies clients may choose."""

from __future__ import annotations

from collections.abc import Iterable

from flowspec.errors import ConfigError
from flowspec.gateway.errors import refused
from flowspec.strategies import EXACT, STRATEGIES, build, parse


def harmless() -> tuple[str, ...]:
    """Strategies of which each has the target's own text, and lets other jobs run beside it."""
    return tuple(name for name in EXACT if not build(name, 1).pacing.has_barrier)


def lossy_mode(text: str) -> str:
    """The mode of a strategy whose text may differ from the target's; empty: it is exact."""
    return STRATEGIES[parse(text)[0]].lossy


def names_of(text: str) -> tuple[str, ...]:
    """The names in ``text``, with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


class ClientStrategies:
    """What requests may name: ``names``, without any the harmless ones, and ``default``.

    ``default``: for requests that name none, with its options.
    """

    def __init__(self, names: Iterable[str], default: str) -> None:
        self._default = default
        self._names = tuple(names) or harmless()
        for name in self._names:
            if name not in STRATEGIES:
                raise ConfigError(
                    f"--allow-strategies has {name!r}; there are: {', '.join(STRATEGIES)}"
                )
        build(default, 1)

    def chosen(self, wanted: str | None) -> str:
        """The strategy of a request that ``wanted`` one; an error if it may not choose that."""
        if not wanted or wanted == self._default:
            return self._default
        name = wanted.partition(":")[0]
        allowed = f"allowed are: {', '.join(self._names)}"
        if name not in STRATEGIES:
            raise refused(f"unknown strategy {name!r}; {allowed}", "strategy")
        if name not in self._names:
            raise refused(
                f"the strategy {name} is not allowed here; {allowed}",
                "strategy",
                "strategy_not_allowed",
            )
        try:
            parse(wanted)
        except ConfigError as error:
            raise refused(str(error), "strategy") from None
        return wanted
