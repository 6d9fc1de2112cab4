"""The command line of the programs in ``ops``: a wrong argument gives one line."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """``argparse``'s parser without the usage before an error; exit status 2 as there."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n")
        sys.exit(2)
