"""``flowspec doctor``: what may keep a run from working here, each with its remedy."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from flowspec.cli.show import console
from flowspec.doctor.examine import Plans, Survey, examine
from flowspec.doctor.finding import Finding, Severity, any_error
from flowspec.doctor.kernels import KernelFact
from flowspec.errors import ConfigError
from flowspec.model.drafters.kinds import default_draft
from flowspec.model.weights.directory import default_pair
from flowspec.model.weights.precision import check_dtype

_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.ERROR: "bold red",
}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def doctor(
    target: str | None,
    draft: str | None,
    dtype: str,
    device: str,
    url: str | None,
    survey: Survey | None,
    *,
    as_json: bool,
) -> int:
    """Print all findings; the exit status, 1 if one is an error."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"--device is {device!r}; expected auto, cpu or cuda:N")
    drafts = draft or default_draft(target)
    plans = Plans(target or default_pair()[0], drafts, check_dtype(dtype), device, url or None)
    found = []
    with console(stderr=True).status("examining") as line:
        for finding in examine(plans, survey, line.update):
            found.append(finding)
            line.stop()  # it would take what is written to stdout to its own stream
            _show(finding, as_json=as_json)
            line.start()
    if not as_json:
        _sum_up(found)
    return int(any_error(found))


def survey(device: str) -> Sequence[KernelFact]:
    """The kernels for ``device`` on this machine; imports torch."""
    from flowspec.model import kernels

    return kernels.survey(device.partition(":")[0])


def _show(finding: Finding, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(finding)) + "\n")
        sys.stdout.flush()
        return
    shown = Text.assemble(
        (f"{finding.level:<8}", _STYLES[finding.level]),
        (f"{finding.subject:<10}", "bold"),
        finding.found,
        *([f"\n{'':18}-> {finding.remedy}"] if finding.remedy else []),
    )
    console().print(shown, soft_wrap=True)


def _sum_up(found: list[Finding]) -> None:
    counts = Counter(finding.level for finding in found)
    parts = [
        f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}"
        for level in (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        if counts[level]
    ]
    console().print(", ".join(parts) or "nothing to correct", soft_wrap=True)
