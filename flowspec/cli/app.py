"""``flowspec``: every command and its flags; the other modules of this package implement them."""

from __future__ import annotations

import os
import sys
from dataclasses import astuple, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from flowspec.cli.flags import (
    Acceptance,
    AllowedHost,
    AllowStrategies,
    ApiKeyFile,
    Boxes,
    Broker,
    Cluster,
    Context,
    CorsOrigin,
    DefaultTokens,
    Device,
    Draft,
    DraftDtype,
    Drafter,
    Drafters,
    Dtype,
    GivenPrompt,
    Host,
    Jobs,
    JobsAtOnce,
    Json,
    KeepRows,
    Kv,
    Latency,
    LinkMs,
    Logprobs,
    MaxNewTokens,
    Mbit,
    ModelName,
    MostAnswers,
    MostConnections,
    MostRows,
    OwnUrl,
    Pair,
    Persist,
    PlannedDtype,
    Port,
    Pretended,
    Priority,
    ProbesUrl,
    Prompt,
    PromptFile,
    PromptsAtOnce,
    Raw,
    Repeats,
    RowsWay,
    Seed,
    ServedAtOnce,
    ServedStrategy,
    Simulated,
    SimulatedRows,
    SplitOver,
    Stages,
    Strategies,
    Strategy,
    Sweep,
    Target,
    Temperature,
    Timed,
    Tokens,
    Url,
    WaitSeconds,
    WithStats,
)
from flowspec.cli.groups import ModelFlags, SamplingFlags, grouped
from flowspec.cli.outputs import StdoutError, checked_stdout
from flowspec.cli.parser import Command, UsageError, check_beside, in_range
from flowspec.core.run.fields import DEFAULT_MAX_NEW_TOKENS, DEFAULT_STRATEGY
from flowspec.core.run.limits import CONTIGUOUS
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.errors import (
    BrokerUnreachable,
    line_of,
    naming_what_is_missing,
)
from flowspec.gateway.settings import MOST_CONNECTIONS, MOST_OPEN, Settings

app = typer.Typer(
    name="flowspec",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VerifiedTarget = Annotated[
    str | None,
    typer.Argument(
        help="Model to prove: folder, GGUF file or hub name; default: the packaged one."
    ),
]

#: Most tokens of an answer in a conversation.
CHAT_TOKENS = 512
_URL = "FLOWSPEC_REDIS_URL"
_WHERE = f"start a pipeline with `flowspec up`, or name a running one by --redis-url or {_URL}"
_STALE = f"{_URL} names it: start it again, or unset that if this pipeline is gone"


def _print_version(*, wanted: bool) -> None:
    if wanted:
        from flowspec.transport.wire.codec import VERSION

        sys.stdout.write(f"flowspec {version('flowspec')}, wire {VERSION}\n")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _print_version(wanted=wanted),
            is_eager=True,
            help="Print the version, and that of the messages between workers.",
        ),
    ] = False,
) -> None:
    """Run one large language model split over several small machines; answer requests fast."""


@app.command()
@grouped
def generate(
    prompt: Prompt = None,
    models: ModelFlags = ModelFlags(),
    rows: RowsWay = "auto",
    jobs: PromptsAtOnce = 1,
    kv: Kv = CONTIGUOUS,
    strategy: Strategy = DEFAULT_STRATEGY,
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    sampling: SamplingFlags = SamplingFlags(),
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with `prompt`, or `turns` of which the first is used."),
    ] = None,
    raw: Raw = False,
    with_stats: WithStats = False,
    as_json: Json = False,
    record: Annotated[
        Path | None, typer.Option(help="Write a recording of the run, of one prompt, to this file.")
    ] = None,
    redis_url: Url = None,
) -> None:
    """Start a private pipeline (or use a running one), answer, report, and stop it."""
    from flowspec.cli.generate import Request, run
    from flowspec.cli.places import check_alone, setup_of, url_for_prompts

    check_alone(redis_url, models)
    private = models.given or (rows, kv) != ("auto", CONTIGUOUS)
    setup = replace(setup_of(models, strategy), rows=rows, jobs=jobs, kv=kv)
    run(
        Request(
            setup=setup,
            sampling=Sampling(*astuple(sampling)),
            strategy=strategy,
            max_new_tokens=max_new_tokens,
            raw=raw,
            as_json=as_json,
            with_stats=with_stats,
            record=record,
            url=url_for_prompts(redis_url, setup if private else None),
        ),
        prompt,
        prompts,
    )


