"""``flowspec profile``: measure this machine, and write what came out as a profile."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from flowspec.cli.parser import positive
from flowspec.cli.places import check_target
from flowspec.errors import ConfigError
from flowspec.model.directory import default_pair

#: What is measured of the packaged models: a drafter of every kind.
DEFAULT_DRAFTS = "draft+head+ngram"


def profile(
    target: str | None,
    draft: str | None,
    rows: str,
    stages: int,
    repeats: int,
    latency_ms: float,
    mbit: float,
    out: Path | None,
) -> None:
    """Measure, and write the profile to ``out`` or stdout; ConfigError for flags that make no
    sense.
    """
    from flowspec.testbed.measure import MeasurementPlan, as_toml, measure

    check_target(target, draft)
    plan = MeasurementPlan(_counts(rows), stages, repeats, latency_ms, mbit)
    if out is not None and out.suffix != ".toml":
        raise ConfigError(
            f"--out is {out}; expected a name that ends in .toml, by which a profile is told from "
            "a name"
        )
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out is {out}, but there is no folder {out.parent}")
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as line:
        drafts = DEFAULT_DRAFTS if draft is None else draft
        measured = measure(
            target or default_pair()[0], drafts, plan, lambda what: line.update(f"timing {what}")
        )
    text = as_toml(measured, plan)
    if out is None:
        sys.stdout.write(text)
        return
    out.write_text(text)
    console.print(f"wrote {out}", markup=False, soft_wrap=True)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({positive(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"--rows is {text!r}; expected counts of 1 or more, like 1,4,16,64"
        ) from None
