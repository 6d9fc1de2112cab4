"""Cutting a model into shards: a folder for each stage, with its own weights only (``manifest``).

Linear layers are written in the asked precision, one at a time. Embedding, norms, biases and the LM
head stay as the source has them: a quantised stage's head has another precision on another device.
Loading a shard gives the same bits as loading the source in that precision.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flowspec.errors import ConfigError, ModelError
from flowspec.model.layers.block import linear_names, tensor_prefixes
from flowspec.model.layers.expert_matrices import of_all_experts, own_matrix, read_as
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.gguf_metadata import GGUF_INDEX
from flowspec.model.weights.manifest import AS_STORED, MANIFEST, Manifest, ShardFile, file_digest
from flowspec.model.weights.precision import AUTO, PRECISIONS, check_dtype
from flowspec.model.weights.stored_weight import SUFFIXES, StoredWeight
from flowspec.model.weights.tensor_files import NewTensor, TensorEntry, new_folder, write_tensors
from flowspec.model.weights.tensors import read_tensor
from flowspec.model.weights.value_digests import of_prefixes

WEIGHTS = "model.safetensors"
#: The folder of scheduler and draft worker.
DRAFT_FOLDER = "draft"
_CONFIG_FILES = ("config.json", "generation_config.json")
#: What a model's folder may have beside its config and its weights.
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.bfloat16: "BF16"}
_NAMES |= {torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How to cut: the block of layers of each stage, and the precision of linear layers.

    ``dtype``: a precision or ``AS_STORED``. ``head``: the draft worker's folder gets embedding and
    LM head, which an EAGLE head reads.
    """

    blocks: Sequence[range]
    dtype: str = AS_STORED
    head: bool = False


def parse_blocks(text: str, layers: int) -> list[range]:
    """Blocks written like ``0-5 5-12``; ConfigError unless they are all ``layers`` in order."""
    blocks = []
    for part in text.split():
        first, _, end = part.partition("-")
        if not (first.isascii() and first.isdigit() and end.isascii() and end.isdigit()):
            raise ConfigError(f"layers {text!r} are no blocks; expected like '0-5 5-12'")
        blocks.append(range(int(first), int(end)))
    ends = [0, *(block.stop for block in blocks)]
    if (
        [block.start for block in blocks] != ends[:-1]
        or ends[-1] != layers
        or not all(len(block) for block in blocks)
    ):
        raise ConfigError(
            f"layers {text!r} do not follow each other from 0 to {layers}, the model's layers"
        )
    return blocks


def check_shard_dtype(dtype: str | None) -> str:
    """The ``dtype`` of a plan for ``--dtype``; ConfigError for an unknown one. None: as stored."""
    return AS_STORED if dtype is None or check_dtype(dtype) == AUTO else dtype


