"""``flowspec profile``: measure this machine and write a profile of it."""

from __future__ import annotations

import sys
from pathlib import Path

from flowspec.cli.outputs import check_writable, write
from flowspec.cli.parser import positive
from flowspec.cli.places import draft_for
from flowspec.cli.show import console
from flowspec.errors import ConfigError
from flowspec.model.weights.directory import default_pair
from flowspec.model.weights.precision import AUTO

#: The packaged drafters that are measured, one of every kind.
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
    dtypes: tuple[str, str] = (AUTO, AUTO),
) -> None:
    """Measure, and write the profile to ``out`` or stdout; ConfigError for invalid flags.

    ``dtypes``: precisions of the target and of the drafters.
    """
    from flowspec.rehearse.measure import MeasurementPlan, as_toml, measure

    drafts = draft_for(target, draft, DEFAULT_DRAFTS)
    plan = MeasurementPlan(_counts(rows), stages, repeats, latency_ms, mbit, *dtypes)
    if out is not None and out.suffix != ".toml":
        raise ConfigError(
            f"--out is {out}; expected a name that ends in .toml, like every profile in a file"
        )
    if out is not None:
        check_writable("--out", out)
    screen = console(stderr=True)
    with screen.status("starting") as line:
        measured = measure(
            target or default_pair()[0], drafts, plan, lambda what: line.update(f"timing {what}")
        )
    text = as_toml(measured, plan)
    if out is None:
        sys.stdout.write(text)
        return
    write("--out", out, text)
    screen.print(f"wrote {out}", markup=False, soft_wrap=True)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({positive(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"--rows is {text!r}; expected counts of 1 or more, like 1,4,16,64"
        ) from None