@app.command()
@grouped
def up(
    models: ModelFlags = ModelFlags(),
    rows: RowsWay = "auto",
    jobs: JobsAtOnce = 1,
    keep_rows: KeepRows = None,
    most_rows: MostRows = 0,
    kv: Kv = CONTIGUOUS,
    persist: Persist = None,
    redis_url: OwnUrl = None,
) -> None:
    """Start a pipeline that keeps running, and print how to reach it."""
    from flowspec.cli.places import setup_of
    from flowspec.cli.service import up

    setup = replace(setup_of(models), rows=rows, jobs=jobs, keep_rows=keep_rows)
    up(replace(setup, most_rows=most_rows, kv=kv, persist=persist), redis_url)


@app.command()
@grouped
def serve(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: ApiKeyFile = None,
    models: ModelFlags = ModelFlags(),
    rows: RowsWay = "auto",
    jobs: ServedAtOnce = 8,
    keep_rows: KeepRows = None,
    most_rows: MostRows = 0,
    kv: Kv = CONTIGUOUS,
    strategy: ServedStrategy = DEFAULT_STRATEGY,
    model_name: ModelName = "",
    cors_origin: CorsOrigin = None,
    allowed_host: AllowedHost = None,
    allow_strategies: AllowStrategies = "",
    most_answers: MostAnswers = MOST_OPEN,
    most_connections: MostConnections = MOST_CONNECTIONS,
    default_tokens: DefaultTokens = None,
    redis_url: Url = None,
) -> None:
    """Start a pipeline and serve it over HTTP as OpenAI does, with a chat page."""
    from flowspec.cli.places import setup_of
    from flowspec.cli.serve import ServeRequest, serve
    from flowspec.gateway.strategies import ClientStrategies, names_of
    from flowspec.strategies import build

    setup = setup_of(models)
    build(strategy, setup.stages)
    allowed = names_of(allow_strategies)
    ClientStrategies(allowed, strategy)  # a wrong name is said before anything starts
    settings = Settings(
        "",
        name=model_name,
        strategy=strategy,
        most_open=most_answers,
        origins=tuple(cors_origin or ()),
        most_connections=most_connections,
        hosts=tuple(allowed_host or ()),
        allowed_strategies=allowed,
        default_tokens=default_tokens,
    )
    request = ServeRequest(host, port, api_key_file, settings)
    shared = replace(setup, rows=rows, jobs=jobs, keep_rows=keep_rows)
    serve(replace(shared, most_rows=most_rows, kv=kv), request, redis_url or None)


@app.command()
@grouped
def chat(
    models: ModelFlags = ModelFlags(),
    strategy: Strategy = DEFAULT_STRATEGY,
    max_new_tokens: MaxNewTokens = CHAT_TOKENS,
    sampling: SamplingFlags = SamplingFlags(),
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    redis_url: Url = None,
) -> None:
    """Converse in the terminal; Ctrl-C stops an answer, Ctrl-D ends."""
    from flowspec.cli.chat import ChatFlags, chat
    from flowspec.cli.places import check_alone, setup_of, url_for_prompts

    check_alone(redis_url, models)
    setup = setup_of(models, strategy)
    chat(
        ChatFlags(
            setup,
            Sampling(*astuple(sampling)),
            strategy,
            max_new_tokens,
            system,
            url_for_prompts(redis_url, setup if models.given else None),
        )
    )


@app.command()
def down() -> None:
    """Stop the pipeline that was started here."""
    from flowspec.cli.service import down

    down()


@app.command()
def status(redis_url: Url = None, as_json: Json = False) -> None:
    """Show a pipeline's workers and load."""
    from flowspec.cli.service import status

    status(redis_url, as_json=as_json)


@app.command()
@grouped
def submit(
    prompt: GivenPrompt,
    strategy: Strategy = DEFAULT_STRATEGY,
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    sampling: SamplingFlags = SamplingFlags(),
    raw: Raw = False,
    priority: Priority = 0,
    wait_seconds: WaitSeconds = 0.0,
    logprobs: Logprobs = None,
    redis_url: Url = None,
) -> None:
    """Submit a job to a running pipeline and print its id."""
    from flowspec.cli.jobs import submit

    spec = JobSpec(
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(*astuple(sampling)),
        strategy=strategy,
        raw=raw,
        priority=priority,
        wait_seconds=wait_seconds,
        logprobs=logprobs,
    )
    submit(spec, redis_url)


@app.command()
def watch(
    job: Annotated[str, typer.Argument(help="A job's id.")],
    with_stats: WithStats = False,
    as_json: Json = False,
    redis_url: Url = None,
) -> None:
    """Stream a job's output from its start to its end."""
    from flowspec.cli.jobs import watch

    watch(job, redis_url, as_json=as_json, with_stats=with_stats)


