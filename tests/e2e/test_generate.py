"""The command line against real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.run.sampling import Sampling
from flowspec.model.reference import Reference
from flowspec.model.weights.directory import default_pair
from flowspec.transport.wire.keys import Keys
from tests.clients import RedisControlAndClient
from tests.commands import Command, start
from tests.e2e.conftest import (
    PROCESSES,
    Clusters,
    Run,
    left_in,
    one_line,
    surroundings,
    workers_of,
)
from tests.marks import every, heavy
from tests.waiting import until

pytestmark = pytest.mark.live

FLOWSPEC = str(Path(sys.executable).parent / "flowspec")
PROMPT = "Tom has 5 apples and buys 7 more. How many apples does he have?"
STATS = {
    "tokens",
    "ttft_seconds",
    "decode_seconds",
    "tokens_per_second",
    "rounds",
    "segments",
    "steps",
    "tokens_per_step",
    "tokens_per_round",
    "hit_rate",
    "rows",
    "stage_busy",
    "repeated_4grams",
}


@pytest.mark.gate
def test_a_private_pipeline_answers_in_json_and_leaves_nothing(
    flowspec: Run, reference: Reference, place: Path
) -> None:
    done = flowspec(
        "generate",
        PROMPT,
        "--json",
        "--stages",
        "3",
        "--max-new-tokens",
        "20",
        "--strategy",
        "flowspec",
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert set(result) == {
        "prompt_token_ids",
        "token_ids",
        "text",
        "strategy",
        "finish_reason",
        "stats",
    }
    assert result["strategy"] == "flowspec"
    assert result["finish_reason"] == "length"
    assert tuple(result["token_ids"]) == reference.generate(result["prompt_token_ids"], 20)
    stats = result["stats"]
    assert stats.keys() >= STATS
    assert stats["rows"].keys() == {"useful", "wasted", "void"}
    assert len(stats["stage_busy"]) == 3
    assert stats["tokens"] == 20
    assert all(value is not None for value in stats.values())
    assert left_in(place) == []


@pytest.mark.gate
def test_text_goes_to_stdout_and_the_report_to_stderr(flowspec: Run, clusters: Clusters) -> None:
    ask = ("generate", PROMPT, "--max-new-tokens", "12")
    done = flowspec(*ask, url=clusters(2).url)
    assert done.returncode == 0
    assert done.stdout.startswith(" Tom has")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"12 tokens, as many as asked for; \d+\.\d tokens/s, hit rate \d\.\d\d", line
    )
    done = flowspec(*ask, "--stats", url=clusters(2).url)
    assert done.stdout.startswith(" Tom has")
    assert "tokens per step / round" in done.stderr
    assert "stage busy" in done.stderr


def test_sampling_flags_reach_the_draw(
    flowspec: Run, clusters: Clusters, reference: Reference
) -> None:
    flags = ("--temperature", "0.6", "--top-k", "80", "--top-p", "0.9", "--seed", "7")
    done = flowspec(
        "generate", PROMPT, "--json", "--max-new-tokens", "16", *flags, url=clusters(2).url
    )
    result = json.loads(done.stdout)
    wanted = reference.decode(result["prompt_token_ids"], 16, Sampling(0.6, 80, 0.9, 7))
    assert tuple(result["token_ids"]) == wanted


def test_raw_leaves_the_template_out(flowspec: Run, clusters: Clusters) -> None:
    url = clusters(2).url
    chat = json.loads(
        flowspec("generate", "Why?", "--json", "--max-new-tokens", "1", url=url).stdout
    )
    raw = json.loads(
        flowspec("generate", "Why?", "--json", "--max-new-tokens", "1", "--raw", url=url).stdout
    )
    assert len(raw["prompt_token_ids"]) < len(chat["prompt_token_ids"])


def test_a_file_of_prompts_gives_a_line_each(
    flowspec: Run, clusters: Clusters, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "One?"}\n\n{"turns": ["Two?", "ignored"], "category": "x"}\n')
    done = flowspec(
        "generate", "--prompts", str(file), "--json", "--max-new-tokens", "4", url=clusters(2).url
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(result["token_ids"]) for result in results] == [4, 4]
    assert results[0]["prompt_token_ids"] != results[1]["prompt_token_ids"]


def test_several_prompts_at_once(
    flowspec: Run, reference: Reference, place: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    prompts = ["One?", "word " * 3000, "Two?", "What is it?"]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    together = ("--prompts", str(file), "--jobs", "3", "--stages", "2")
    done = flowspec("generate", *together, "--json", "--max-new-tokens", "24")
    assert done.returncode == 1
    assert "the model's context is 1024: shorten it" in done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    lengths = [len(result["prompt_token_ids"]) for result in results]
    assert lengths == sorted(lengths), "in the order of the prompts"
    for result in results:
        assert tuple(result["token_ids"]) == reference.generate(result["prompt_token_ids"], 24)
    first, second, _ = (result["stats"] for result in results)
    assert second["queue_seconds"] < first["ttft_seconds"], "it did not wait for the first"
    assert left_in(place) == []


def test_one_prompt_that_fails_does_not_stop_the_others(
    flowspec: Run, clusters: Clusters, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "word " * 3000}) + '\n{"prompt": "Two?"}\n')
    done = flowspec(
        "generate", "--prompts", str(file), "--json", "--max-new-tokens", "4", url=clusters(2).url
    )
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert "the model's context is 1024: shorten it" in done.stderr


@pytest.mark.gate
def test_a_target_alone_is_drafted_for_by_ngrams(flowspec: Run) -> None:
    done = flowspec("generate", PROMPT, "--target", "medium", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("note: no --draft is given for medium: drafting with n-grams")


@pytest.mark.heavy
def test_middle_models_that_no_strategy_uses_are_not_started(flowspec: Run) -> None:
    chain = ("--models", "draft,/no/model,target", "--stages", "2")
    done = flowspec("generate", PROMPT, *chain, "--max-new-tokens", "4", "--strategy", "chain")
    assert done.returncode == 0, done.stderr
    note = "note: chain uses no middle models: /no/model is not started; "
    assert done.stderr.startswith(note)


@pytest.mark.heavy
def test_drafts_to_choose_from_are_named_as_they_were_given(flowspec: Run, tmp_path: Path) -> None:
    own = tmp_path / "small"
    file = tmp_path / "run.jsonl"
    shutil.copytree(default_pair()[1], own)
    with Cluster(Setup(default_pair()[0], f"ngram:{own}", 2)) as cluster:
        own.rename(
            tmp_path / "elsewhere"
        )  # as on a user's machine, which has no folder of that name
        fixed = flowspec(
            "generate", PROMPT, "--max-new-tokens", "4", "--strategy", "chain", url=cluster.url
        )
        chosen = flowspec(
            *("generate", PROMPT, "--max-new-tokens", "60", "--strategy", "auto", "--stats"),
            url=cluster.url,
        )
        auto = ("--strategy", "auto", "--json", "--record", str(file))
        again = flowspec("generate", PROMPT, "--max-new-tokens", "60", *auto, url=cluster.url)
    said = "note: chain does not choose between drafts: it uses ngram, the first of ngram:small; "
    assert fixed.stderr.splitlines()[0] == said + "put another one first, or use auto"
    (line,) = [line for line in chosen.stderr.splitlines() if line.startswith("tokens by draft")]
    counts = dict(
        part.split() for part in line.removeprefix("tokens by draft").split("  ") if part.strip()
    )
    assert set(counts) <= {"ngram", "small"} and sum(map(int, counts.values())) == 59
    assert "does not choose" not in chosen.stderr + again.stderr
    decisions = json.loads(again.stdout)["stats"]["decisions"]
    assert [entry["drafter"] for entry in decisions if "drafter" in entry][:2] == ["ngram", "small"]
    assert flowspec("replay", str(file)).returncode == 0


@pytest.mark.gate
def test_a_recording_replays_and_an_edited_one_does_not(
    flowspec: Run, clusters: Clusters, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    done = flowspec(
        "generate", PROMPT, "--max-new-tokens", "16", "--record", str(file), url=clusters(2).url
    )
    assert done.returncode == 0, done.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    again = flowspec("replay", str(file))
    assert again.returncode == 0, again.stderr
    assert "replayed exactly; 16 tokens committed" in again.stdout
    lines = file.read_text().splitlines()
    file.write_text(
        "\n".join(line for line in lines if '"n":3,' not in line or '"node":"s1"' not in line)
        + "\n"
    )
    assert "step 3 of s1 is missing" in one_line(flowspec("replay", str(file)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    every(
        2,
        [
            (["generate"], "give either a PROMPT or --prompts"),
            (["generate", "hi", "--prompts", "x"], "give either a PROMPT or --prompts"),
            (["generate", "--prompts", "/no/such.jsonl"], "cannot be read"),
            (["generate", ""], "the prompt is empty"),
            (["generate", "hi", "--max-new-tokens", "0"], "--max-new-tokens is 0; expected 1 to"),
            (["generate", "hi", "--max-new-tokens", "-1"], "--max-new-tokens is -1; expected 1 to"),
            (["generate", "hi", "--temperature", "-1"], "temperature is -1"),
            (["generate", "hi", "--temperature", "nan"], "temperature is nan"),
            (
                ["generate", "hi", "--strategy", "best"],
                "unknown strategy 'best'; there are: autoregressive, naive_pp",
            ),
            (["generate", "hi", "--stages", "13"], "13 stages asked for; the target has 12 layers"),
            (["generate", "hi", "--stages", "0"], "--stages is 0; expected 1 or more"),
            (["generate", "hi", "--jobs", "0"], "--jobs is 0; expected 1 or more"),
            (
                ["generate", "hi", "--target", "/no/model", "--draft", "/no/model"],
                "model /no/model does not exist",
            ),
            (["generate", "hi", "--target", "/tmp"], "/tmp is not a model: it has no config.json"),
            (["generate", "hi", "--models", "draft"], "expected at least DRAFT,TARGET"),
            (["generate", "hi", "--models", "draft,,target"], "expected at least DRAFT,TARGET"),
            (
                ["generate", "hi", "--models", "draft,target", "--draft", "draft"],
                "leave out --target and --draft",
            ),
            (
                ["generate", "hi", "--models", "draft,head,target", "--strategy", "pipespec"],
                "the middle model is head, and an EAGLE head can only draft",
            ),
            (
                ["generate", "hi", "--target", "head", "--draft", "draft"],
                "the target is head, and an EAGLE head can only draft",
            ),
            (
                ["generate", "hi", "--strategy", "flowspec:width=8,width=9"],
                "strategy option width is given twice",
            ),
            (
                ["generate", "hi", "--models", "draft,/no/model,target", "--strategy", "pipespec"],
                "model /no/model does not exist",
            ),
            (["generate", "hi", "--draft", "ngram+"], "is no list of drafters"),
            (
                ["generate", "hi", "--draft", f"draft:{default_pair()[1]}"],
                "names one choice twice; expected like DIR:ngram",
            ),
            (
                ["generate", "hi", "--draft", "ngram+/no/model"],
                "model /no/model does not exist",
            ),
            (
                ["generate", "hi", "--target", "medium", "--draft", "head"],
                "hidden size 192, the target 160",
            ),
            (
                ["generate", "hi", "--strategy", "specpipe:width=500"],
                "width is 500; expected 0 to 128",
            ),
            (
                ["generate", "hi", "--strategy", "static_tree:shape=x"],
                "shape is 'x'; expected 1 to 16 children per level",
            ),
            (
                ["generate", "hi", "--redis-url", "unix:///x", "--models", "draft,target"],
                "leave out the one or the other",
            ),
            (
                ["generate", "hi", "--record", "/no/such/folder/x"],
                "there is no folder /no/such/folder",
            ),
            (["generate", "hi", "--record", "/tmp"], "--record is /tmp, which is a folder"),
            (["generate", "hi", "--record", ""], "name a file"),
            (["generate", "hi \udcff"], "the prompt is not UTF-8 text"),
            (
                ["generate", "hi", "--strategy", "flowspec:merge_nodes=100000"],
                "merge_nodes is 100000; expected 1 to 768",
            ),
            (
                ["generate", "hi", "--redis-url", "unix:///x", "--stages", "2"],
                "leave out the one or the other",
            ),
            (["generate", "hi", "--top-k", str(1 << 70)], "--top-k is"),
            (["generate", "hi", "--redis-url", "http://x"], "is not understood"),
            (
                ["generate", "hi", "--redis-url", "unix:///no/such/socket"],
                "cannot reach the broker",
            ),
            (["watch", "1-0", "--redis-url", "unix:///no/such/socket"], "cannot reach the broker"),
            (["replay", "/no/such/file"], "cannot be read"),
            (["down"], "no pipeline is up"),
        ],
    ),
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    flowspec: Run, place: Path, arguments: list[str], says: str
) -> None:
    assert says in one_line(flowspec(*arguments))
    assert left_in(place) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "hi", "--temperature", "abc"], "'--temperature'"),
        (["generate", "hi", "--stages", "x"], "'--stages'"),
        (["generate", "hi", "there"], "unexpected extra argument"),
        (["generate", "hi", "--strateg", "y"], "No such option"),
        (["replay"], "Missing argument"),
        (["generat"], "No such command"),
    ],
)
def test_wrong_usage_gets_one_line_too(flowspec: Run, arguments: list[str], says: str) -> None:
    done = flowspec(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowspec: ")
    assert says in line


def test_submit_knows_the_strategies(flowspec: Run, clusters: Clusters) -> None:
    assert "there are: autoregressive" in one_line(
        flowspec("submit", "hi", "--strategy", "x", url=clusters(2).url)
    )


def test_a_cancelled_job_has_every_key_of_the_stats(flowspec: Run, clusters: Clusters) -> None:
    url = clusters(2).url
    job = flowspec("submit", "Tell me all.", "--max-new-tokens", "900", url=url).stdout.strip()
    flowspec("cancel", job, url=url)
    result = json.loads(flowspec("watch", job, "--json", url=url).stdout)
    assert result["finish_reason"] == "cancelled"
    assert result["stats"].keys() >= STATS
    assert result["stats"]["tokens"] == len(result["token_ids"])


@pytest.mark.gate
def test_a_dead_worker_is_started_again_and_the_text_goes_on(
    generating: Command, reference: Reference, place: Path
) -> None:
    url = private_url(place)
    with Client(url) as client:
        until(lambda: client.load()[0])
        os.kill(int(client.workers()["verify-2"]["pid"]), signal.SIGKILL)
    done = generating.ended()
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("note: verify-2 stopped with status -9")
    result = json.loads(done.stdout)
    expected = reference.generate(result["prompt_token_ids"], len(result["token_ids"]))
    assert tuple(result["token_ids"]) == expected
    assert left_in(place) == []


@pytest.mark.gate
def test_help_is_instant_and_imports_no_torch() -> None:
    code = "import sys; sys.argv = ['flowspec', 'generate', '--help']\n"
    code += "from flowspec.cli import main\ntry: main()\n"
    code += "except SystemExit: pass\nassert not {'torch', 'transformers'} & set(sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    flags = (
        "--target --draft --stages --strategy --max-new-tokens --temperature --top-k --top-p "
        "--seed --prompts "
        "--raw --json --record --redis-url"
    )
    for flag in flags.split():
        assert flag in shown.stdout


@pytest.fixture
def generating(place: Path) -> Iterator[Command]:
    """``flowspec generate`` of a long text on its own cluster; stopped after the test."""
    words = ("flowspec", "generate", PROMPT, "--json", "--stages", "2", "--max-new-tokens", "240")
    flags = ("--strategy", "autoregressive")
    with start(*words, *flags, environment=surroundings(place)) as command:
        yield command


def private_url(place: Path) -> str:
    """Wait for the private broker in ``place`` to write its configuration; its URL."""

    def found() -> str:
        for config in place.glob("flowspec-broker-*/conf"):
            text = config.read_text()
            if text and config.with_name("s").exists():
                password = text.split("requirepass ")[1].split()[0]
                return f"unix://:{password}@{config.with_name('s')}"
        return ""

    return until(found)


@pytest.mark.parametrize("number", [signal.SIGTERM, heavy(signal.SIGINT)])
def test_a_signal_stops_every_process_and_loses_no_committed_token(
    reference: Reference, generating: Command, place: Path, number: int
) -> None:
    url = private_url(place)
    with Client(url) as client:
        until(lambda: client.load()[0])
        control = RedisControlAndClient(url, Keys())
        (job,) = until(control.running)
        until(lambda: control.read_output(job, "0", 0.1))
        control.close()
    assert len(workers_of(url)) == PROCESSES
    generating.process.send_signal(number)
    done = generating.ended()
    assert done.returncode == 128 + number
    result = json.loads(done.stdout)
    assert result["finish_reason"] == "cancelled"
    count = len(result["token_ids"])
    assert 0 < count < 240
    assert tuple(result["token_ids"]) == reference.generate(result["prompt_token_ids"], count)
    assert left_in(place) == []
