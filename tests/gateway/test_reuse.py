"""What the gateway says of rows that are kept, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from flowspec.gateway.keys import ApiKeys, salt_of
from flowspec.gateway.settings import Settings
from flowspec.transport.connections.server import PrivateBroker
from tests.gateway.conftest import MODEL, gateway_at
from tests.served import toy_pipeline

KEYS = ("sk-notebook-1", "sk-phone-22")
PROMPT = [5 + at % 31 for at in range(40)]


@pytest.fixture(scope="module")
def web() -> Iterator[httpx2.Client]:
    with (
        PrivateBroker() as broker,
        toy_pipeline(broker.url, endless=True, kept_rows=1000),
        gateway_at(Settings(broker.url, name=MODEL, keys=ApiKeys(KEYS))) as client,
    ):
        yield client


def known(web: httpx2.Client, prompt: list[int], key: str = KEYS[0], **more: object) -> int:
    """How many tokens of ``prompt`` the answer says were known."""
    answer = web.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 8} | more,
        headers={"Authorization": f"Bearer {key}"},
    )
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert isinstance(details["cached_tokens"], int)
    return int(details["cached_tokens"])


def test_the_usage_says_what_was_known(web: httpx2.Client) -> None:
    assert known(web, PROMPT) == 0
    assert known(web, [*PROMPT, 3, 4]) == len(PROMPT)
    figures = web.get("/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
    counted = [line for line in figures.splitlines() if line.startswith("vllm:prefix_cache_")]
    assert sorted(float(line.split()[-1]) for line in counted) == [40.0, 82.0]


def test_a_prompt_of_several_answers_counts_once(web: httpx2.Client) -> None:
    prompt = [*PROMPT[::-1], 3]
    assert known(web, prompt) == 0
    assert known(web, [*prompt, 4], n=2) == len(prompt)


def test_answers_at_once_compute_their_prompt_once(web: httpx2.Client) -> None:
    prompt = [3, *PROMPT[::-1]]
    assert known(web, prompt, n=3) == 0, "the first one computes it"
    figures = web.get("/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
    hits = "vllm:prefix_cache_hits_total"
    (before,) = (line for line in figures.splitlines() if line.startswith(hits))
    assert known(web, [4, *prompt], n=3) == 0
    figures = web.get("/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
    (after,) = (line for line in figures.splitlines() if line.startswith(hits))
    assert float(after.split()[-1]) - float(before.split()[-1]) == 2 * len(prompt)


def test_an_answer_cut_at_a_stop_string_leaves_its_prompt(web: httpx2.Client) -> None:
    prompt = [6, *PROMPT[::-1]]
    letters = list("abcdefghijklmnopqrstuvwxyz")
    assert known(web, prompt, max_tokens=200, stop=letters[:4]) == 0
    assert known(web, [*prompt, 4]) >= len(prompt) - 1


def test_keys_and_salts_are_kept_apart(web: httpx2.Client) -> None:
    prompt = [7, *PROMPT]
    assert known(web, prompt) == 0
    assert known(web, [*prompt, 3], KEYS[1]) == 0
    assert known(web, [*prompt, 3], cache_salt="mine") == 0
    assert known(web, [*prompt, 3, 5], cache_salt="mine") == len(prompt) + 1
    assert known(web, [*prompt, 4]) == len(prompt)


def test_a_salt_tells_neither_key_nor_choice() -> None:
    keys = ApiKeys(KEYS)
    salts = {salt_of(keys, f"Bearer {key}", own) for key in KEYS for own in ("", "a", "b")}
    assert len(salts) == 6
    assert not any(key in salt for key in KEYS for salt in salts)
    assert salt_of(keys, f" bearer  {KEYS[0]} ", "") == salt_of(keys, f"Bearer {KEYS[0]}", "")
    assert salt_of(ApiKeys(), f"Bearer {KEYS[0]}", "") == ""
    assert salt_of(ApiKeys(), f"Bearer {KEYS[0]}", "a") == salt_of(ApiKeys(), "", "a") != ""
