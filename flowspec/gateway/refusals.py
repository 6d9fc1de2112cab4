"""Fields that would change the answer and are not served: each is refused by its name.

A value that asks for nothing, such as a penalty of 0, is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowspec.gateway.errors import refused
from flowspec.gateway.schema import ApiRequest

_NO_TOOLS = "this gateway serves no tools"
_NO_SHAPE = "this gateway does not force an answer into a form"
_NO_PENALTIES = "the choice of tokens cannot be penalised here"
_TEXT_ONLY = "this gateway takes and gives text alone"
_NO_END = "an answer ends at the model's end of text, a stop string or the number of tokens"
_NO_TEMPLATE = "conversations are written by the model's own chat template, up to the answer"

#: By field: the values that ask for nothing, beside null, and why any other is refused.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "web_search_options": ((), _NO_TOOLS),
    "response_format": (({"type": "text"},), _NO_SHAPE),
    "guided_json": ((), _NO_SHAPE),
    "guided_regex": ((), _NO_SHAPE),
    "guided_choice": (([],), _NO_SHAPE),
    "guided_grammar": ((), _NO_SHAPE),
    "structured_outputs": (({},), _NO_SHAPE),
    "logit_bias": (({},), "the target's logits are not changed here"),
    "presence_penalty": ((0,), _NO_PENALTIES),
    "frequency_penalty": ((0,), _NO_PENALTIES),
    "repetition_penalty": ((1,), _NO_PENALTIES),
    "length_penalty": ((1,), _NO_PENALTIES),
    "bad_words": (([],), _NO_PENALTIES),
    "min_p": ((0,), "the smallest share of a token cannot be set here; use top_p or top_k"),
    "prompt_logprobs": ((), "log-probabilities are those of the answer's tokens alone"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "the draft worker guesses the answer itself"),
    "use_beam_search": ((False,), "there is no beam search"),
    "best_of": ((1,), "all answers are returned, not the best of several; use n"),
    "echo": ((False,), "an answer does not repeat its prompt"),
    "suffix": (("",), "text cannot be inserted before a suffix"),
    "min_tokens": ((0,), _NO_END),
    "ignore_eos": ((False,), _NO_END),
    "stop_token_ids": (([],), _NO_END),
    "include_stop_str_in_output": ((False,), "an answer ends before its stop string"),
    "chat_template": ((), _NO_TEMPLATE),
    "chat_template_kwargs": (({},), _NO_TEMPLATE),
    "add_generation_prompt": ((True,), _NO_TEMPLATE),
    "continue_final_message": ((False,), _NO_TEMPLATE),
    "add_special_tokens": ((True,), "a prompt gets the tokens that the model's tokenizer adds"),
}
#: The field that says with "none" that another one is not to be used.
_UNUSED_BY = {"tools": "tool_choice", "functions": "function_call"}
#: What a field of a message asks for.
REFUSED_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
}
_HEADER_NAME = re.compile(r"[\w.-]{1,40}", re.ASCII)
_MOST_NAMED = 20


def check_refused(request: ApiRequest) -> None:
    """An error that names the first field of ``request`` that is not served."""
    given = request.model_extra or {}
    for name, value in given.items():
        is_unused = name in _UNUSED_BY and given.get(_UNUSED_BY[name]) == "none"
        if name not in REFUSED or value is None or is_unused:
            continue
        neutral, why = REFUSED[name]
        if not any(type(value) is type(known) and value == known for known in _wide(neutral)):
            raise refused(f"{name} is not supported: {why}", name, "unsupported_parameter")


def _wide(neutral: Iterable[Any]) -> list[Any]:
    """``neutral`` with whole numbers as floats, too."""
    numbers = [float(known) for known in neutral if type(known) is int]
    return [*neutral, *numbers]


def ignored_fields(request: ApiRequest) -> str:
    """The names of fields that had no effect, for a header; empty: there are none."""
    names = dict.fromkeys(
        name for name in _unknown(request, "", REFUSED) if _HEADER_NAME.fullmatch(name)
    )
    return ", ".join(list(names)[:_MOST_NAMED])


def _unknown(part: object, within: str, refused_here: Iterable[str]) -> Iterator[str]:
    """Names of the fields of ``part`` of a request that are neither read nor refused."""
    if isinstance(part, list):
        for one in part:
            yield from _unknown(one, within, refused_here)
    elif isinstance(part, ApiRequest):
        for name in part.model_extra or {}:
            if name not in refused_here:
                yield within + name
        for name in type(part).model_fields:
            refused_below = REFUSED_IN_MESSAGES if name == "messages" else ()
            yield from _unknown(getattr(part, name), f"{within}{name}.", refused_below)
