"""The project's own target and draft."""

from __future__ import annotations

from pathlib import Path

import flowspec

PAIR = Path(flowspec.__file__).parent / "default_pair"
TARGET = str(PAIR / "target")
DRAFT = str(PAIR / "draft")
