"""What the gateway knows of its pipeline: the model, its limits, which workers are there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.async_client import AsyncClient
from flowspec.errors import BrokerError, BrokerFull, BrokerUnreachable
from flowspec.gateway.errors import ApiError, refused, unavailable
from flowspec.gateway.schema import Sampled
from flowspec.transport.base import CHAT_TEMPLATE, CONTEXT, full_of, roles_of, setup_of

#: How long what was read, or why nothing could be, is used again, seconds.
FRESH_SECONDS = 1.0
#: Longest time from the beginning of a look at the pipeline until it is taken for lost, seconds.
#: The look goes on, so that the first one that succeeds is noticed.
LOOK_SECONDS = 2.0
#: The same while the broker is lost.
LOST_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class PipelineState:
    """A pipeline as last seen. ``context``: most tokens of prompt and answer; 0: not known.

    ``missing``: roles without a ready worker. ``full``: why the broker takes no writes, or empty.
    """

    target: str
    stages: int
    fingerprint: str
    context: int
    has_chat_template: bool
    missing: tuple[str, ...]
    full: str


class PipelineWatch:
    """Reads the pipeline's state when it is asked for, and not more often than it changes.

    ``name``: the model's name for clients; empty: by the target's.
    """

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self._looking: asyncio.Task[PipelineState] | None = None
        self._began = self._ended = 0.0
        self._is_lost = False
        self.created = int(time.time())

    async def state(self) -> PipelineState:
        """The state; an error if there is no pipeline or no broker. All callers share one look."""
        now = time.monotonic()
        looking = self._looking
        if looking is None or (looking.done() and now - self._ended >= FRESH_SECONDS):
            looking = self._looking = asyncio.create_task(self._look_again(), name="look")
            self._began = now
        most = LOST_LOOK_SECONDS if self._is_lost else LOOK_SECONDS
        await asyncio.wait({looking}, timeout=max(0.0, self._began + most - now))
        if not looking.done():
            self._is_lost = True
            raise BrokerUnreachable("the broker has not answered yet")
        return looking.result()

    async def close(self) -> None:
        """End a look that is under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def ready(self) -> PipelineState:
        """The state; an error unless all workers are there, and the broker takes jobs."""
        state = await self.state()
        if state.full:
            raise BrokerFull(state.full)
        if state.missing:
            raise unavailable(
                f"the pipeline is not complete: {', '.join(state.missing)} has no ready worker; "
                "try again, or look with `flowspec status`"
            )
        return state

    async def serving(self, request: Sampled) -> PipelineState:
        """As ``ready`` and ``check_model``; a request that names no model names it then."""
        state = await self.ready()
        request.model = self.check_model(state, request.model)
        return state

    def model(self, state: PipelineState) -> str:
        """The model's name for clients."""
        return self._name or name_of(state.target)

    def check_model(self, state: PipelineState, name: str | None) -> str:
        """The model's name; an error if a request's ``name`` is another one."""
        served = self.model(state)
        if name not in (None, served):
            raise ApiError(
                404,
                f"the model {str(name)[:100]!r} is not served here; this is {served!r}",
                param="model",
                code="model_not_found",
            )
        return served

    async def _look_again(self) -> PipelineState:
        try:
            state = await self._look()
        except BrokerError:
            self._is_lost = True
            raise
        else:
            self._is_lost = False
            return state
        finally:
            self._ended = time.monotonic()

    async def _look(self) -> PipelineState:
        record = await self._client.pipeline()
        if not record:
            raise unavailable("no pipeline here: no scheduler has announced one")
        workers = await self._client.workers()
        draft = workers.get("draft", {})
        setup = setup_of(record)
        missing = [] if "scheduler" in workers else ["scheduler"]
        missing += [role for role in roles_of(record) if not _is_ready(workers.get(role), setup)]
        return PipelineState(
            target=record.get("target", ""),
            stages=int(record.get("stages", "0")),
            fingerprint=f"fp_{setup}",
            context=int(draft.get(CONTEXT, 0)),
            has_chat_template=bool(draft.get(CHAT_TEMPLATE, True)),
            missing=tuple(missing),
            full=full_of(workers),
        )


def _is_ready(facts: Mapping[str, Any] | None, setup: str) -> bool:
    return facts is not None and facts.get("state") == "ready" and facts.get("setup") == setup


def name_of(target: str) -> str:
    """A model's name for clients: a hub name itself, else the last part of its path."""
    begins, ends = target.startswith(("/", ".", "~")), target.endswith(".gguf")
    is_path = begins or ends or target.count("/") > 1
    return target.rstrip("/").rpartition("/")[2] if is_path else target


def check_template(state: PipelineState) -> None:
    """An error if the model takes no messages."""
    if not state.has_chat_template:
        raise refused(
            "the model has no chat template, so it takes no messages; "
            "send a prompt to /v1/completions",
            "messages",
            "no_chat_template",
        )
