"""What a block drafter's folder says: block, mask token, layers that it taps. Needs no torch.

Two published layouts are read. DFlash's (arXiv 2602.06036; github.com/z-lab/dflash at 44947fb) has
no embedding and no LM head, and a masked row proposes for its own position. DeepSpec's
(github.com/deepseek-ai/DeepSpec at afdfa7c) has both, and a row proposes for the position after it.
The layers are Qwen3's in both, whatever the target's family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.errors import ModelError
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory

#: The matrix that maps the tapped rows of a token, side by side, to one row.
FC = "fc.weight"
EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
#: Class names in configs.
_DFLASH = "DFlashDraftModel"
_DEEPSPEC = "Qwen3DSparkModel"
_SETTINGS = "dflash_config"
#: What the settings may hold; False: only a value that is false is understood.
_KNOWN = {
    "mask_token_id": True,
    "target_layer_ids": True,
    "block_size": True,
    "num_target_layers": True,
    "causal": False,
    "use_swa": False,
}
#: Top-level keys that change what the layers compute, and are understood only if false.
_MUST_BE_FALSE = ("is_causal", "markov_rank", "add_swa_attention_sink_bias")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """``levels``: positions that one block proposes for. ``mask``: id of the token of a masked row.

    ``layers``: the target's layers whose output rows ``fc`` reads, in the order of its columns.
    ``predicts_next``: a row proposes for the position after its own, so that a block has one masked
    row less than levels.
    """

    levels: int
    mask: int
    layers: tuple[int, ...]
    predicts_next: bool

    @property
    def masks(self) -> int:
        """Masked rows of a block."""
        return self.levels - self.predicts_next


def is_block_drafter(directory: ModelDirectory) -> bool:
    """Whether the directory holds a block drafter instead of a head or a language model."""
    config = directory.config
    return _SETTINGS in config or {"block_size", "mask_token_id"} <= config.keys()


def check_block_drafter(drafter: ModelDirectory, target: ModelDirectory) -> BlockLayout:
    """The layout of ``drafter``; ModelError unless it is understood and fits ``target``."""
    layout = read_layout(drafter)
    where = drafter.path
    if drafter.hidden_size != target.hidden_size:
        raise ModelError(
            f"the block drafter in {where} has hidden size {drafter.hidden_size}, the target "
            f"{target.hidden_size}; it serves only the target it was trained for"
        )
    trained = _settings(drafter).get("num_target_layers", drafter.config.get("num_target_layers"))
    if trained is not None and trained != target.layers:
        raise ModelError(
            f"the block drafter in {where} is for a target of {trained} layers, and this one has "
            f"{target.layers}; it serves only the target it was trained for"
        )
    if max(layout.layers) >= target.layers - 1:
        raise ModelError(
            f"the block drafter in {where} taps layer {max(layout.layers)}; expected layers below "
            f"the target's last, {target.layers - 1}"
        )
    if not 0 <= layout.mask < target.vocabulary:
        raise ModelError(
            f"the block drafter in {where} has mask token {layout.mask}; the target's vocabulary "
            f"ends at {target.vocabulary - 1}"
        )
    return layout


def block_taps(drafter: ModelDirectory, target: ModelDirectory) -> Taps:
    """What ``drafter`` reads inside ``target``; errors as above."""
    layout = check_block_drafter(drafter, target)
    after = tuple(layer + 1 for layer in layout.layers)  # taps are named by the layer they enter
    return Taps(str(drafter.path), FC, after, drafter.hidden_size)


def read_layout(drafter: ModelDirectory) -> BlockLayout:
    """The layout; ModelError if the config has anything that is not understood here."""
    config = drafter.config
    settings = _settings(drafter)
    kind = _kind(drafter)
    _check_switches(drafter, settings)
    block = _whole(drafter, "block_size", settings, least=2 if kind == _DFLASH else 1)
    layers = settings.get("target_layer_ids", config.get("target_layer_ids"))
    if layers is None and kind == _DFLASH:
        count = _whole(drafter, "num_target_layers", settings, least=4)
        layers = spread_layers(count, drafter.layers)
    rising = isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)
    if not rising or not layers or min(layers) < 0 or len(set(layers)) != len(layers):
        raise ModelError(
            f"{drafter.path}: target_layer_ids is {layers}; expected different layers from 0"
        )
    return BlockLayout(
        levels=block - (kind == _DFLASH),
        mask=_whole(drafter, "mask_token_id", settings, least=0),
        layers=tuple(layers),
        predicts_next=kind == _DEEPSPEC,
    )


def spread_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """The layers that DFlash taps where its config names none: ``count``, evenly spread."""
    if count == 1:
        return (target_layers // 2,)
    first, last = 1, target_layers - 3
    return tuple(round(first + at * (last - first) / (count - 1)) for at in range(count))


def _settings(drafter: ModelDirectory) -> Mapping[str, Any]:
    found = drafter.config.get(_SETTINGS) or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"{drafter.path}: {_SETTINGS} is no table of settings")
    return found


def _kind(drafter: ModelDirectory) -> str:
    named = drafter.config.get("architectures") or []
    known = [name for name in named if name in (_DFLASH, _DEEPSPEC)]
    if len(named) != 1 or not known or drafter.config.get("model_type") != "qwen3":
        raise ModelError(
            f"the block drafter in {drafter.path} is a "
            f"{', '.join(map(str, named)) or 'model without a class'} of type "
            f"{drafter.config.get('model_type')}; understood are {_DFLASH} and {_DEEPSPEC} of "
            "type qwen3"
        )
    return str(known[0])


def _check_switches(drafter: ModelDirectory, settings: Mapping[str, Any]) -> None:
    """ModelError if a setting changes the computation in a way that is not understood here."""
    config = drafter.config
    strange = [name for name, value in settings.items() if value and not _KNOWN.get(name)]
    strange += [name for name in _MUST_BE_FALSE if config.get(name)]
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if strange or kinds:
        raise ModelError(
            f"the block drafter in {drafter.path} has {', '.join([*strange, *sorted(kinds)])}, "
            "which is not understood here"
        )
    wide = config.get("target_hidden_size")
    if wide is not None and wide != drafter.hidden_size:
        raise ModelError(
            f"the block drafter in {drafter.path} reads rows of {wide} values with a hidden size "
            f"of {drafter.hidden_size}, which is not understood here"
        )


def _whole(drafter: ModelDirectory, name: str, settings: Mapping[str, Any], *, least: int) -> int:
    value = settings.get(name, drafter.config.get(name))
    if type(value) is not int or value < least:
        raise ModelError(
            f"{drafter.path}: {name} is {value}; expected a whole number from {least} on"
        )
    return value
