"""Short names of a small pipeline's addresses."""

from __future__ import annotations

from flowspec.core.protocol.addresses import DRAFT, middle_address, stage_address

D0 = DRAFT
S1 = stage_address(1)
S2 = stage_address(2)
S3 = stage_address(3)
S4 = stage_address(4)
S5 = stage_address(5)
M1 = middle_address(1)
M2 = middle_address(2)
