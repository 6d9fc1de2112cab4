"""API keys: read from a file, compared as digests, wrong files are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from flowspec.gateway.keys import ApiKeys, read_keys


def test_one_of_several_keys_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the notebook\nsk-notebook-1\n\n  sk-phone-22  \n")
    keys = read_keys(file)
    assert keys
    for header in ("Bearer sk-notebook-1", "bearer sk-phone-22", " BEARER  sk-phone-22 "):
        assert keys.allow(header)
    for header in (
        "",
        "sk-phone-22",
        "Bearer",
        "Bearer sk-phone-2",
        "Basic sk-phone-22",
        "Bearer ä",
    ):
        assert not keys.allow(header)
    assert not keys.allow("Bearer schlüssel")


def test_the_keys_themselves_are_not_kept() -> None:
    keys = ApiKeys(["sk-secret-key"])
    assert "sk-secret-key" not in repr(vars(keys))


def test_without_keys_every_request_is_served() -> None:
    assert not ApiKeys()
    assert ApiKeys().allow("")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no keys; write one a line"),
        (b"# nothing\n\n", "has no keys"),
        (b"long-enough\nshort\n", "line 2 is no key; expected at least 8 ASCII characters"),
        (b"two words here\n", "line 1 is no key"),
        ("schlüssel-lang\n".encode(), "line 1 is no key"),
        (b"\xff\xfe\x00", "it is not UTF-8 text"),
    ],
)
def test_a_file_that_has_none_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_keys(file)
    said = str(refused.value)
    assert says in said
    assert "\n" not in said
    assert "short" not in said.partition(":")[2].partition("is no key")[0]


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none")
