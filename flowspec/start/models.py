"""Whether the model on this machine is the one that the pipeline's record names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from flowspec.core.run.limits import default_kept_rows
from flowspec.errors import ConfigError, ModelError
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import (
    PACKAGED,
    ModelDirectory,
    all_tensors,
    expanded,
    fetch_weights,
    open_directory,
)
from flowspec.observe import logger

Needs = Callable[[ModelDirectory], tuple[str, ...]]


def located(given: str | None, recorded: str, flag: str) -> str:
    """The model ``given`` by ``flag``; None: the one that the pipeline's record names.

    ModelError if there is nothing of that name here: it may be elsewhere on this machine.
    """
    if given is not None:
        return given
    try:
        open_directory(recorded)
    except ModelError as error:
        if recorded in PACKAGED or expanded(recorded).exists():
            raise
        raise ModelError(
            f"{error}; the pipeline's record names it so: say by {flag} where it is on this machine"
        ) from None
    return recorded


def open_stage(
    name: str, stage: int, layers: range, record: Mapping[str, str], dtype: str, needs: Needs
) -> tuple[ModelDirectory, str]:
    """The target ``name`` with the weights of ``stage``, checked; and its precision.

    ``needs``: as ``fetch_weights``'s. ``dtype``: as asked for; a shard has the say if that is auto.
    """
    shard = open_directory(name).shard
    if shard is not None:
        check_fingerprint(shard.source, record["target_fingerprint"], name)
        shard.check_stage(stage, layers)
        dtype = shard.dtype_for(dtype)
    return open_target(name, record, needs), dtype


def open_target(name: str, record: Mapping[str, str], needs: Needs) -> ModelDirectory:
    """The target ``name`` with the weights that ``needs`` names, checked against the record."""
    target = fetch_weights(name, needs)
    check_fingerprint(target.identity, record["target_fingerprint"], name)
    check_values(target, needs(target), json.loads(record["target_values"]), name)
    return target


def open_middle(name: str, model: int, record: Mapping[str, str]) -> ModelDirectory:
    """Middle model ``model``, found as ``name``, with all its weights, checked likewise."""
    directory = fetch_weights(name, all_tensors)
    expected = record["middle_fingerprints"].split()[model - 1]
    check_fingerprint(directory.identity, expected, name)
    check_values(directory, ("",), json.loads(record["middle_values"])[model - 1], name)
    return directory


def open_tapping(taps: Taps, name: str) -> ModelDirectory:
    """The drafter that reads ``taps``, found as ``name``, with its weights, checked likewise."""
    directory = fetch_weights(name, all_tensors)
    check_fingerprint(directory.fingerprint, taps.fingerprint, name)
    return directory


def context_of(record: Mapping[str, str], target: ModelDirectory) -> int:
    """Most tokens of a job of the pipeline."""
    return min(target.context, int(record.get("context", target.context)))


def kept_rows_of(record: Mapping[str, str], target: ModelDirectory) -> int:
    """Most rows that the pipeline keeps for later jobs."""
    return int(record.get("kept_rows", default_kept_rows(context_of(record, target))))


def check_fingerprint(found: str, expected: str, name: str) -> None:
    """ConfigError unless the local copy of ``name`` has the fingerprint ``expected``."""
    if found != expected:
        raise ConfigError(
            f"model {name} is not the one the pipeline was set up with "
            f"(fingerprint {found}, expected {expected}); copy that model here"
        )


def check_values(
    directory: ModelDirectory, prefixes: tuple[str, ...], expected: Mapping[str, str], name: str
) -> None:
    """ConfigError unless the weights under ``prefixes`` have the digests ``expected``, by group.

    A scheduler without the weights has no digests to compare with; then this is only logged.
    """
    if not expected:
        logger().info("values not compared: the scheduler has no weights", model=name)
        return
    for group, digest in directory.values(prefixes).items():
        if group not in expected:
            logger().info("values not compared", model=name, group=group)
        elif digest != expected[group]:
            raise ConfigError(
                f"model {name} is not the one the pipeline was set up with: its weights in "
                f"{group} have other values (digest {digest}, expected {expected[group]}); "
                "copy that model here"
            )
