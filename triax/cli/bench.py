"""`triax bench`: measure a running server."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure a running server.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure a running server."""


@app.command()
def serve(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Talks at once, where there is no rate.")] = 8,
    rate: Annotated[float, typer.Option(min=0.0, help="Talks that begin each second, Poisson.")] = 0.0,
    prompt: Annotated[int, typer.Option(min=1, help="Random tokens that each turn adds.")] = 512,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a talk; each repeats all before it.")] = 1,
    shared: Annotated[int, typer.Option(min=0, help="Tokens that all talks begin with.")] = 0,
    pause: Annotated[float, typer.Option(min=0.0, help="Mean seconds between the turns of a talk.")] = 0.0,
    seconds: Annotated[float, typer.Option(min=0.0, help="No talk begins after so many seconds; 0: no limit.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same prompts.")] = 0,
    key: Annotated[str, typer.Option(help="API key of the server.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the whole report, every request in it, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Load a server and tell times to tokens, throughput, errors and reuse of prefixes."""
    import json
    import signal

    from triax.cli.extra import needs
    from triax.cli.progress import REQUESTS, Count

    with needs("serve", "bench"):
        from triax.serve import bench as room
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    load = room.Load(requests, concurrency, rate, prompt, answer, turns, shared, seconds, pause, seed)
    room.check_files(out, plot)
    with Count("bench", None if seconds else requests, REQUESTS) as progress:
        tree = room.Bench(url, load, key, progress.add).run()
    if out is not None:
        out.write_text(json.dumps(tree) + "\n", encoding="utf-8")
    if plot is not None:
        room.plot(tree, plot)
    if as_json:
        print(json.dumps({name: value for name, value in tree.items() if name != "measured"}))
    else:
        print("\n".join(room.lines(tree)))
    if tree["interrupted"]:
        typer.echo("bench: interrupted; told is what had ended until then", err=True)
        raise typer.Exit(130)
    if len(tree["errors"]) and not any(not one["error"] for one in tree["measured"]):
        raise typer.Exit(1)
