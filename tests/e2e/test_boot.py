"""What every worker process does before its loop starts."""

from __future__ import annotations

import gc
from unittest.mock import Mock

import pytest

import workers._boot as boot
from flowspec.broker.memory import MemoryBroker, MemoryLink
from flowspec.broker.server import PrivateBroker
from flowspec.core.protocol.addresses import stage_address
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import ClusterError


def test_a_worker_without_a_pipeline_waits_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with PrivateBroker() as broker:
        monkeypatch.setattr(boot, "RECORD_SECONDS", 0.3)
        process = boot.Process.__new__(boot.Process)
        process.url = broker.url
        process.keys = boot.Keys()
        process._stopped = False
        control = process.control()
        with pytest.raises(
            ClusterError, match=r"pipeline p0 has no record after 0.3 s; start its scheduler"
        ):
            process.pipeline_record(control)
        control.close()


def test_a_collection_while_a_worker_serves_passes_over_what_it_loaded() -> None:
    loaded = [object()]
    try:
        boot.make_worker(
            {}, StageMachine(1, 1), MemoryLink(MemoryBroker(), stage_address(1)), Mock()
        )
        assert all(loaded is not held for held in gc.get_objects())
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    assert any(loaded is held for held in gc.get_objects())
