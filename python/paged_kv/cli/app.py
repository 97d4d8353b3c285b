"""The commands and their options; what they do is in the modules beside this one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import paged_kv

app = typer.Typer(
    help="A paged KV cache for LLM serving: try it on a real model, watch it, plan for one, or measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench_app = typer.Typer(help="Measure the cache against other ways to do the same.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

_EXTRA_OF = dict.fromkeys(("gguf", "jinja2", "platformdirs", "tokenizers"), "llm")
_EXTRA_OF |= dict.fromkeys(("PIL", "rich", "threadpoolctl"), "cli")
_EXTRA_OF["matplotlib"] = "plot"

Model = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="PATH", help="A Llama-architecture GGUF file instead of SmolLM2-135M-Instruct."
    ),
]
PageSize = Annotated[int, typer.Option("--page-size", min=1, max=2**32 - 1, help="Tokens per page.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="Element type of keys and values: float32, float16, bfloat16, int8 or float8_e4m3fn."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most.")]
Telemetry = Annotated[
    Path | None,
    typer.Option("--telemetry", metavar="FILE", help="Publish the cache's state there, for `paged-kv map`."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures as JSON.")
]


@contextmanager
def _friendly_errors() -> Iterator[None]:
    """Turn expected failures into one message and an exit status, without a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA_OF:
            raise
        typer.echo(f"paged-kv: this command needs {module}, which is not installed.", err=True)
        typer.echo(f"Install it with: pip install 'paged-kv[{_EXTRA_OF[module]}]'", err=True)
        raise typer.Exit(2) from None
    except (paged_kv.PagedKvError, ValueError, RuntimeError, MemoryError, OSError) as error:
        # RuntimeError: the llm package's ModelError, which can't be named before that is known to be there.
        typer.echo(f"paged-kv: {error}", err=True)
        raise typer.Exit(1) from None


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(paged_kv.__version__)
        raise typer.Exit


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="All are answered in one batch.")],
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(max=1.0, help="Sample from the most likely tokens only.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    model: Model = None,
    page_size: PageSize = 16,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of keys and values. float32 if not given, float16 on a device."),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where keys and values are: cpu, ascend:0 (an NPU).")
    ] = "cpu",
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, with token ids.")
    ] = False,
    telemetry: Telemetry = None,
) -> None:
    """Answer prompts, streaming the text."""
    with _friendly_errors():
        from paged_kv.cli.generate import run_generate
        from paged_kv.llm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        run_generate(
            prompts,
            params,
            system=system,
            raw=raw,
            model=model,
            page_size=page_size,
            dtype=dtype,
            device=device,
            json_lines=json_lines,
            telemetry=telemetry,
        )


@app.command()
def demo(
    threads: Annotated[int, typer.Option(min=1, help="Requests, each in a thread of its own.")] = 12,
    max_tokens: MaxTokens = 48,
    model: Model = None,
    page_size: PageSize = 16,
    dtype: Dtype = "float32",
    check: Annotated[
        bool, typer.Option("--check", help="Also compute every answer without paging, and compare.")
    ] = False,
    telemetry: Telemetry = None,
) -> None:
    """Serve many requests at once from one cache, and show what paging saved."""
    with _friendly_errors():
        from paged_kv.cli.demo import run_demo

        run_demo(
            threads=threads,
            max_tokens=max_tokens,
            model=model,
            page_size=page_size,
            dtype=dtype,
            check=check,
            telemetry=telemetry,
        )


