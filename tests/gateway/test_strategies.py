"""Which strategies clients may choose, and how an answer says that its text is not exact."""

from __future__ import annotations

import json

import httpx2
import pytest

from flowspec.errors import ConfigError
from flowspec.gateway.errors import ApiError
from flowspec.gateway.settings import Settings
from flowspec.gateway.strategies import ClientStrategies, harmless
from flowspec.strategies import STRATEGIES, build
from flowspec.transport.connections.server import PrivateBroker
from tests.gateway.conftest import MODEL, gateway_at

LOSSY = "specpipe_lossy_relaxed"


def ask(web: httpx2.Client, **more: object) -> httpx2.Response:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8} | more
    return web.post("/v1/completions", json=body)


def test_by_default_texts_are_exact_and_no_job_makes_others_wait() -> None:
    allowed = ClientStrategies((), "flowspec")
    for name, kind in STRATEGIES.items():
        if kind.lossy or build(name, 2).pacing.has_barrier:
            assert name not in harmless()
            with pytest.raises(ApiError, match=f"the strategy {name} is not allowed here"):
                allowed.chosen(name)
        else:
            assert allowed.chosen(name) == name


def test_the_operators_own_choice_is_always_allowed() -> None:
    allowed = ClientStrategies(("auto", "flowspec"), "pipedec:width=4")
    assert allowed.chosen(None) == allowed.chosen("") == "pipedec:width=4"
    assert allowed.chosen("pipedec:width=4") == "pipedec:width=4"
    assert allowed.chosen("auto") == "auto"
    for other in ("pipedec", "pipedec:width=8", "specpipe"):
        with pytest.raises(ApiError, match="allowed are: auto, flowspec"):
            allowed.chosen(other)


@pytest.mark.parametrize(("names", "default"), [(("fastest",), "flowspec"), ((), "fastest")])
def test_a_name_that_does_not_exist_is_refused(names: tuple[str, ...], default: str) -> None:
    with pytest.raises(ConfigError, match="fastest"):
        ClientStrategies(names, default)


def test_a_client_may_not_choose_what_is_lossy(web: httpx2.Client) -> None:
    for name in (LOSSY, "pipedec"):
        refused = ask(web, strategy=name)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "strategy_not_allowed"
        assert refused.json()["error"]["param"] == "strategy"
    assert "lossy" not in ask(web).json()


def test_a_lossy_answer_says_so(broker: PrivateBroker, endless: None) -> None:
    settings = Settings(broker.url, name=MODEL, allowed_strategies=(LOSSY, "auto"))
    with gateway_at(settings) as web:
        whole = ask(web, strategy=LOSSY)
        assert whole.headers["x-flowspec-lossy"] == "relaxed"
        assert whole.json()["lossy"] == "relaxed"
        streamed = ask(web, strategy=LOSSY, stream=True)
        assert streamed.headers["x-flowspec-lossy"] == "relaxed"
        events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
        assert all(json.loads(event)["lossy"] == "relaxed" for event in events[:-1])
        assert "x-flowspec-lossy" not in ask(web, strategy="auto").headers
