"""Checkpoints in formats that are not read, and how to convert them. Needs no torch.

Only safetensors of floating-point numbers are read, experts in mxfp4, and GGUF files
(``gguf.py``). The commands were tried with the library's version that the tests run with.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes

#: ``quant_method`` of checkpoints that are read as they are.
_READ = ("mxfp4",)
#: The config of a language model inside that of one with images or sound.
_TEXT_CONFIG = "text_config"
#: Types that encode texts, or encode one and decode another; none of them continues its input.
_NO_DECODERS = frozenset(
    [
        "albert",
        "bart",
        "bert",
        "camembert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "longformer",
        "longt5",
        "marian",
        "mbart",
        "modernbert",
        "mpnet",
        "mt5",
        "nllb-moe",
        "pegasus",
        "roberta",
        "switch_transformers",
        "t5",
        "umt5",
        "whisper",
        "xlm-roberta",
        "xlm-roberta-xl",
    ]
)
#: What names the library's language models, in a file that is read without importing torch.
_NAMES, _NAMING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", ("models", "auto", "modeling_auto.py")
_TORCH_FILE = "pytorch_model.bin"
_SAFE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """``what`` is wrong with a checkpoint, and how to ``remedy`` it; each without a full stop."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def of_folder(folder: Path) -> Unreadable | None:
    """What is wrong with the format of a folder's weights files; None: nothing, or no weights."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if found:
        return Unreadable(f"{folder} holds a GGUF file", f"give the file itself: {found[0]}")
    if any(folder.glob("pytorch_model*.bin")):
        return Unreadable(
            f"{folder} holds weights in torch's own format (.bin), which may run code; "
            "only safetensors are read",
            _convert_head(folder) if _is_draft_head(folder) else _convert(folder),
        )
    torch_files = sorted(file.name for kind in ("*.pth", "*.pt") for file in folder.glob(kind))
    if torch_files:
        return Unreadable(
            f"{folder} holds {torch_files[0]}, weights in their authors' own layout",
            "take the checkpoint in the Hugging Face layout, with config.json and *.safetensors",
        )
    return None


def of_family(folder: Path, config: Mapping[str, Any]) -> Unreadable | None:
    """What is wrong with a language model's type; None: the library has it, or does not say."""
    known, kind = library_types(), str(config.get("model_type"))
    if not known or kind in known:
        return None
    return Unreadable(
        f"{folder} is a model of type {kind!r}, and the installed transformers has no language "
        "model of that type",
        "install a version that has it, or take another model",
    )


@cache
def library_types() -> frozenset[str]:
    """Types of the installed library's language models; empty if it keeps their names elsewhere."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    file = Path(spec.origin).parent.joinpath(*_NAMING)
    if not file.is_file():
        return frozenset()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List(elts=pairs)])
            ) if name == _NAMES:
                return frozenset(ast.literal_eval(pair)[0] for pair in pairs)
    return frozenset()


def of_template(folder: Path) -> Unreadable | None:
    """What is wrong with the grammar of a chat template.

    None: nothing, or nothing that can be told without the library, which has tags of its own.
    """
    from jinja2 import TemplateSyntaxError

    file = folder / template_file(folder)
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            text = json.loads(text).get("chat_template")
        if isinstance(text, str):
            parsed_template(text)
    except TemplateSyntaxError as error:
        if "unknown tag" not in str(error):
            return Unreadable(
                f"the chat template in {file} is broken, in line {error.lineno}: "
                f"{' '.join(str(error.message).split()).rstrip('.')}",
                "correct it, or take it out to send prompts as they are",
            )
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # whoever runs it, or reads the tokenizer, says so
    return None


def template_file(folder: Path) -> str:
    """Where the chat template is, as the library looks for it."""
    if (folder / "chat_template.jinja").is_file():
        return "chat_template.jinja"
    name = "additional_chat_templates"
    return name if (folder / name).is_dir() else "tokenizer_config.json"


def parsed_template(text: str) -> nodes.Template:
    """A chat template; TemplateSyntaxError, also at tags of the library's own, RecursionError."""
    from jinja2 import Environment  # most commands open models and parse no template

    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)


def of_config(folder: Path, config: Mapping[str, Any]) -> Unreadable | None:
    """What is wrong with the model that ``config`` describes; None: nothing of this kind."""
    if config.get("is_encoder_decoder") or config.get("model_type") in _NO_DECODERS:
        return Unreadable(
            f"{folder} is a model of type {config.get('model_type')}, which has an encoder",
            "take a decoder-only language model, such as Llama, Qwen or Mistral",
        )
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        return _quantised(folder, str(quantised.get("quant_method") or "unnamed"))
    if isinstance(config.get(_TEXT_CONFIG), Mapping) and "num_hidden_layers" not in config:
        kind = config[_TEXT_CONFIG].get("model_type", "language")
        return Unreadable(
            f"{folder} is a {config.get('model_type')} model, a {kind} model with other inputs "
            "than text",
            _extract(folder),
        )
    return None


def _quantised(folder: Path, method: str) -> Unreadable | None:
    if method in _READ:
        return None
    return Unreadable(
        f"{folder} holds weights quantised by {method}, which are not read",
        "take the original checkpoint that it was made from, and quantise it while loading with "
        "--dtype nf4, int4 or int8",
    )


def _convert(folder: Path) -> str:
    given = f"{str(folder)!r}"
    return _python(
        f"t.AutoModelForCausalLM.from_pretrained({given}, dtype='auto').save_pretrained('NEW')",
        f"t.AutoTokenizer.from_pretrained({given}).save_pretrained('NEW')",
    )


def _is_draft_head(folder: Path) -> bool:
    """Whether the config is one of a draft head, which the library has no class for."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    return "draft_vocab_size" in config or "eagle" in str(config.get("architectures")).lower()


def _convert_head(folder: Path) -> str:
    read = f"w = torch.load({str(folder / _TORCH_FILE)!r}, weights_only=True)"
    kept = "{k: v.contiguous() for k, v in w.items()}"
    write = f"s.save_file({kept}, {str(folder / _SAFE_FILE)!r})"
    code = "; ".join(("import torch, safetensors.torch as s", read, write))
    return f'python -c "{code}" writes safetensors beside it'


def _extract(folder: Path) -> str:
    """The command that writes the language model inside a larger one."""
    given = f"{str(folder)!r}"
    return _python(
        f"m = t.AutoModelForImageTextToText.from_pretrained({given}, dtype='auto')",
        "n = t.AutoModelForCausalLM.from_config(m.config.text_config, dtype=m.dtype)",
        "n.model = m.model.language_model",
        "n.lm_head = m.lm_head",
        "n.save_pretrained('NEW')",
        f"t.AutoTokenizer.from_pretrained({given}).save_pretrained('NEW')",
    )


def _python(*statements: str) -> str:
    """The command of ``statements`` on the library, ``t``, which write to the folder NEW."""
    code = "; ".join(("import transformers as t", *statements))
    return f'python -c "{code}" writes one that is read to the folder NEW'
