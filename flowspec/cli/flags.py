"""The flags that commands share, and those whose values are checked as they are read."""

from __future__ import annotations

from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from flowspec.cli.parser import checked_by, in_range, not_empty, or_standard_input, taken_by
from flowspec.core.run.limits import check_store
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import MAX_NEW_TOKENS, JobSpec
from flowspec.model.weights.precision import DTYPES, check_device, check_dtype
from flowspec.rehearse.devices.way import Way
from flowspec.strategies import STRATEGIES
from flowspec.transport.ways import check_rows

_POSITIVE = in_range(1, inf, "1 or more")
_SAMPLING = taken_by(Sampling)
_JOB = taken_by(partial(JobSpec, "-"))
_SIMULATED = in_range(2, MAX_NEW_TOKENS, f"2 to {MAX_NEW_TOKENS}")
_NAMED = not_empty("a name like draft, head or ngram, or several joined by + or :")
_SOURCES = (
    "slm (or draft: the packaged small model), head, ngram; "
    "a profile must have times for it, as all packaged ones do"
)

Url = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="FLOWSPEC_REDIS_URL",
        help="Broker of a running pipeline.",
        show_default=False,
    ),
]
ProbesUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="FLOWSPEC_REDIS_URL",
        help="Broker of boxes that run `python -m workers.probe`, to measure them.",
        show_default=False,
    ),
]
OwnUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="FLOWSPEC_REDIS_URL",
        help="Broker to use; default: a private one.",
        show_default=False,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(help="Model to run: folder, GGUF file or hub name; default: the packaged one."),
]
Draft = Annotated[
    str | None,
    typer.Option(
        callback=_NAMED,
        help="Drafter: a model with the same tokenizer, an EAGLE head, a block drafter, ngram, or "
        "several joined by +; auto chooses from drafts joined by :, other strategies use the "
        "first. Packaged: draft (the default), head, and smollm2-head for SmolLM2.",
    ),
]
Timed = Annotated[
    str | None,
    typer.Option(
        "--draft",
        callback=_NAMED,
        help="Drafters to time, joined by + or :; default: one of each kind.",
    ),
]
Models = Annotated[
    str | None,
    typer.Option(
        help="A chain instead of --draft and --target: DRAFT,MIDDLE,TARGET, smallest first."
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(
        callback=_POSITIVE,
        help="Number of verify workers that share the layers, 1 or more; default: 4.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=checked_by(check_dtype),
        help=f"Precision of the target: {', '.join(DTYPES)}; "
        "auto, the default, is the one that the model declares, of a GGUF file the one that keeps "
        "its values or is closest to them.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        callback=checked_by(check_device),
        help="Device of the target: auto (the default: a GPU if there is one), cpu, cuda, cuda:N "
        "or mps.",
    ),
]
RowsWay = Annotated[
    str,
    typer.Option(
        "--rows",
        callback=checked_by(check_rows),
        help="How rows travel: straight into the next worker's inbox, through the broker, or auto: "
        "straight unless the broker is on the receiver's machine.",
    ),
]
JobsAtOnce = Annotated[
    int, typer.Option("--jobs", callback=_POSITIVE, help="Jobs that run at once, 1 or more.")
]
PromptsAtOnce = Annotated[
    int,
    typer.Option(
        "--jobs", callback=_POSITIVE, help="Prompts that are answered at once, 1 or more."
    ),
]
KeepRows = Annotated[
    int | None,
    typer.Option(
        callback=in_range(0, inf, "0 or more"),
        help="Most rows of jobs that are kept for jobs that begin as they did; 0: none "
        "(default: twice the context, at most 4096).",
    ),
]
MostRows = Annotated[
    int,
    typer.Option(
        callback=in_range(0, inf, "0 or more"),
        help="KV rows that the running jobs may need at a stage; further jobs wait; 0: as many as "
        "--jobs of them can need.",
    ),
]
Persist = Annotated[
    Path | None,
    typer.Option(
        help="Folder where the pipeline's own broker keeps jobs and outputs, for its next start; "
        "without it they are lost when the broker stops.",
    ),
]
Kv = Annotated[
    str,
    typer.Option(
        callback=checked_by(check_store),
        help="How stages store KV rows: contiguous, a range for every job, or paged, blocks of one "
        "pool, which kept rows and the jobs that begin with them share.",
    ),
]
Priority = Annotated[
    int,
    typer.Option(
        callback=_JOB,
        help="-100 to 100; of the waiting jobs those of the highest begin first.",
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        callback=_JOB,
        help="Return each token's log-probability, and those of so many of the best ones in its "
        "place, 0 to 20 (`watch --json` shows them).",
    ),
]
WaitSeconds = Annotated[
    float,
    typer.Option(
        callback=_JOB,
        help="Seconds after which the job fails if it has not begun; 0: it waits as long as it "
        "has to.",
    ),
]
DraftDtype = Annotated[
    str | None,
    typer.Option(
        callback=checked_by(check_dtype),
        help="Precision of the drafters, as --dtype; auto, the default: int8-block on a CPU that "
        "compiles its product, unless the drafter is quantised; else as its model declares, a "
        "head's target.",
    ),
]
DraftDevice = Annotated[
    str | None,
    typer.Option(callback=checked_by(check_device), help="Device of the drafters, as --device."),
]
Planned = Annotated[
    Path | None,
    typer.Option(
        "--cluster", help="A file that `flowspec plan` wrote, instead of models and stages."
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        autocompletion=lambda: [*STRATEGIES],
        help="See `flowspec strategies`; options as NAME:option=value,...",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option(callback=_JOB, help="Most tokens to generate, 1 or more.")
]
Temperature = Annotated[float, typer.Option(callback=_SAMPLING, help="0 or more; 0 is greedy.")]
TopK = Annotated[
    int,
    typer.Option(callback=_SAMPLING, help="Keep the K most likely tokens, 0 or more; 0 keeps all."),
]
TopP = Annotated[
    float,
    typer.Option(
        callback=_SAMPLING,
        help="Keep the shortest set of tokens of this probability, above 0; 1 keeps all.",
    ),
]
Seed = Annotated[int, typer.Option(callback=_SAMPLING, help="0 or more; same seed, same text.")]
ServedAtOnce = Annotated[
    int,
    typer.Option(
        "--jobs", callback=_POSITIVE, help="Answers that the pipeline gives at once, 1 or more."
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[
    int,
    typer.Option(callback=in_range(0, 65535, "0 to 65535"), help="0 to 65535; 0: any free one."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="Keys of which a request must bring one, one a line; default: none needed."),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Web page that may use the gateway from a browser; repeatable."),
]
ModelName = Annotated[
    str, typer.Option(help="The model's name for clients; default: by the target's.")
]
ServedStrategy = Annotated[
    str, typer.Option("--strategy", help="Strategy of requests that name none.")
]
MostAnswers = Annotated[
    int,
    typer.Option(callback=_POSITIVE, help="Answers under way at once; more requests get 429."),
]
MostConnections = Annotated[
    int,
    typer.Option(callback=_POSITIVE, help="Connections at once; further ones get 503."),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="Name under which the gateway is served, beside this machine's own; repeatable."
    ),
]
AllowStrategies = Annotated[
    str,
    typer.Option(
        help="Strategies that requests may name, with commas; "
        "default: all exact ones that let other jobs run beside them."
    ),
]
DefaultTokens = Annotated[
    int | None,
    typer.Option(
        callback=_POSITIVE,
        help="Most tokens of a chat answer whose request does not say; default: what fits.",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Argument(
        help="The prompt; - reads it from standard input.",
        show_default=False,
        callback=or_standard_input,
    ),
]
GivenPrompt = Annotated[
    str,
    typer.Argument(help="The prompt; - reads it from standard input.", callback=or_standard_input),
]
WithStats = Annotated[
    bool, typer.Option("--stats", help="After an answer, show all that was measured.")
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw", help="Without the chat template; texts of special tokens are these tokens."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object per line on stdout, all else on stderr.")
]
SplitOver = Annotated[
    int,
    typer.Option(
        "--stages", callback=_POSITIVE, help="Number of verify workers the profile is meant for."
    ),
]
Repeats = Annotated[int, typer.Option(callback=_POSITIVE, help="Timed passes of each kind.")]
Latency = Annotated[
    float,
    typer.Option(
        callback=in_range(0, 999_999, "milliseconds from 0 to 999999"),
        help="One-way link latency for the profile, ms; not measured.",
    ),
]
Mbit = Annotated[
    float,
    typer.Option(
        callback=in_range(1e-6, inf, "Mbit/s, more than 0"),
        help="Link bandwidth for the profile, Mbit/s; not measured.",
    ),
]

Cluster = Annotated[
    str,
    typer.Option("--profile", help="Cluster to simulate: a packaged profile or a .toml file."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines file, or a folder of such files; default: twelve packaged prompts."
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategies",
        "--strategy",
        help="Strategies, separated by spaces or commas or in repeated flags; "
        "NAME:option=value,option=value is one; all: every exact one.",
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(help="Other links too: latency=MS,... or mbit=N,...; repeatable."),
]
Broker = Annotated[
    str | None,
    typer.Option(
        callback=checked_by(Way),
        help="Where the broker is: draft or stage-N, beside that worker; own, a box of its own; "
        "none: not charged; default: the profile's.",
    ),
]
SimulatedRows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        callback=checked_by(lambda rows: Way(rows=rows)),
        help="Which way rows go: straight to their receiver, or broker, through it; default: the "
        "profile's.",
    ),
]
Pair = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", help="Instead, compare two files written by --out."),
]
Drafter = Annotated[
    str,
    typer.Option(
        "--draft",
        callback=_NAMED,
        help=f"Draft source, several joined by +, choices by :. {_SOURCES}.",
    ),
]
Drafters = Annotated[
    str,
    typer.Option(
        "--draft",
        callback=_NAMED,
        help="Draft sources, separated by commas, like slm,head,slm+ngram,head:slm (auto chooses): "
        f"{_SOURCES}.",
    ),
]
Pretended = Annotated[
    int | None,
    typer.Option(
        "--stages", callback=_POSITIVE, help="Stages to simulate; default: the profile's first."
    ),
]
Simulated = Annotated[int, typer.Option(callback=_SIMULATED, help="Most tokens to generate.")]
Tokens = Annotated[
    int | None, typer.Option(callback=_SIMULATED, help="Tokens of every text; default: 48.")
]

Boxes = Annotated[
    str | None,
    typer.Option(
        callback=not_empty("boxes like nano:4x8GiB@50GB/s"),
        help="With --dry: NAME:[COUNTx]MEMORY@BANDWIDTH[+COMPUTE],... like "
        "nano:4x8GiB@50GB/s,desk:24GiB@900GB/s+60TFLOPS. Otherwise local:N, N workers on this "
        "machine.",
    ),
]
PlannedDtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        callback=checked_by(check_dtype),
        help=f"Precision of the weights: {', '.join(DTYPES)}; auto: the checkpoint's own.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        callback=_POSITIVE,
        help="Most tokens of prompt and output; default: the model's, at most 4096.",
    ),
]
LinkMs = Annotated[
    float,
    typer.Option(
        callback=in_range(0, 999_999, "milliseconds from 0 to 999999"),
        help="One-way latency between boxes, ms; measured with --redis-url.",
    ),
]
Acceptance = Annotated[
    float | None,
    typer.Option(
        callback=in_range(0, 1, "a probability from 0 to 1"),
        help="Probability that a drafted token is right; default: as the packaged drafters'.",
    ),
]
Jobs = Annotated[
    int, typer.Option(callback=_POSITIVE, help="Jobs at once that every box has memory for.")
]
