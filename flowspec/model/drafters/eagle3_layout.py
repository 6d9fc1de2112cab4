"""The published layouts of EAGLE-3 heads, read from config and headers alone. Needs no torch.

Two dialects hold the same head. The authors' has its one decoder layer under ``midlayer.``, with
the layer's shape at the top of the config. That of ``speculators`` has it under ``layers.0.``, with
the shape in ``transformer_layer_config`` (``directory.flattened`` moves it up). Anything else that
a config or a checkpoint asks for is refused, since a head that is computed differently than it
was trained drafts badly without any other sign.

The tapped layers are those of docs/algorithms.md#taps: layers 2, n/2 and n-3 of n unless the config
names others. At the top of a config an id is the layer whose input is read (vLLM, speculators), in
``eagle_config`` the one whose output is (SGLang).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.errors import ModelError
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory

FC = "fc.weight"
LM_HEAD = "lm_head.weight"
NORM = "norm.weight"
EMBEDDING = "embed_tokens.weight"
OFFSETS = "d2t"

_PREFIXES = ("midlayer.", "layers.0.")
_MARK = "hidden_norm.weight"
_LAYER = frozenset(
    {
        *(f"{name}.weight" for name in ("input_layernorm", "hidden_norm")),
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
)
_NEEDED = frozenset({FC, LM_HEAD, NORM})
#: ``t2d`` marks the target's tokens that the head has; ``d2t`` says the same.
_OPTIONAL = frozenset({EMBEDDING, OFFSETS, "t2d"})
#: The config's key for the tapped layers.
TAPPED = "eagle_aux_hidden_state_layer_ids"
#: Switches of a config, at its top or in ``eagle_config``, and the values of heads that are read.
_SWITCHES: Mapping[str, Any] = {
    "attention_bias": False,
    "fc_norm": False,
    "logit_scale": 1,
    "mlp_bias": False,
    "model_type": "llama",
    "next_layer_regular": True,
    "norm_before_fc": False,
    "norm_output": False,
    "num_hidden_layers": 1,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "use_sliding_window": False,
}
_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Eagle3Layout:
    """What is in the folder of an EAGLE-3 head.

    ``layer``: prefix of its decoder layer's tensors. ``vocabulary``: tokens it can propose.
    ``mapped``: they are fewer than the target's, and ``d2t`` says which. ``normed``: the residual
    is the row after ``hidden_norm``. ``embeds``: it has an embedding of its own.
    """

    taps: Taps
    layer: str
    vocabulary: int
    mapped: bool
    normed: bool
    embeds: bool


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers that a head reads in a target of ``layers`` if its config names none."""
    return 2, layers // 2, layers - 3


def is_eagle3(directory: ModelDirectory) -> bool:
    """Whether the directory holds an EAGLE-3 head, in either dialect."""
    return FC in directory.weight_files and bool(_prefix(directory))


def read_layout(head: ModelDirectory, target: ModelDirectory) -> Eagle3Layout:
    """The layout of ``head`` for ``target``; ModelError if it is another target's or not known."""
    config = head.config
    layer = _prefix(head)
    _check_tensors(head, layer)
    _check_switches(head)
    wide = config.get("target_hidden_size") or head.hidden_size
    if wide != target.hidden_size or head.vocabulary != target.vocabulary:
        raise ModelError(
            f"the head in {head.path} is for a target of hidden size {wide} and {head.vocabulary} "
            f"tokens, the target has {target.hidden_size} and {target.vocabulary}; a head serves "
            "only the target it was trained for"
        )
    names = head.weight_files
    if EMBEDDING not in names and head.hidden_size != wide:
        raise ModelError(
            f"{head.path} has hidden size {head.hidden_size}, the target {wide}, and no "
            f"{EMBEDDING} of its own: it is incomplete"
        )
    layers = _tapped(head, target.layers)
    joined = head.tensor(FC).shape
    if joined != (head.hidden_size, len(layers) * wide):
        raise ModelError(
            f"{head.path}: {FC} has shape {joined}; expected "
            f"{(head.hidden_size, len(layers) * wide)} for the tapped layers {list(layers)}"
        )
    vocabulary = head.tensor(LM_HEAD).shape[0]
    if config.get("draft_vocab_size") not in (None, vocabulary):
        raise ModelError(
            f"{head.path}: draft_vocab_size is {config['draft_vocab_size']}, and {LM_HEAD} has "
            f"{vocabulary} rows; download the head again"
        )
    mapped = vocabulary != head.vocabulary
    if mapped and OFFSETS not in names:
        raise ModelError(
            f"{head.path} proposes {vocabulary} of {head.vocabulary} tokens, and has no tensor "
            f"{OFFSETS} that says which: it is incomplete"
        )
    return Eagle3Layout(
        Taps(str(head.path), FC, layers, head.hidden_size),
        layer,
        vocabulary,
        mapped,
        bool(config.get("norm_before_residual", False)),
        EMBEDDING in names,
    )


def _prefix(directory: ModelDirectory) -> str:
    """The prefix of the decoder layer's tensors; empty: it is no EAGLE-3 head."""
    return next((one for one in _PREFIXES if one + _MARK in directory.weight_files), "")


def _check_tensors(head: ModelDirectory, layer: str) -> None:
    needed = {*_NEEDED, *(layer + name for name in _LAYER)}
    strange = sorted(set(head.weight_files) - needed - _OPTIONAL)
    if strange:
        raise ModelError(
            f"{head.path} has the tensor {strange[0]}, which no known layout of an EAGLE-3 head "
            "has: such heads are not read"
        )
    for name in sorted(needed):
        head.tensor(name)


def _check_switches(head: ModelDirectory) -> None:
    config = head.config
    nested = config.get("eagle_config")
    asked = {**config, **(nested if isinstance(nested, Mapping) else {})}
    for name, known in _SWITCHES.items():
        if asked.get(name) is not None and asked[name] != known:
            raise ModelError(
                f"{head.path}: {name} is {asked[name]!r}; of EAGLE-3 heads only those with "
                f"{known!r} are read"
            )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPES:
        raise ModelError(
            f"{head.path} has rotary embeddings of type {kind}; of EAGLE-3 heads those of type "
            f"{', '.join(_ROPES)} are read"
        )


def _tapped(head: ModelDirectory, layers: int) -> tuple[int, ...]:
    """The layers of a target of ``layers`` whose input the head reads."""
    config = head.config
    nested = config.get("eagle_config")
    given = config.get(TAPPED)
    if not given and isinstance(nested, Mapping):
        given = [int(layer) + 1 for layer in nested.get(TAPPED) or ()]
    found = tuple(map(int, given)) if given else default_taps(layers)
    if list(found) != sorted(set(found)) or found[0] < 0 or found[-1] > layers:
        raise ModelError(
            f"{head.path} reads the layers {list(found)} of a target of {layers} layers; expected "
            f"ascending numbers from 0 to {layers} in {TAPPED}"
        )
    return found
