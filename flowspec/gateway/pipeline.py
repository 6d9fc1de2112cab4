"""What the gateway knows of its pipeline: the model, its limits, which workers are there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.async_client import AsyncClient
from flowspec.broker.base import CHAT_TEMPLATE, CONTEXT, roles_of, setup_of
from flowspec.errors import BrokerUnreachable
from flowspec.gateway.errors import ApiError, refused, unavailable

#: How long what was read is used again, seconds.
FRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PipelineState:
    """A pipeline as last seen. ``context``: most tokens of prompt and answer; 0: not known.

    ``missing``: roles without a ready worker.
    """

    target: str
    stages: int
    fingerprint: str
    context: int
    has_chat_template: bool
    missing: tuple[str, ...]


class PipelineWatch:
    """Reads the pipeline's state when it is asked for, and not more often than it changes.

    ``name``: the model's name for clients; empty: by the target's.
    """

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self._seen: PipelineState | None = None
        self._looked = -FRESH_SECONDS
        self.created = int(time.time())

    async def state(self) -> PipelineState:
        """The state; an error if there is no pipeline or no broker."""
        now = time.monotonic()
        if self._seen is None or now - self._looked >= FRESH_SECONDS:
            self._seen = await self._look()
            self._looked = now
        return self._seen

    async def ready(self) -> PipelineState:
        """The state; an error unless all workers are there."""
        state = await self.state()
        if state.missing:
            raise unavailable(
                f"the pipeline is not complete: {', '.join(state.missing)} has no ready worker; "
                "try again, or look with `flowspec status`"
            )
        return state

    async def serving(self, name: str) -> PipelineState:
        """As ``ready``; an error, too, if a request's ``name`` is not the model's."""
        state = await self.ready()
        self.check_model(state, name)
        return state

    def model(self, state: PipelineState) -> str:
        """The model's name for clients."""
        return self._name or name_of(state.target)

    def check_model(self, state: PipelineState, name: str) -> None:
        """An error if a request's ``name`` is not the model's."""
        if name != self.model(state):
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; this is {self.model(state)!r}",
                param="model",
                code="model_not_found",
            )

    async def _look(self) -> PipelineState:
        record = await self._read_record()
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
        )

    async def _read_record(self) -> dict[str, str]:
        try:
            return await self._client.pipeline()
        except BrokerUnreachable:
            # It may be another server now, with a pipeline of its own.
            await self._client.reopen()
            return await self._client.pipeline()


def _is_ready(facts: Mapping[str, Any] | None, setup: str) -> bool:
    return facts is not None and facts.get("state") == "ready" and facts.get("setup") == setup


def name_of(target: str) -> str:
    """A model's name for clients: a hub name itself, of a folder the last part of its path."""
    is_folder = target.startswith(("/", ".", "~")) or target.count("/") > 1
    return target.rstrip("/").rpartition("/")[2] if is_folder else target


def check_template(state: PipelineState) -> None:
    """An error if the model takes no messages."""
    if not state.has_chat_template:
        raise refused(
            "the model has no chat template, so it takes no messages; "
            "send a prompt to /v1/completions",
            "messages",
            "no_chat_template",
        )
