"""``flowspec acl``: users and passwords for a broker that others may reach."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from flowspec.cli.show import console
from flowspec.errors import ConfigError
from flowspec.transport.connections.connection import checked_url
from flowspec.transport.control.acl import acl_file, new_password, users
from flowspec.transport.wire.keys import Keys

#: The file that the broker reads (``aclfile``), in the folder that is written.
ACL_FILE = "users.acl"


def write_acl(out: Path, stages: int, middles: int, url: str) -> list[Path]:
    """Write the ACL file and for each user a file with its broker URL, for that user alone.

    ConfigError if there is something in ``out``: passwords in use are not replaced unasked.
    """
    with checked_url(url):
        place = urlsplit(url)
    if place.username or place.password:
        raise ConfigError("--redis-url names a user; leave it out: every role gets its own")
    if place.scheme == "unix" or not place.hostname:
        raise ConfigError("--redis-url must name a host, like redis://broker:6379/0")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give a new folder as --out")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = users(Keys(), stages, middles)
    passwords = [new_password() for _ in found]
    texts = {ACL_FILE: acl_file(found, passwords)}
    for user, password in zip(found, passwords, strict=True):
        own = place._replace(netloc=f"{user.name}:{password}@{place.netloc}").geturl()
        texts[f"{user.name}.env"] = f"FLOWSPEC_REDIS_URL={own}\n"
    for name, text in texts.items():
        (out / name).touch(mode=0o600)
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def acl(out: Path, stages: int, middles: int, url: str) -> None:
    """Write the files and say what each is for."""
    table, *of_users = write_acl(out, stages, middles, url)
    shown = console()
    shown.print(f"{table}: for the broker, as `aclfile`", highlight=False)
    for file in of_users:
        shown.print(f"{file}: the broker's URL as {file.stem}", highlight=False)
