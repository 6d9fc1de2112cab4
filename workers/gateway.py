"""The gateway, ``python -m workers.gateway``: HTTP for a pipeline that runs already."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flowspec.core.run.fields import DEFAULT_STRATEGY
from flowspec.gateway.keys import ApiKeys, read_keys
from flowspec.gateway.server import (
    address_of,
    check_installed,
    listen,
    note_who_may_use,
    serve,
)
from flowspec.gateway.settings import DRAIN_SECONDS, MOST_CONNECTIONS, MOST_OPEN, Settings
from flowspec.gateway.strategies import ClientStrategies, names_of
from flowspec.start.boot import Process, parser, run


def main() -> None:
    given = _read_arguments()
    check_installed()
    allowed = names_of(given.allow_strategies)
    ClientStrategies(allowed, given.strategy)  # a wrong name is said before anything is served
    process = Process(given.redis_url)
    settings = Settings(
        process.url,
        keys=read_keys(given.api_key_file) if given.api_key_file else ApiKeys(),
        name=given.model_name,
        strategy=given.strategy,
        most_open=given.most_answers,
        origins=tuple(given.cors_origin),
        most_connections=given.most_connections,
        hosts=tuple(given.allowed_host),
        allowed_strategies=allowed,
        default_tokens=given.default_tokens,
    )
    with listen(given.host, given.port) as listening:
        process.control().close()  # a broker that is not there is said before anything is served
        line = f"serving the pipeline at {address_of(listening)}/v1\n"
        note_who_may_use(listening, settings.keys)
        serve(settings, listening, lambda: process.stopped, lambda: say(line), DRAIN_SECONDS)


def say(line: str) -> None:
    """Print ``line`` at once."""
    sys.stdout.write(line)
    sys.stdout.flush()


def _read_arguments() -> argparse.Namespace:
    arguments = parser("gateway")
    arguments.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    arguments.add_argument("--port", type=int, default=8000, help="port (default: %(default)s)")
    arguments.add_argument(
        "--api-key-file", type=Path, help="keys of which a request must bring one, one a line"
    )
    arguments.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        help="web page that may use the gateway from a browser; repeatable",
    )
    arguments.add_argument(
        "--model-name", default="", help="the model's name for clients (default: the target's)"
    )
    arguments.add_argument(
        "--strategy",
        default=DEFAULT_STRATEGY,
        help="strategy of requests that name none (default: %(default)s)",
    )
    arguments.add_argument(
        "--most-answers",
        type=int,
        default=MOST_OPEN,
        help="answers under way at once; more requests get 429 (default: %(default)s)",
    )
    arguments.add_argument(
        "--most-connections",
        type=int,
        default=MOST_CONNECTIONS,
        help="connections at once; further ones get 503 (default: %(default)s)",
    )
    arguments.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        help="name under which the gateway is served, beside this machine's own; repeatable",
    )
    arguments.add_argument(
        "--allow-strategies",
        default="",
        help="strategies that requests may name, with commas "
        "(default: all exact ones that let other jobs run beside them)",
    )
    arguments.add_argument(
        "--default-tokens",
        type=int,
        help="most tokens of a chat answer whose request does not say (default: what fits)",
    )
    return arguments.parse_args()


if __name__ == "__main__":
    run(main, "gateway")
