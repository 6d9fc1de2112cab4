"""The draft of a target for which none is named."""

from __future__ import annotations

import pytest

from flowspec.model.drafters.kinds import NGRAM, default_draft
from flowspec.model.weights.directory import default_pair

TARGET, DRAFT = default_pair()


@pytest.mark.parametrize(
    ("target", "draft"),
    [(None, DRAFT), ("target", DRAFT), (TARGET, DRAFT), ("models/small.gguf", NGRAM)],
)
def test_the_packaged_draft_is_for_the_packaged_target(target: str | None, draft: str) -> None:
    assert default_draft(target) == draft
