"""Loading a tokenizer, and whether two make the same ids of the same texts. Needs no torch."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowspec.errors import ModelError, installs

#: The package that reads tokenizers of pieces, tokenizer.model.
_PIECES = "sentencepiece"
#: What a tokenizer is made of: tokens may be added to it in each.
_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
#: Texts in which normalisers and pre-tokenizers differ: case, accents, digits, spaces, line ends,
#: contractions, scripts without spaces, emoji, combining marks, code, bytes that no word has.
PROBES = (
    "The quick brown Fox JUMPS over the lazy dogs.",
    " leading space, two  spaces,   three; trailing \t",
    "I'm sure they'll say it's DON'T; we've re-read ‘it’",
    "1234567890 3.14159 1,000,000 0x1F 12e-3",
    "line\none\r\n\n\ttwo\n\n\n    three\n",
    "naïve café café Ångström Å ﬁ",
    "日本語のテキスト、中文，한국어",
    "ключ κλειδί مفتاح מפתח กุญแจ",
    "🙂🙃 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u00a0\u2003\u200b|\ufffd\x00\x7f",
    "def f(x):\n    return x**2 != -1  # <b>&amp;</b> {'a': [1, 2]}\n",
    "https://example.org/a_b-c?d=%20&e=f#g user@example.org",
)
#: How many characters are compared in one text.
_AT_ONCE = 256


def difference(one: Path, other: Path) -> str:
    """In what the tokenizers of two models' folders differ, in words; empty: in nothing.

    They agree if they have the same tokens with the same ids, merged or chosen by the same rules,
    and make the same ids of ``PROBES``, of every character inside a word, and of their added tokens
    beside words: the same tokenizer may be written in several ways. ModelError if one cannot be
    read.
    """
    if all(_bytes(one / name) == _bytes(other / name) for name in _FILES):
        return ""
    mine, theirs = map(_read, (one, other))
    for tokenizer in (mine, theirs):  # both are asked for, not a property of texts
        tokenizer.no_padding()
        tokenizer.no_truncation()
    tokens, others = mine.get_vocab(), theirs.get_vocab()
    if tokens != others:
        differing = {key for key, _ in tokens.items() ^ others.items()}
        first = min(differing, key=lambda token: (tokens.get(token, others.get(token)), token))
        return (
            f"{len(differing)} tokens differ, the first of them {first!r} "
            f"({_id(tokens, first)} of the target, {_id(others, first)} of the other)"
        )
    rules, others = _rules(mine), _rules(theirs)
    for name, rule in rules.items():
        if rule != others[name]:
            return f"they differ in {name}"
    added = _added(mine)
    for token in sorted(added ^ _added(theirs)):
        return f"{token!r} is an added token of one of them"
    for text in (*PROBES, *(beside.join(sorted(added)) for beside in (" a ", "a")), *_words()):
        if _ids(mine, text) != _ids(theirs, text):
            words = (one for one in text.split(" ") if _ids(mine, one) != _ids(theirs, one))
            return f"they make other ids of {next(words, text)!r}"
    return ""


def _words() -> Iterator[str]:
    """Texts of words around every character that Unicode has."""
    for first in range(0, sys.maxunicode, _AT_ONCE):
        block = map(chr, range(first, first + _AT_ONCE))
        known = [one for one in block if unicodedata.category(one) not in {"Cn", "Co", "Cs"}]
        if known:
            yield " ".join(f"a{one}b" for one in known)


def _id(tokens: dict[str, int], token: str) -> str:
    return f"id {tokens[token]}" if token in tokens else "no token"


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _added(tokenizer: Any) -> set[str]:
    return {one.content for one in tokenizer.get_added_tokens_decoder().values()}


def _rules(tokenizer: Any) -> dict[str, object]:
    """What decides which of its tokens a word becomes."""
    model = json.loads(tokenizer.to_str())["model"]
    scored = isinstance(model.get("vocab"), list)
    return {
        "the order in which tokens are merged": model.get("merges"),
        "whether tokens are words that are not merged": model.get("ignore_merges"),
        "how many merges are left out": model.get("dropout"),
        "the scores of their tokens": model["vocab"] if scored else None,
    }


def check_pieces(folder: Path) -> None:
    """ModelError if the tokenizer in ``folder`` is SentencePiece's alone and nothing reads it."""
    alone = (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file()
    if alone and find_spec(_PIECES) is None:
        raise ModelError(
            f"{folder} has its tokenizer as tokenizer.model alone, which takes the package "
            f"{_PIECES}: {installs(_PIECES)}"
        )


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _read(folder: Path) -> Any:
    backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"the tokenizer in {folder} has no tokenizer.json to compare; save it")
    return backend


def load_tokenizer(folder: Path) -> Any:
    """The library's tokenizer of the model in ``folder``; ModelError if it cannot be loaded."""
    from transformers import AutoTokenizer

    check_pieces(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from None