@app.command()
def cancel(job: Annotated[str, typer.Argument(help="A job's id.")], redis_url: Url = None) -> None:
    """End a job; its committed text stays readable."""
    from flowspec.cli.jobs import cancel

    cancel(job, redis_url)


@app.command()
def strategies(as_json: Json = False) -> None:
    """List the strategies, their sources and their options."""
    from flowspec.cli.show import strategies

    strategies(as_json=as_json)


@app.command()
def doctor(
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = None,
    device: Device = None,
    redis_url: Url = None,
    as_json: Json = False,
) -> int:
    """Say what may keep a run from working here, each finding with its remedy."""
    from flowspec.cli.doctor import doctor, survey

    wanted = (dtype or "auto", device or "auto")
    return doctor(target, draft, *wanted, redis_url, survey, as_json=as_json)


@app.command()
def verify(
    target: VerifiedTarget = None,
    draft: Draft = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_dtype: DraftDtype = None,
    stages: Annotated[
        int, typer.Option(callback=in_range(1, 64, "1 to 64"), help="Blocks to split it into.")
    ] = 3,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", help="Strategy to prove; repeatable; default: four of them."),
    ] = None,
    max_new_tokens: Simulated = 32,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with `prompt`; default: four packaged prompts."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Prove that a pipeline of these models gives what plain decoding gives, on this machine."""
    from flowspec.cli.verify import Wanted, verify

    return verify(
        Wanted(
            target,
            draft,
            dtype or "auto",
            device or "auto",
            draft_dtype or "auto",
            stages,
            max_new_tokens,
            tuple(strategies or ()),
            prompts,
            as_json,
        )
    )


@app.command()
def profile(
    target: Target = None,
    draft: Timed = None,
    rows: Annotated[str, typer.Option(help="Row counts to time.")] = "1,4,16,64",
    stages: SplitOver = 4,
    repeats: Repeats = 15,
    latency_ms: Latency = 0.2,
    mbit: Mbit = 1000.0,
    dtype: Dtype = None,
    draft_dtype: DraftDtype = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the profile to this .toml; default: stdout.")
    ] = None,
) -> None:
    """Measure this machine and write a profile of it for simulations."""
    from flowspec.cli.profile import profile

    dtypes = (dtype or "auto", draft_dtype or "auto")
    profile(target, draft, rows, stages, repeats, latency_ms, mbit, out, dtypes)


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model to split: folder, GGUF file, hub name or a lone config; default: the "
            "packaged one.",
            show_default=False,
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Measure nothing: estimate from --boxes and the config.")
    ] = False,
    boxes: Boxes = None,
    draft: Draft = None,
    dtype: PlannedDtype = "auto",
    context: Context = None,
    link_ms: LinkMs = 0.2,
    mbit: Mbit = 1000.0,
    strategy: Strategy = "auto",
    acceptance: Acceptance = None,
    jobs: Jobs = 1,
    out: Annotated[Path, typer.Option(help="Write the cluster file here.")] = Path("cluster.toml"),
    redis_url: ProbesUrl = None,
) -> None:
    """Choose which box gets which layers, predict its speed, and write a cluster file."""
    from flowspec.cli.plan import PlanRequest, plan

    given = (model, dry, boxes, draft, dtype, context, link_ms, mbit, strategy, acceptance)
    plan(PlanRequest(*given, jobs, out, redis_url or None))


@app.command()
def simulate(
    prompt: Prompt = None,
    prompts: PromptFile = None,
    profile: Cluster = "jetson-7b",
    broker: Broker = None,
    rows: SimulatedRows = None,
    stages: Pretended = None,
    strategy: Strategy = DEFAULT_STRATEGY,
    draft: Drafter = "slm",
    temperature: Temperature = 0.0,
    seed: Seed = 1,
    max_new_tokens: Simulated = 48,
    as_json: Json = False,
) -> None:
    """Simulate a strategy on a cluster described by a profile, and print its speed."""
    from flowspec.cli.bench import simulate

    simulate(
        prompt,
        prompts,
        profile,
        stages,
        strategy,
        draft,
        temperature,
        seed,
        max_new_tokens,
        as_json=as_json,
        broker=broker,
        rows=rows,
    )