def write_shards(
    directory: ModelDirectory,
    plan: ShardPlan,
    out: Path,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> None:
    """Write ``out/stage-1`` ... and ``out/draft``; it is there completely or not at all.

    ``progress`` gets each folder's name and the bytes of its weights. ConfigError if ``out`` exists
    or the disk has too little room; ModelError if the model cannot be cut.
    """
    if directory.shard is not None:
        raise ModelError(f"{directory.path} is a shard itself; give the folder of the whole model")
    quantised = plan.dtype != AS_STORED and PRECISIONS[plan.dtype].quantised
    if quantised and any(of_all_experts(name) for name in directory.weight_files):
        raise ModelError(
            f"{directory.path} is a mixture with all experts in one tensor, which are not written "
            f"in {plan.dtype}; leave out --dtype, and start the workers with --dtype {plan.dtype}"
        )
    if directory.of_gguf and plan.dtype == AS_STORED:
        raise ModelError(
            "the model is a GGUF file, whose own types are not written; name the precision of the "
            "shards with --dtype, like int8 or int4"
        )
    shards = [
        _Shard(directory, plan, stage, block) for stage, block in enumerate(plan.blocks, start=1)
    ]
    shards.append(_Shard(directory, plan, 0, None))
    with new_folder(out, sum(shard.nbytes for shard in shards)) as made:
        values = directory.values()
        for shard in shards:
            shard.write(made / shard.folder, values)
            progress(shard.folder, shard.nbytes)


class _Shard:
    """One folder to be written; ``block`` None: that of scheduler and draft worker."""

    def __init__(
        self, directory: ModelDirectory, plan: ShardPlan, stage: int, block: range | None
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._stage = stage
        self._block = block
        self.folder = f"stage-{stage}" if block is not None else DRAFT_FOLDER
        if block is not None:
            self._prefixes = tensor_prefixes(directory, block)
        else:
            self._prefixes = ("model.embed_tokens.", "lm_head.") if plan.head else ()
        self._names = sorted(n for n in directory.weight_files if n.startswith(self._prefixes))
        self._linears: frozenset[str] = frozenset()
        if block is not None and plan.dtype != AS_STORED:
            self._linears = frozenset([*linear_names(directory, block), *self._experts()])
        self._tensors = [tensor for name in self._names for tensor in self._layout(name)]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def write(self, folder: Path, values: dict[str, str]) -> None:
        """Write the files and then the manifest; ``values``: of all groups of the model."""
        folder.mkdir()
        sums = {WEIGHTS: write_tensors(folder / WEIGHTS, self._tensors, self._chunks())}
        for source in self._texts():
            shutil.copyfile(source, folder / source.name)
            sums[source.name] = file_digest(folder / source.name)
        files = {
            name: ShardFile((folder / name).stat().st_size, digest)
            for name, digest in sorted(sums.items())
        }
        # Scheduler and draft worker speak for the whole model: they tell the stages its values.
        own = {
            group: digest
            for group, digest in values.items()
            if self._block is None or of_prefixes(group, self._prefixes)
        }
        block = self._block
        layers = "" if block is None else f"{block.start}-{block.stop}"
        stages = len(self._plan.blocks)
        Manifest(
            folder,
            self._directory.identity,
            own,
            self._stage,
            stages,
            layers,
            self._plan.dtype,
            files,
        ).write()

    def _texts(self) -> list[Path]:
        """The config, and for the draft worker the tokenizer's files."""
        return [
            file
            for file in sorted(self._directory.path.iterdir())
            if file.is_file()
            and file.suffix in _TEXT_SUFFIXES
            and not file.name.endswith((".index.json", GGUF_INDEX, MANIFEST))
            and (self._block is None or file.name in _CONFIG_FILES)
        ]

    def _layout(self, name: str) -> list[NewTensor]:
        entry = self._directory.tensor(name)
        if name not in self._linears:
            if entry.packed:
                return [NewTensor(name, "F32", entry.shape, 4 * math.prod(entry.shape))]
            return [NewTensor(name, entry.dtype, entry.shape, entry.end - entry.start)]
        quantised = PRECISIONS[self._plan.dtype].quantised
        layout = StoredWeight(self._directory, name).layout(self._held(entry.shape))
        return [
            NewTensor(name + suffix, _NAMES[dtype], shape, shape[0] * shape[1] * dtype.itemsize)
            for suffix, (dtype, shape) in zip(
                SUFFIXES if quantised else ("",),
                layout,
                strict=False,  # most matrices have no rows' scales
            )
        ]

    def _experts(self) -> Iterator[str]:
        """Matrices of experts, but those that come out even only beside another."""
        for name in filter(own_matrix, self._names):
            shape = self._directory.tensor(name).shape
            if self._held(shape) == self._held(read_as(name, shape)):
                yield name

    def _held(self, shape: tuple[int, ...]) -> str:
        """The precision that a matrix of ``shape`` is written in."""
        return PRECISIONS[self._plan.dtype].for_matrix(shape).name

    def _chunks(self) -> Iterator[memoryview]:
        for name in self._names:
            entry = self._directory.tensor(name)
            if name not in self._linears:
                yield from _stored(name, entry)
                continue
            stored = StoredWeight(self._directory, name)
            for tensor in stored.read(range(entry.shape[0]), self._held(entry.shape)).tensors:
                yield from _bytes(tensor)


def _stored(name: str, entry: TensorEntry) -> Iterator[memoryview]:
    """The bytes of a tensor; in float32 where a GGUF file has a type of its own."""
    if entry.packed:
        return _bytes(read_tensor(name, entry, torch.float32))
    return entry.chunks()


def _bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    yield memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
