from __future__ import annotations

import pytest

from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Refused
from flowspec.core.protocol.refusals import refusal
from flowspec.core.run.key import RunKey

RUN = RunKey("j", 1)


@pytest.mark.parametrize("code", [Code.OK, Code.DUP])
def test_what_was_taken_now_or_before_is_no_refusal(code: Code) -> None:
    assert refusal(RUN, "a commit", code) is None


@pytest.mark.parametrize("code", [Code.GAP, Code.FULL, Code.STALE])
def test_a_refusal_names_the_run_and_what_was_refused_in_one_line(code: Code) -> None:
    found = refusal(RUN, "a message to s1", code)
    assert isinstance(found, Refused)
    assert (found.run, found.stale) == (RUN, code is Code.STALE)
    assert found.reason.startswith("the broker refused a message to s1: ")
    assert "\n" not in found.reason