@app.command()
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A Hugging Face config.json, or the folder it is in."),
    ] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Instead of a config: layers.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Elements of a head's key.")] = None,
    v_head_dim: Annotated[
        int | None, typer.Option(min=0, help="Of its value, where that differs; 0: read from the key.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each layer sees, its own included.")
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", help="bfloat16, float16, float32, int8 or fp8; may be repeated. All, if not given."
        ),
    ] = None,
    page_sizes: Annotated[
        list[int] | None,
        typer.Option("--page-size", min=1, help="May be repeated; requests are counted with the first."),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", min=1, help="Tokens of a request, prompt and answer; may be repeated."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for pages, such as 40GiB.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV or JSONL of prompt and answer lengths, to compare on."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Longest request, if not the model's context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model's KV cache takes, what fits in a budget, and what is wasted."""
    with _friendly_errors():
        from paged_kv.cli.plan import figures, show, uniform_shape
        from paged_kv.plan import load_config

        if config is None:
            if num_layers is None or num_kv_heads is None or head_dim is None:
                raise typer.BadParameter("give a config, or --num-layers, --num-kv-heads and --head-dim")
            shape = uniform_shape(num_layers, num_kv_heads, head_dim, v_head_dim, window)
        elif (num_layers, num_kv_heads, head_dim, v_head_dim, window) != (None,) * 5:
            raise typer.BadParameter("give a config or the options that describe a model, not both")
        else:
            shape = load_config(config)
        show(
            figures(
                shape,
                dtypes=dtypes,
                page_sizes=page_sizes,
                lengths=lengths,
                budget=budget,
                trace=trace,
                context=context,
            ),
            as_json=as_json,
        )


@app.command("map")
def map_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where a program publishes its cache.")],
    refresh: Annotated[
        float, typer.Option(min=0.05, max=3600.0, help="Seconds between looks at the file.")
    ] = 0.5,
    snapshot: Annotated[
        Path | None,
        typer.Option("--snapshot", metavar="FILE", help="Draw it once, into a .svg or .png file."),
    ] = None,
) -> None:
    """Watch the pages of a running program: who holds them, what is shared, how fast they change.

    The program is `paged-kv demo` or `generate` with --telemetry, or any that runs a
    paged_kv.telemetry.Publisher.
    """
    with _friendly_errors():
        from paged_kv.cli.map import run_map

        run_map(file, refresh=refresh, snapshot=snapshot)


@bench_app.command("attention")
def bench_attention(
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--case", help="d1 to d6 (decode), c1 (with a shared prefix), p1, p2 (prefill); all if not given."
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None, typer.Option("--dtype", help="Element types; all if not given.")
    ] = None,
    page_sizes: Annotated[
        list[int] | None,
        typer.Option("--page-size", min=1, max=2**32 - 1, help="Tokens per page; 16 and 128 if not given."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, max=2**16, help="Threads; 1 and as many as there are if not given."),
    ] = None,
    isas: Annotated[
        list[str] | None,
        typer.Option(
            "--isa",
            help="Instruction sets, such as avx2; the ratio of each but the first is its speed beside the"
            " first's. PAGED_KV_ISA or the fastest if not given.",
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, max=10**6, help="Repetitions of each case.")] = 5,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Also draw a roofline: .png, .svg or .pdf, by matplotlib."
        ),
    ] = None,
) -> None:
    """Measure attention beside reading the same memory, or multiply-adds, and beside numpy: some minutes.

    Options that choose can be given several times.
    """
    _bench(
        "attention",
        json_file,
        repetitions=repetitions,
        cases=cases,
        dtypes=dtypes,
        page_sizes=page_sizes,
        threads=threads,
        isas=isas,
        plot_file=plot_file,
    )


@bench_app.command("pool")
def bench_pool(json_file: JsonFile = None) -> None:
    """Measure taking and giving back pages, beside other free lists."""
    _bench("pool", json_file)


@bench_app.command("cache")
def bench_cache(json_file: JsonFile = None) -> None:
    """Measure a decode step's bookkeeping, fork, and copy-on-write."""
    _bench("cache", json_file)


def _bench(name: str, json_file: Path | None, **choices: Any) -> None:
    with _friendly_errors():
        from paged_kv.cli.bench import run_bench

        run_bench(name, json_file, **choices)
