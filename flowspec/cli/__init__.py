"""The command line. Commands import what they need when they run, so that ``--help`` is instant."""

import sys


def main() -> None:
    """Entry point. Ctrl-C is quiet, while the commands are imported as later."""
    try:
        from flowspec.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


__all__ = ["main"]
