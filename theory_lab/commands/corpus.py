"""``theory-lab corpus``: text as tokens, to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from theory_lab.commands.parsing import one_number, one_whole
from theory_lab.errors import InputError


@click.group("corpus")
def command() -> None:
    """Build and look at corpora: folders of tokens that models are trained on."""


@command.command("build")
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
@click.option("--out", required=True, metavar="DIR", help="The corpus: a new or empty folder.")
@click.option("--vocab", metavar="NUMBER",
              help="Tokens of its own tokenizer, 259 to 65,536. Default: 2048, and 8192 for 64 MB and "
              "more.")  # fmt: skip
@click.option("--debian", is_flag=True, help="Read Debian's documentation packages, before any SOURCE.")
@click.option("--packages", metavar="NAMES", help="Which of them, separated by commas. Default: all ten.")
@click.option("--debs", metavar="DIR", help="Take the packages' .deb files from here instead of downloading them.")
@click.option("--name", metavar="TEXT", help="Of the corpus. Default: its folder's.")
@click.option("--validation", default="0.03", show_default=True, metavar="SHARE", help="Of the text, by document.")
@click.option("--max-tokens", metavar="NUMBER", help="A random choice of documents of at most so many tokens.")
@click.option("--license", metavar="TEXT", help="Of the sources, for the manifest.")
@click.option("--column", default="text", show_default=True, metavar="NAME",
              help="Where .jsonl files and data sets keep the text.")  # fmt: skip
@click.option("--config", metavar="NAME", help="A data set's configuration, such as sample-10BT.")
@click.option("--split", default="train", show_default=True, metavar="NAME", help="A data set's split.")
@click.option("--keep-repetitions", is_flag=True, help="Leave nothing out.")
@click.option("--quiet", is_flag=True, help="No progress.")
def build_command(**options: Any) -> None:
    """Make a corpus of files, folders, data sets or Debian's documentation.

    SOURCE is a text file (.txt, .md, .html, .jsonl, .gz, ...), a folder of them, or owner/name of a data set of the
    Hugging Face Hub, which is streamed. Repeated documents and paragraphs are left out, validation documents are
    never trained on, and a byte-level BPE tokenizer is learned from the rest.

    \b
    theory-lab corpus build texts/ book.txt --out corpora/mine --vocab 2048
    theory-lab corpus build --debian --out corpora/debian
    theory-lab corpus build HuggingFaceFW/fineweb-edu --config sample-10BT --max-tokens 100e6 --out corpora/edu
    """
    from theory_lab.corpus.building import Plan, build_corpus
    from theory_lab.progress import make_progress

    for name in ("packages", "debs"):
        if options[name] is not None and not options["debian"]:
            raise InputError(name, options[name], "it goes with --debian")
    packages: tuple[str, ...] = ()
    if options["debian"]:
        from theory_lab.corpus.debian import PACKAGES

        typed = options["packages"]
        packages = (
            tuple(PACKAGES) if typed is None else tuple(part.strip() for part in typed.split(",") if part.strip())
        )
    plan = Plan(
        sources=options["sources"],
        debian=packages,
        debs=Path(options["debs"]) if options["debs"] is not None else None,
        vocabulary=None if options["vocab"] is None else one_whole(options["vocab"], "vocab"),
        name=options["name"],
        validation=one_number(options["validation"], "validation"),
        max_tokens=None if options["max_tokens"] is None else one_whole(options["max_tokens"], "max-tokens"),
        license=options["license"],
        column=options["column"],
        config=options["config"],
        split=options["split"],
        deduplicate=not options["keep_repetitions"],
    )
    progress = None if options["quiet"] else make_progress(verb="encoding", unit="documents")
    try:
        corpus = build_corpus(options["out"], plan, progress=progress)
    finally:
        if progress is not None:
            progress.stop()
    _print(corpus)


@command.command("show")
@click.argument("corpus", metavar="DIR")
@click.option("--format", "form", default="table", show_default=True, type=click.Choice(["table", "json"]),
              help="What goes to standard output.")  # fmt: skip
def show_command(corpus: str, form: str) -> None:
    """What a corpus is made of: sources, licenses, tokens."""
    from theory_lab.corpus import Corpus

    found = Corpus.open(corpus)
    if form == "json":
        click.echo(json.dumps(found.manifest, indent=1, ensure_ascii=False))
    else:
        _print(found)


def _print(corpus: Any) -> None:
    from theory_lab.outside import visible
    from theory_lab.render import _console, _table, plain

    table = _table(
        ("source", "l"), ("version", "w"), ("license", "w"), ("documents", "r"), ("kept", "r"), ("tokens", "r"),
        title=f"{corpus.name}, vocabulary {corpus.vocab_size:,}",
    )  # fmt: skip
    for source in corpus.manifest["sources"]:
        numbers = (f"{source[key]:,}" for key in ("documents", "kept_documents", "tokens"))
        table.add_row(*(plain(source[key]) for key in ("name", "version", "license")), *numbers)
    _console().print(table)
    for split, count in corpus.manifest["splits"].items():
        each = count["characters"] / max(count["tokens"], 1)
        click.echo(
            f"{visible(split)}: {count['documents']:,} documents, {count['tokens']:,} tokens, "
            f"{each:.2f} characters a token"
        )
    click.echo(visible(f"folder: {corpus.path}"))
