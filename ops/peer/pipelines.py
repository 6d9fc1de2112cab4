"""Both sides as running pipelines behind the same links, and their settings as systems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.session.stats import repeated_4grams
from flowspec.errors import ConfigError
from flowspec.model.weights.directory import open_directory
from flowspec.results import Result, reported
from flowspec.transport.connections.server import PrivateBroker
from ops.peer.contest import Sides
from ops.peer.install import Peer
from ops.peer.llama import HOST, DraftOptions, Llama, LlamaRun, Relays, kept_port, relays, servers
from ops.peer.prompts import PeerPrompt
from ops.peer.settings import parted

_LISTEN = ("--rows", "straight", "--inbox-host", HOST)
#: Tokens of a strategy's first job, which is slower than the next.
_WARM_UP = 8


@dataclass(frozen=True, slots=True)
class OurPipeline:
    """A running pipeline of ours: its broker's ``url``, a ``client``, the links to its stages, and
    process ids by role, the broker's as ``broker``.
    """

    url: str
    client: Client
    links: Relays
    pids: dict[str, int]


@contextlib.contextmanager
def our_pipeline(setup: Setup, latency: float, logs: Path) -> Iterator[Client]:
    """A pipeline whose links to the stages have ``latency`` seconds each way."""
    with our_processes(setup, latency, logs) as running:
        yield running.client


@contextlib.contextmanager
def our_processes(
    setup: Setup,
    latency: float,
    logs: Path,
    programs: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[OurPipeline]:
    """As ``our_pipeline``; ``programs`` as in ``Cluster``.

    Every link to a stage has a relay: from the broker, beside which the draft worker is, and into
    the stage's inbox. Rows from the last stage return through the broker, which is one link too.
    """
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(PrivateBroker())
        url = urlsplit(broker.url)
        inboxes = [stack.enter_context(kept_port()) for _ in range(setup.stages)]
        ends = [*[url.path] * setup.stages, *(f"{HOST}:{port}" for port in inboxes)]
        links = stack.enter_context(relays(ends, latency, logs / "ours.log"))
        roles = [f"verify-{stage}" for stage in range(1, setup.stages + 1)]
        spokes = {
            role: f"redis://:{url.password}@{HOST}:{port}/0"
            for role, port in zip(roles, links.ports[: setup.stages], strict=True)
        }
        flags = {
            role: (*_LISTEN, "--inbox-port", str(port), "--inbox-announce", f"{HOST}:{relay}")
            for role, port, relay in zip(roles, inboxes, links.ports[setup.stages :], strict=True)
        }
        cluster = stack.enter_context(
            Cluster(setup, url=broker.url, urls=spokes, programs=programs, more=flags)
        )
        client = stack.enter_context(Client(cluster.url))
        yield OurPipeline(cluster.url, client, links, {**cluster.pids, "broker": broker.pid})


@contextlib.contextmanager
def their_pipeline(
    peer: Peer, setup: Setup, file: Path, head: Path | None, latency: float, logs: Path
) -> Iterator[Llama]:
    """llama.cpp with the target's ``file``; its links to the stages have ``latency`` seconds.

    ``head``: as ``Llama``'s.
    """
    target = open_directory(setup.target)
    with (
        servers(peer, setup.stages, logs) as addresses,
        relays(addresses, latency, logs / "theirs.log") as links,
    ):
        at = [f"{HOST}:{port}" for port in links.ports]
        yield Llama(peer, at, target.layers, target.context, file, head)


def ours(
    client: Client, strategy: str, tokens: int, prompt: PeerPrompt
) -> tuple[LlamaRun, tuple[int, ...]]:
    """Run one job in our pipeline; the run and its output ids."""
    job = client.submit(
        prompt_ids=prompt.ids, max_new_tokens=tokens, strategy=strategy, reuse=False
    )
    result = job.result()
    return LlamaRun(result.text, seconds_per_token(result)), result.token_ids


def seconds_per_token(result: Result) -> float:
    """Decode seconds per token after the first."""
    return reported(result.stats["decode_seconds"]) / max(1, len(result.token_ids) - 1)


def known(
    llama: Llama, client: Client, prompts: Sequence[PeerPrompt], tokens: int
) -> list[PeerPrompt]:
    """``prompts`` with the target's own text; ConfigError if llama.cpp encodes one differently."""
    return [_known(llama, client, prompt, tokens) for prompt in prompts]


def _known(llama: Llama, client: Client, prompt: PeerPrompt, tokens: int) -> PeerPrompt:
    if llama.token_ids(prompt.rendered) != prompt.ids:
        raise ConfigError(
            f"llama.cpp encodes the prompt {prompt.text[:40]!r} to other token ids; expected "
            "the same"
        )
    run, ids = ours(client, "autoregressive", tokens, prompt)
    return replace(
        prompt,
        expected=run.text.rstrip("\N{REPLACEMENT CHARACTER}"),
        repeated=repeated_4grams(ids),
    )


def sides(
    llama: Llama, clients: Mapping[str, Client], drafts: Sequence[DraftOptions], tokens: int
) -> Sides:
    """Systems that decode ``tokens`` tokens of a prompt, a setting each.

    ``clients``: of the pipeline of each of our settings.
    """
    return Sides(
        {f"ours, {name}": partial(_ours, client, name, tokens) for name, client in clients.items()},
        {
            "llama.cpp": lambda prompt: llama.plain(prompt.rendered, tokens),
            **{_named(llama, by): partial(_drafted, llama, by, tokens) for by in drafts},
        },
    )


def warm_up(clients: Mapping[str, Client], prompt: PeerPrompt) -> None:
    """Run a short job of every setting."""
    for setting, client in clients.items():
        _ours(client, setting, _WARM_UP, prompt)


def _ours(client: Client, setting: str, tokens: int, prompt: PeerPrompt) -> LlamaRun:
    return ours(client, parted(setting)[0], tokens, prompt)[0]


def _named(llama: Llama, by: DraftOptions) -> str:
    return f"llama.cpp, {by}{' by the head' if llama.head and not by.lookup else ''}"


def _drafted(llama: Llama, by: DraftOptions, tokens: int, prompt: PeerPrompt) -> LlamaRun:
    return llama.speculative(prompt.rendered, tokens, by)
