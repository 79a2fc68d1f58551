"""``theory-lab report``: results as one page, or as tables."""

from __future__ import annotations

import click

from theory_lab.outside import visible


@click.command("report")
@click.argument("results", nargs=-1, metavar="RESULTS...")
@click.option("--html", metavar="FILE", help="One page that needs nothing else: tables that sort and filter, pictures.")
@click.option("--md", metavar="FILE", help="Tables in Markdown.")
@click.option("--latex", metavar="FILE", help="Tables as a LaTeX document.")
@click.option("--title", default="Theory Lab report", show_default=True, metavar="TEXT", help="Heading.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    results: tuple[str, ...], html: str | None, md: str | None, latex: str | None, title: str, quiet: bool
) -> int:
    """Write results as one page, or as tables.

    RESULTS are folders that theory-lab wrote with --out, and files of rows (.parquet, .csv, .json).

    \b
    theory-lab check --out results/first
    theory-lab report results/first --html report.html
    theory-lab report results/first --md tables.md --latex tables.tex
    """
    from theory_lab.report import write_report

    def say(message: str) -> None:
        if not quiet:
            click.echo(visible(f"theory-lab: {message}"), err=True)

    for path in write_report(results, html, md, latex, title, say):
        click.echo(visible(f"report: {path}, {path.stat().st_size / 1e6:.2f} MB"), err=True)
    return 0