@app.command()
def bench(
    ctx: typer.Context,
    profile: Cluster = "jetson-7b",
    strategies: Strategies = None,
    draft: Drafters = "slm",
    temperatures: Annotated[str, typer.Option(help="Temperatures, by commas.")] = "0",
    stages: Annotated[
        str | None, typer.Option(help="Stage counts, by commas; default: the profile's first.")
    ] = None,
    tokens: Tokens = None,
    prompts: PromptFile = None,
    half: Annotated[
        str,
        typer.Option(help="tuning, measuring or all: half of each set's prompts, or all of them."),
    ] = "all",
    no_loops: Annotated[
        bool, typer.Option("--no-loops", help="Leave out prompts whose text repeats itself.")
    ] = False,
    baseline: Annotated[
        str, typer.Option(help="Strategy that speedups are relative to.")
    ] = "autoregressive",
    seed: Seed = 1,
    sweep: Sweep = None,
    broker: Broker = None,
    rows: SimulatedRows = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this .json.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the table to this .md; default: stdout.")
    ] = None,
    compare: Pair = None,
) -> None:
    """Compare strategies, draft sources and temperatures in one simulated run."""
    from flowspec.cli import bench as commands

    if compare is not None:
        check_beside(ctx, "--compare")
        return commands.compare(*compare)
    given = (
        profile,
        strategies or ["all"],
        draft,
        temperatures,
        stages,
        tokens,
        prompts,
        half,
        no_loops,
        baseline,
    )
    return commands.bench(
        commands.Options(
            *given,
            seed,
            sweep or [],
            out,
            markdown,
            broker,
            rows,
        )
    )


@app.command()
def shard(
    target: Annotated[str, typer.Argument(help="The model: folder, GGUF file or hub name.")],
    out: Annotated[Path, typer.Option(help="Folder to make; it gets stage-1, stage-2 ... draft.")],
    stages: Stages = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Instead of --stages: each stage's block of layers, like '0-5 5-12'."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Precision of the layers' weights; default: as the model has them."),
    ] = None,
    head: Annotated[
        bool,
        typer.Option("--head", help="Give the draft worker what an EAGLE head reads."),
    ] = False,
) -> None:
    """Cut a model into a folder for each stage, so that a machine holds only its own part."""
    from flowspec.cli.shard import shard

    shard(target, out, stages, layers, dtype, head=head)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A GGUF file; of a split one, any part.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")
    ] = "float32",
) -> None:
    """Write a GGUF file's model as a folder that other programs read; FlowSpec reads the file."""
    from flowspec.model.weights.convert import write_folder
    from flowspec.model.weights.directory import open_directory

    write_folder(open_directory(str(file)), out, dtype)
    sys.stderr.write(f"wrote {out}\n")


@app.command()
def acl(
    out: Annotated[Path, typer.Option("--out", help="A new folder for the files.")],
    stages: Stages = None,
    middles: Annotated[int, typer.Option("--middles", help="Middle models, if any.")] = 0,
    redis_url: Annotated[
        str, typer.Option("--redis-url", help="The broker, without a user.")
    ] = "redis://localhost:6379/0",
) -> None:
    """Write an ACL file for a broker, with a user and a password for each role of a pipeline."""
    from flowspec.cli.acl import acl

    acl(out, stages or 4, middles, redis_url)


@app.command()
def replay(
    recording: Annotated[Path, typer.Argument(help="A file made with `generate --record`.")],
) -> None:
    """Re-run a recording without model or broker; fails at the first difference."""
    from flowspec.cli.show import replay

    replay(recording)


for _command in app.registered_commands:
    _command.cls = Command


def main() -> None:
    """Entry point: an expected error is one line on stderr and status 1."""
    with checked_stdout():
        _main()


def _main() -> None:
    from flowspec import observe

    try:
        observe.configure()
        with naming_what_is_missing():
            sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except UsageError as error:
        command = (
            f" {error.ctx.info_name}"
            if error.ctx is not None and error.ctx.parent is not None
            else ""
        )
        said = " ".join(error.format_message().split()).rstrip(".")
        sys.stderr.write(f"flowspec: {said}; see `flowspec{command} --help`\n")
        sys.exit(2)
    except BrokerUnreachable as error:
        from flowspec.cli.places import was_running
        from flowspec.transport.connections.connection import DEFAULT_URL, redact

        named = os.environ.get(_URL)
        where = _STALE if named and redact(named) == error.silent else _WHERE
        if error.silent == DEFAULT_URL and was_running():
            where = f"the pipeline that ran here has ended; {_WHERE}"
        # One that answers, though it does not serve, is the broker that was meant.
        hint = f"; {where}" if error.silent else ""
        sys.stderr.write(f"flowspec: {error}{hint}\n")
        sys.exit(1)
    except StdoutError:
        raise
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        sys.stderr.write(f"flowspec: {line}\n")
        sys.exit(1)
