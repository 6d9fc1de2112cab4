"""All examinations in order; each waits for a bounded time, and the next ones go on without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowspec.doctor import (
    broker,
    broker_settings,
    graphics,
    kernels,
    machine,
    model,
    ports,
    processor,
    versions,
)
from flowspec.doctor.finding import Finding, from_error, note
from flowspec.doctor.imports import IMPORT_SECONDS, Imported, try_imports
from flowspec.errors import BrokerError, ConfigError
from flowspec.model.weights.families import TESTED_FAMILIES
from flowspec.roles.text_process import text_ends
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import START_SECONDS, PrivateBroker, find_server

Survey = Callable[[str], Sequence[kernels.KernelFact]]
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plans:
    """What a run is planned with; ``url`` None: a private broker.

    ``device``: ``auto``, ``cpu`` or ``cuda:N``.
    """

    target: str
    draft: str
    dtype: str
    device: str
    url: str | None


def examine(plans: Plans, survey: Survey | None, announce: Announce) -> Iterator[Finding]:
    """Findings on everything that a run with ``plans`` needs.

    ``survey``: the kernels of a device, None if there is none to ask. ``announce`` is called with
    a line before every wait.
    """
    announce(f"importing torch and other packages, at most {IMPORT_SECONDS:.0f} s")
    installed = versions.gather()
    there = [package for package in installed.packages if package.version is not None]
    imported = try_imports([package.module for package in there])
    yield from versions.check(installed, imported.broken)
    announce(f"looking at the machine, at most {machine.CLOCK_SECONDS:.0f} s")
    device = chosen_device(plans.device, imported)
    seen = machine.gather()
    yield from machine.check(seen)
    yield from processor.check(processor.gather(), plans.dtype, device)
    yield from graphics.check(graphics.gather(imported), plans.dtype, device)
    yield from ports.check_open_files(ports.open_files())
    if plans.url is None:
        yield from _private_broker(announce)
    else:
        yield from _broker(plans.url, announce)
    announce("loading the models' code, and reading their folders")
    usable = bool(imported.torch_build)
    memory = _memory(device, seen, imported)
    families = TESTED_FAMILIES if usable else ()
    yield from model.check_names(
        plans.target, plans.draft, memory, plans.dtype, families, text_ends
    )
    if survey is not None and usable:
        announce("looking for kernels")
        yield from kernels.check(survey(device), plans.dtype, device)
    elif survey is not None:
        yield note(
            kernels.SUBJECT,
            "not looked for, since torch cannot be imported",
            "correct torch first",
        )


def chosen_device(device: str, imported: Imported) -> str:
    """``device``, with ``auto`` resolved."""
    if device != "auto":
        return device
    return "cuda:0" if imported.accelerators else "cpu"


def _memory(device: str, seen: machine.MachineFacts, imported: Imported) -> int | None:
    if not device.startswith("cuda"):
        return seen.available
    number = int(device.partition(":")[2] or 0)
    return imported.accelerators[number].free if number < len(imported.accelerators) else None


def _broker(url: str, announce: Announce) -> Iterator[Finding]:
    try:
        connect(url).close()  # understands the URL, and reaches nothing yet
    except ConfigError as wrong:
        yield from_error(ports.SUBJECT, wrong, "correct the URL")
        return
    announce(f"connecting to the broker, at most {ports.CONNECT_SECONDS:.0f} s an address")
    opened = ports.connect_to(url)
    yield ports.check_opened(opened)
    if opened.failure:
        return
    announce(f"asking the broker, at most {broker.PING_SECONDS:.0f} s for pings")
    yield from _asked(url, private=False)


def _private_broker(announce: Announce) -> Iterator[Finding]:
    announce(f"starting a private broker, at most {START_SECONDS:.0f} s")
    began = time.monotonic()
    server = PrivateBroker()
    try:
        binary = find_server()
        url = server.start()
    except BrokerError as failed:
        yield ports.check_started(ports.Started(None, failed, time.monotonic() - began))
        return
    try:
        yield ports.check_started(ports.Started(binary, None, time.monotonic() - began))
        yield from _asked(url, private=True)
    finally:
        server.stop()


def _asked(url: str, *, private: bool) -> Iterator[Finding]:
    try:
        facts = broker.gather(url, private=private)
    except BrokerError as failed:
        yield from_error(broker.SUBJECT, failed, "look into the server's log, and check the URL")
        return
    yield from broker.check(facts)
    if facts.mode != "sentinel":
        yield from broker_settings.check(facts)
