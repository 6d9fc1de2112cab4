"""Job fields: every one round-trips, every wrong one gets one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.run.fields import FIELDS
from flowspec.core.run.sampling import MAX_SEED, Sampling
from flowspec.core.run.spec import JobOptions, JobSpec, job_spec, parse
from flowspec.core.run.turns import Turn
from flowspec.errors import JobError

SPECS = st.builds(
    JobSpec,
    prompt=st.text(min_size=1).filter(str.strip),
    max_new_tokens=st.integers(1, 1000),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 10),
        top_k=st.integers(0, 100),
        top_p=st.floats(0.01, 1),
        seed=st.integers(0, MAX_SEED),
    ),
    strategy=st.sampled_from(["flowspec", "naive_pp", "flowspec:merge=off"]),
    idempotency_key=st.text(st.characters(codec="ascii", min_codepoint=33), max_size=10),
    raw=st.booleans(),
    record=st.booleans(),
)


@given(SPECS)
def test_fields_round_trip(spec: JobSpec) -> None:
    assert parse(spec.fields()) == spec


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_prompt_ids_round_trip(ids: list[int]) -> None:
    spec = JobSpec(prompt_ids=tuple(ids))
    assert parse(spec.fields()) == spec


def test_priority_and_wait_round_trip() -> None:
    spec = JobSpec("a", priority=-3, wait_seconds=2.5)
    assert parse(spec.fields()) == spec
    assert "priority" not in JobSpec("a").fields()


def test_messages_and_tokenize_round_trip() -> None:
    turns = (Turn("system", "be brief"), Turn("user", "why, \N{SNOWMAN}?"), Turn("assistant", ""))
    spec = JobSpec(messages=turns, tokenize=True)
    assert parse(spec.fields()) == spec


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": "[]"}, "messages is empty"),
        ({"messages": '[{"role": "user", "content": "a"}]', "prompt": "b"}, "leave out one"),
        ({"messages": '[{"role": "user", "content": "a"}]', "raw": "1"}, "need the chat template"),
        ({"tokenize": "2", "prompt": "a"}, "tokenize is '2'; expected 0 or 1"),
        ({"priority": "1.5", "prompt": "a"}, "priority is '1.5'; expected a whole number"),
        ({"priority": "101", "prompt": "a"}, "priority is 101; expected -100 to 100"),
        ({"wait_seconds": "nan", "prompt": "a"}, "wait_seconds is nan; expected 0 to 86400"),
        ({"wait_seconds": "soon", "prompt": "a"}, "wait_seconds is 'soon'; expected a number"),
        ({}, "either 'prompt' or 'prompt_ids'"),
        ({"prompt": "a", "prompt_ids": "[1]"}, "leave out one of them"),
        ({"prompt": "  \n"}, "empty"),
        ({"prompt": "a" * (2 << 20)}, "longer than"),
        ({"prompt_ids": "[]"}, "at least one token id"),
        ({"prompt_ids": "[-1]"}, "none negative"),
        ({"prompt_ids": "1 2"}, "a list of token ids"),
        ({"prompt_ids": '["1"]'}, "a list of token ids"),
        ({"prompt_ids": "[1.5]"}, "a list of token ids"),
        ({"prompt_ids": "[" * 100_000}, "a list of token ids"),
        ({"prompt_ids": "[" + "1," * (1 << 19) + "1]"}, "longer than"),
        ({"prompt": "half \ud800"}, "not valid Unicode"),
        ({"prompt": "a", "strategy": "x" * 2000}, "strategy is longer than 1024 bytes"),
        (
            {"prompt": "a", "idempotency_key": "k" * 2000},
            "idempotency_key is longer than 1024 bytes",
        ),
        ({"prompt": "a", "top_k": str(1 << 70)}, "top_k is 11805916207"),
        ({"prompt": "a", "max_new_tokens": "0"}, "max_new_tokens is 0"),
        ({"prompt": "a", "max_new_tokens": "-3"}, "max_new_tokens is -3"),
        ({"prompt": "a", "max_new_tokens": "ten"}, "expected a whole number"),
        ({"prompt": "a", "temperature": "-1"}, "temperature is -1"),
        ({"prompt": "a", "temperature": "nan"}, "temperature is nan"),
        ({"prompt": "a", "temperature": "hot"}, "expected a number"),
        ({"prompt": "a", "top_p": "2"}, "top_p is 2"),
        ({"prompt": "a", "top_k": "-1"}, "top_k is -1"),
        ({"prompt": "a", "seed": "-1"}, "seed is -1"),
        ({"prompt": "a", "raw": "maybe"}, "expected 0 or 1"),
        ({"prompt": "a", "temprature": "1"}, "unknown job field 'temprature'"),
    ],
)
def test_a_wrong_field_gets_one_clear_line(fields: dict[str, str], says: str) -> None:
    with pytest.raises(JobError) as raised:
        parse(fields)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_published_fields_are_all_there() -> None:
    published = {
        "prompt",
        "prompt_ids",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "strategy",
        "idempotency_key",
    }
    assert published <= set(FIELDS)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prompt": 5}, "prompt is 5; expected text"),
        ({"prompt": b"a"}, "prompt is b'a'; expected text"),
        ({"prompt": None, "prompt_ids": 5}, "prompt_ids is 5; expected a list of token ids"),
        ({"prompt": None, "prompt_ids": "12"}, "prompt_ids is '12'; expected a list"),
        ({"prompt": None, "prompt_ids": (1, True)}, "prompt_ids is (1, True); expected a list"),
        ({"prompt": None, "prompt_ids": (1.0,)}, "prompt_ids is (1.0,); expected a list"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'; expected a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True; expected a whole number"),
        ({"max_new_tokens": 8.0}, "max_new_tokens is 8.0; expected a whole number"),
        ({"max_new_tokens": None}, "max_new_tokens is None; expected a whole number"),
        ({"sampling": 0.5}, "sampling is 0.5; expected a Sampling"),
        ({"sampling": Sampling(top_k=True)}, "top_k is True; expected a whole number"),
        ({"strategy": 5}, "strategy is 5; expected text"),
        ({"idempotency_key": 5}, "idempotency_key is 5; expected text"),
        ({"raw": "no"}, "raw is 'no'; expected True or False"),
        ({"record": 1}, "record is 1; expected True or False"),
    ],
)
def test_a_value_of_a_wrong_type_gets_one_clear_line(values: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError) as raised:
        JobSpec(**{"prompt": "a", **values})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["temperature", "top_k", "max_new_tokens", "raw", "strategy"])
def test_none_is_no_value_of_a_field_with_a_default(name: str) -> None:
    with pytest.raises(JobError, match=f"^{name} is None; expected "):
        job_spec("a", **{name: None})  # type: ignore[arg-type, misc]


def test_numbers_of_numpy_are_numbers() -> None:
    spec = job_spec(
        prompt_ids=tuple(np.arange(1, 3)),
        max_new_tokens=np.int64(8),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int32(3),  # type: ignore[arg-type]
        seed=7,
    )
    assert parse(spec.fields()) == JobSpec(
        prompt_ids=(1, 2), max_new_tokens=8, sampling=Sampling(0.5, 3, 1.0, 7)
    )


def test_a_caller_may_say_every_field_beside_its_prompt() -> None:
    assert {"prompt", "tokenize", *JobOptions.__annotations__} == {*FIELDS}
