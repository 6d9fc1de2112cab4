"""Prompts of a comparison with the peer, from one half of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowspec.cli.bench import prompts_in
from flowspec.errors import ConfigError
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import open_directory
from flowspec.rehearse.compare.prompts import halve
from ops.prompts import last_prompts

#: A draft may exceed the requested number of tokens by less than this.
SPARE = 64


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A user's ``text``, its ``ids`` in the chat template, and their text, ``rendered``.

    ``expected``: the target's own greedy text, up to its last whole character. ``repeated``: its
    share of repeated 4-grams. Both are unknown until the target has been run.
    """

    text: str
    ids: tuple[int, ...]
    rendered: str
    expected: str = ""
    repeated: float = 0.0


def chosen(file: Path, half: str, count: int, tokens: int, target: str) -> list[PeerPrompt]:
    """``count`` prompts of a half, evenly spaced, that leave room for ``tokens`` tokens.

    Of a folder the last of every file.

    ConfigError if that many do not fit.
    """
    directory = open_directory(target)
    tokenizer = Tokenizer(directory)
    token = tokenizer.detokenizer.token
    # What the tokenizer puts before every text, llama.cpp does too.
    put = 1 if token(tokenizer.encode("a", raw=True)[0]).special else 0
    found = []
    for prompt in halve(last_prompts(file) if file.is_dir() else prompts_in(file), half):
        ids = tokenizer.encode(prompt.text, raw=False)
        if len(ids) + tokens + SPARE <= directory.context:
            rendered = b"".join(token(one).data for one in ids[put:]).decode()
            found.append(PeerPrompt(prompt.text, ids, rendered))
    if not 1 <= count <= len(found):
        raise ConfigError(
            f"{count} {half} prompts are wanted: {file} has {len(found)} that fit in its {half} "
            f"half; expected 1 to {len(found)}"
        )
    stride = len(found) // count
    return found[stride // 2 :: stride][:count]
