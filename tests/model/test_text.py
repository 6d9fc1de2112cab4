"""Text is emitted in whole characters, and the pieces concatenate to the whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from flowspec.core.run.logprobs import TokenWritten
from flowspec.core.run.turns import Turn
from flowspec.errors import JobError
from flowspec.model.directory import open_directory
from flowspec.model.text import TextStream, Tokenizer, TokenWriter
from tests.marks import examples
from tests.pair import TARGET

TOKENIZER = Tokenizer(open_directory(TARGET))


def test_the_chat_template_applies_unless_raw() -> None:
    raw = TOKENIZER.encode("Why?", raw=True)
    chat = TOKENIZER.encode("Why?", raw=False)
    assert TOKENIZER.decode(list(raw)) == "Why?"
    assert TOKENIZER.decode(list(chat)) == "Question: Why?\nAnswer:"
    assert chat[0] == 0


def test_a_conversation_is_what_the_template_makes_of_it() -> None:
    turns = [Turn("user", "Why?"), Turn("assistant", "So."), Turn("user", "How?")]
    ids = TOKENIZER.encode_turns(turns)
    text = "Question: Why?\nAnswer: So.\n\nQuestion: How?\nAnswer:"
    assert TOKENIZER.decode(list(ids)) == text
    assert ids == TOKENIZER.encode(f"<s>{text}", raw=True)[-len(ids) :]
    assert TOKENIZER.encode_turns(turns[:1]) == TOKENIZER.encode("Why?", raw=False)


def with_template(folder: Path, template: str | None) -> Tokenizer:
    """The target's tokenizer with another chat template; None: without one."""
    copy = folder / "target"
    shutil.copytree(TARGET, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / "chat_template.jinja").unlink()
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    return Tokenizer(open_directory(str(copy)))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "the model has no chat template"),
        ("{{ raise_exception('roles must\nalternate') }}", "refuses the messages: roles must alt"),
        ("{{ messages[0]['content'] * 5000000 }}", "makes 5000000 characters"),
        ("{{ nothing.at.all }}", "refuses the messages: 'nothing' is undefined"),
        ("{% for x in %}", "chat template, in its chat_template.jinja, is broken: Expected an"),
    ],
)
def test_a_template_that_cannot_serve_says_so_in_one_line(
    tmp_path: Path, template: str | None, says: str
) -> None:
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.has_chat_template == (template is not None)
    with pytest.raises(JobError) as refused:
        tokenizer.encode_turns([Turn("user", "a")])
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text(min_size=1, max_size=40), st.data())
@settings(deadline=None, max_examples=examples(150))
def test_pieces_join_to_the_whole_and_break_no_character(text: str, data: st.DataObject) -> None:
    ids = TOKENIZER.encode(text, raw=True)
    stream = TextStream(TOKENIZER)
    pieces = []
    at = 0
    while at < len(ids):
        step = data.draw(st.integers(1, 4))
        pieces.append(stream.push(ids[at : at + step], last=at + step >= len(ids)))
        at += step
    assert "".join(pieces) == TOKENIZER.decode(list(ids))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) or "\N{REPLACEMENT CHARACTER}" in text


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "🙂🙃", "mixed ü 日 🙂 end"])
def test_one_id_at_a_time(text: str) -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.push((token,)) for token in TOKENIZER.encode(text, raw=True)]
    assert "".join(pieces) + stream.push((), last=True) == text


def test_a_broken_character_at_the_end_is_not_lost() -> None:
    ids = TOKENIZER.encode("日", raw=True)
    stream = TextStream(TOKENIZER)
    assert stream.push(ids[:-1]) == ""
    assert stream.push((), last=True) == "\N{REPLACEMENT CHARACTER}"


def sentence_piece() -> TokenWriter:
    """A writer for a vocabulary of pieces with spaces, bytes and a first space, as Llama 2 has."""
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
        f"<0x{byte:02X}>": 3 + byte for byte in range(256)
    }
    pieces |= {"\N{LOWER ONE EIGHTH BLOCK}so": 259, "la": 260}
    backend = tokenizers.Tokenizer(models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TokenWriter(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


@given(st.text(max_size=30))
def test_the_bytes_of_a_texts_tokens_are_the_texts(text: str) -> None:
    ids = TOKENIZER.encode(text, raw=True)
    written = [TOKENIZER.token(token) for token in ids]
    joined = b"".join(one.data for one in written if not one.special)
    decoded = TOKENIZER.decode(list(ids))
    assert joined.decode() == decoded


def test_a_special_token_says_so_and_an_unknown_one_is_nothing() -> None:
    assert TOKENIZER.token(1) == TokenWritten(b"</s>", special=True)
    assert TOKENIZER.token(1 << 20) == TokenWritten(b"")


def test_pieces_with_spaces_and_bytes() -> None:
    writer = sentence_piece()
    assert [writer.write(token).data for token in (259, 260, 3 + 0xF0, 3 + 0x20)] == [
        *(b" so", b"la", b"\xf0", b" ")
    ]
    assert writer.write(2) == TokenWritten(b"</s>", special=True)
