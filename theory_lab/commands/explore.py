"""``theory-lab explore``: look at a model's attention maps by hand."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from theory_lab.commands.parsing import one_whole
from theory_lab.errors import InputError
from theory_lab.grids import parse_wholes

if TYPE_CHECKING:
    from theory_lab.settings import Progress


@click.command("explore")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--text", metavar="FILE", help="Text to read; - is standard input. Default: a shipped text.")
@click.option("--length", metavar="NUMBER", help="Read the text's first tokens up to so many. Default: all, or for a "
              "shipped text 2048, or what the model's positions allow.")  # fmt: skip
@click.option("--as", "as_", multiple=True, metavar="MECHANISM",
              help="Show tra, tda, entmax or eta weights on the model's own queries and keys beside its own, with "
              "options as in tra:beta=0.8. Repeatable.")  # fmt: skip
@click.option("--compare", metavar="MODEL", help="A second model, side by side on the same text.")
@click.option("--layers", multiple=True, metavar="NUMBERS", help="Layers, from 0, to keep. Default: all.")
@click.option("--layer", metavar="NUMBER", help="Layer to open first. Default: the first.")
@click.option("--head", default="0", show_default=True, metavar="NUMBER", help="Head to open first.")
@click.option("--port", default="0", show_default=True, metavar="NUMBER", help="Port on 127.0.0.1; 0 takes a free one.")
@click.option("--open", "browser", is_flag=True, help="Open the page in the browser.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
@click.option("--dtype", default="float32", show_default=True, metavar="NAME",
              help="float32, bfloat16, float16 or auto; the queries and keys are kept in it.")  # fmt: skip
@click.option("--attention", metavar="NAME", help="transformers' implementation, such as sdpa or eager.")
@click.option("--trust-remote-code", is_flag=True, help="Let the model's folder run its own code.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(**options: Any) -> int:
    """Look at a model's attention maps by hand: a page on this machine, zoomed with the mouse.

    MODEL is a known model (see theory-lab models), a folder, a .gguf file or a Hub id; smollm2-135m if left out. The
    page is for this machine only (127.0.0.1), and its address holds a token. Ctrl-C ends it.

    \b
    theory-lab explore
    theory-lab explore smollm2-135m --text book.txt --as tra
    theory-lab explore my-model --text book.txt --as tda --length 4096
    """
    import importlib.util

    length = None if options["length"] is None else one_whole(options["length"], "length")
    layers = [value for text in options["layers"] for value in parse_wholes(text, "layers")] or None
    layer = None if options["layer"] is None else one_whole(options["layer"], "layer")
    head, port = one_whole(options["head"], "head"), one_whole(options["port"], "port")
    if importlib.util.find_spec("torch") is None:
        raise InputError("explore", "torch is not installed", "pip install 'theory-lab[models]'")
    from theory_lab.explore.server import ExplorerServer, serve
    from theory_lab.probes.whatif import parse_mechanism

    mechanisms = [parse_mechanism(text) for text in options["as_"]]
    text = _text(options["text"])
    # The port before the model: that it is in use should show now.
    server = ExplorerServer(port)
    try:
        session = _session(options, text, length, layers, layer, head, mechanisms)
        serve(session, server=server, ready=lambda url: _ready(url, options["browser"]))
    except KeyboardInterrupt:
        if server.session is None:
            raise
        click.echo("theory-lab: the explorer has ended", err=True)
    finally:
        server.server_close()
    return 0


def _text(path: str | None) -> Any:
    from theory_lab.probes.texts import read_text, shipped

    return shipped()[0] if path is None else read_text(path)


def _session(
    options: dict[str, Any], text: Any, length: int | None, layers: list[int] | None, layer: int | None, head: int,
    mechanisms: list[Any],
) -> Any:  # fmt: skip
    from theory_lab.explore.session import Session
    from theory_lab.models import load_model
    from theory_lab.models.catalog import DEFAULT_MODEL
    from theory_lab.probes.capturing import capture
    from theory_lab.progress import make_progress

    captures = []
    for name in (options["model"] or DEFAULT_MODEL, options["compare"]):
        if name is None:
            continue
        loaded = load_model(
            name, device=options["device"], dtype=options["dtype"], attention=options["attention"],
            trust_remote_code=options["trust_remote_code"], quiet=options["quiet"],
        )  # fmt: skip
        most = loaded.max_positions
        asked = length
        if asked is None and options["text"] is None:
            asked = min(2048, most or 2048)
        if asked is not None and most is not None and asked > most:
            click.echo(f"theory-lab: {name} was made for {most:,} positions, and {asked:,} are read", err=True)
        total = loaded.layers if layers is None else len(layers)
        progress = make_progress(options["quiet"], "reading", "layers")
        progress.start(total, 0, total)
        try:
            captures.append(capture(loaded, text, length=asked, layers=layers, on_layer=partial(_advance, progress)))
        finally:
            progress.stop()
        if captures[-1].unseen:
            numbers, reasons = zip(*captures[-1].unseen.items(), strict=True)
            click.echo(f"theory-lab: layers not watched: {', '.join(map(str, numbers))} ({reasons[0]})", err=True)
    return Session(captures, mechanisms, layer, head)


def _advance(progress: Progress, done: int) -> None:
    progress.advance(1, 1.0)


def _ready(url: str, browser: bool) -> None:
    click.echo(f"explorer: {url}")
    click.echo("theory-lab: Ctrl-C ends it; the address is for this machine only", err=True)
    if browser:
        import webbrowser

        webbrowser.open(url)
