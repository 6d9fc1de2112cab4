from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from flowspec.transport.connections.async_client import AsyncBrokerClient, cancellable
from flowspec.transport.connections.server import PrivateBroker


async def answered_at_once() -> str:
    return "the answer"


async def losing_the_cancellation() -> str:
    """As ``asyncio.wait_for`` in Python 3.11, if both come together."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "the answer"
    raise AssertionError("not cancelled")


async def cancelled_at_work(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """The ended task of ``work``, cancelled once it waits."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    return task


def test_a_cancellation_that_the_call_has_lost_is_raised() -> None:
    task = asyncio.run(cancelled_at_work(cancellable(losing_the_cancellation())))
    assert task.cancelled()


def test_a_call_in_the_cleanup_of_a_cancelled_task_is_carried_out() -> None:
    async def cleaning() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            assert await cancellable(answered_at_once()) == "the answer"
        raise AssertionError("not cancelled")

    assert asyncio.run(cancelled_at_work(cleaning())).cancelled()


def test_a_task_whose_command_was_written_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment of many short commands."""

    async def check(url: str) -> None:
        client = AsyncBrokerClient(url)
        await client.open()

        async def asking() -> None:
            while True:
                await client.run(("PING",))

        for steps in range(60):
            task = asyncio.create_task(asking())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=2)
            assert done, f"goes on after {steps} steps"
            assert task.cancelled()
        await client.close()

    with PrivateBroker() as broker:
        asyncio.run(check(broker.url))
