"""Options that several commands have, as one parameter of each."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from flowspec.cli.flags import (
    Device,
    Draft,
    DraftDevice,
    DraftDtype,
    Dtype,
    Models,
    Planned,
    Seed,
    Stages,
    Target,
    Temperature,
    TopK,
    TopP,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFlags:
    """The models of a pipeline, its stages, and what they run on; None: the default."""

    target: Target = None
    draft: Draft = None
    models: Models = None
    stages: Stages = None
    dtype: Dtype = None
    device: Device = None
    draft_dtype: DraftDtype = None
    draft_device: DraftDevice = None
    cluster: Planned = None

    @property
    def given(self) -> bool:
        """Whether any of them is named."""
        return self != ModelFlags()


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How a token is chosen, as in ``Sampling``."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    seed: Seed = 0


def grouped(command: Callable[..., T]) -> Callable[..., T]:
    """``command`` with each field of its parameters that are dataclasses as an option."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(command).parameters.values():
        if own.name not in groups:
            parameters.append(own.replace(annotation=hints[own.name]))
            continue
        kinds = get_type_hints(groups[own.name], include_extras=True)
        parameters += [
            own.replace(name=field.name, default=field.default, annotation=kinds[field.name])
            for field in dataclasses.fields(groups[own.name])
        ]

    @functools.wraps(command)
    def called(**given: Any) -> T:
        for name, kind in groups.items():
            given[name] = kind(
                **{field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
            )
        return command(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {own.name: own.annotation for own in parameters}
    return called
