from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.conftest import Rig, rig_over


@pytest.fixture(params=["memory", "redis"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Either broker; their links are the subject of ``tests/transport``."""
    with rig_over(request.param, request) as rig:
        yield rig
