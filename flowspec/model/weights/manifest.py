"""The manifest of a shard: the folder of one stage, written by `flowspec shard`. Needs no torch.

A shard holds the source model's config and the tensors of one block of layers, in files whose
sizes and SHA-256 are in the manifest. ``source`` and ``values`` name the model that it was cut
from, so that it is recognised as part of that model although the rest is not there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flowspec.errors import ConfigError, ModelError
from flowspec.model.weights.precision import AUTO, PRECISIONS

MANIFEST = "flowspec-shard.json"
#: The only version that is read.
VERSION = 2
#: What ``dtype`` is if weights are as the source has them.
AS_STORED = "as stored"
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardFile:
    """Size in bytes and SHA-256 of one file of a shard."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the shard in ``folder`` holds.

    ``source``: identity of the model (``ModelDirectory.identity``). ``values``: digests of its
    groups of tensors, of this shard's at least. ``stage`` of ``stages``, from 1; 0: the folder of
    scheduler and draft worker. ``layers``: its block as ``first-end``. ``dtype``: precision of the
    layers' weights, or ``AS_STORED``. ``files``: by name, all but the manifest.
    """

    folder: Path
    source: str
    values: Mapping[str, str]
    stage: int
    stages: int
    layers: str
    dtype: str
    files: Mapping[str, ShardFile]

    def write(self) -> None:
        """Write the manifest, with a digest of itself, into its folder."""
        content = asdict(self)
        del content["folder"]
        content["version"] = VERSION
        content["sha256"] = _own_digest(content)
        (self.folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def check_files(self) -> None:
        """ModelError, naming the file, if one is missing, cut short, changed, or not the shard's.

        Weights of another checkpoint in the folder would be read instead of the shard's.
        """
        for path in sorted(self.folder.glob("*.safetensors*")):
            if path.name not in self.files:
                raise ModelError(f"{path} is no file of the shard in {self.folder}; remove it")
        for name, wanted in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise ModelError(f"shard {self.folder} has lost its file {name}; {_AGAIN}")
            size = path.stat().st_size
            if size != wanted.size:
                raise ModelError(
                    f"{path} has {size} bytes, and its manifest says {wanted.size}; {_AGAIN}"
                )
            if file_digest(path) != wanted.sha256:
                raise ModelError(f"{path} was changed: its SHA-256 is another; {_AGAIN}")

    def check_stage(self, stage: int, layers: range) -> None:
        """ModelError unless this is the shard of ``stage`` with ``layers``."""
        wanted = f"{layers.start}-{layers.stop}"
        if (self.stage, self.layers) != (stage, wanted):
            raise ModelError(
                f"shard {self.folder} is {self.named}, and stage {stage} with layers {wanted} is "
                "to be served; give that stage's folder, or shard the model again for this pipeline"
            )

    @property
    def named(self) -> str:
        """The shard's place, for messages."""
        if not self.stage:
            return f"that of scheduler and draft worker, for {self.stages} stages"
        return f"stage {self.stage} of {self.stages} with layers {self.layers}"

    def dtype_for(self, asked: str) -> str:
        """The precision to load with if ``--dtype`` is ``asked``; ConfigError if it is another."""
        if self.dtype == AS_STORED:
            return asked
        if asked not in (AUTO, self.dtype):
            raise ConfigError(
                f"shard {self.folder} was written in {self.dtype}, and {asked} is asked for; "
                f"start the pipeline with --dtype {self.dtype} or auto, or shard the model again"
            )
        return self.dtype


_AGAIN = "copy the shard again, or write it again with `flowspec shard`"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in ``folder``; None if there is none. ModelError if it is damaged or newer."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = int(content["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read as a shard's manifest: {error}") from None
    if version != VERSION:
        raise ModelError(
            f"{path} has version {version}, and this FlowSpec reads version {VERSION}; "
            "use the FlowSpec that wrote it, or shard the model again"
        )
    if content.get("sha256") != _own_digest(content):
        raise ModelError(f"{path} was changed after it was written; {_AGAIN}")
    if content["dtype"] not in (AS_STORED, *PRECISIONS):
        raise ModelError(f"{path} has the precision {content['dtype']!r}, which is unknown here")
    files = {name: ShardFile(**file) for name, file in content["files"].items()}
    rest = {key: content[key] for key in ("source", "values", "stage", "stages", "layers", "dtype")}
    return Manifest(folder=folder, files=files, **rest)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in slices."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
    return digest.hexdigest()


def _own_digest(content: Mapping[str, object]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
