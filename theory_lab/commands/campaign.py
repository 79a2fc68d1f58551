"""``theory-lab campaign``: train and measure every model of a plan, in slices of time."""

from __future__ import annotations

from typing import Any

import click

from theory_lab.commands.parsing import EXIT_INTERRUPTED, fail, one_number, one_whole
from theory_lab.outside import visible


@click.group("campaign")
def command() -> None:
    """Train and measure many models by one plan, in slices of time.

    A plan says what all runs share, what each differs in, and which figures and tables the results fill.

    \b
    theory-lab campaign list
    theory-lab campaign run language --corpus CORPUS --out runs/language --device cuda --processes 6 --minutes 10
    theory-lab campaign gather language --out runs/language --into experiments
    """


@command.command("list")
def list_command() -> int:
    """The plans that ship with the toolkit."""
    from theory_lab.campaigns.plan import list_plans, read_plan

    for name in list_plans():
        plan = read_plan(name)
        click.echo(f"{name:12}  {len(plan.runs):3} runs  {plan.title}")
    return 0


@command.command("run")
@click.argument("plan")
@click.option("--out", required=True, metavar="DIR", help="Folder of results; what is finished there stays.")
@click.option("--corpus", metavar="DIR", help="Corpus to train on, as theory-lab corpus build makes it.")
@click.option(
    "--device", "devices", multiple=True, metavar="NAME", help="cpu, cuda or cuda:N; repeat for several GPUs."
)
@click.option("--processes", default="1", show_default=True, metavar="NUMBER", help="Worker processes a device.")
@click.option("--minutes", metavar="NUMBER", help="Length of this slice; the next run of the command goes on.")
@click.option("--only", multiple=True, metavar="RUN", help="Only these runs. Repeatable.")
@click.option("--quiet", is_flag=True, help="No progress.")
def run_command(plan: str, **options: Any) -> int:
    """Train and measure what is not finished yet.

    Exit code: 0 everything is finished, 3 the slice ended first, 1 a run failed, 2 bad usage.
    """
    from theory_lab.campaigns import read_plan, run_campaign
    from theory_lab.progress import make_progress

    processes = one_whole(options["processes"], "processes")
    minutes = None if options["minutes"] is None else one_number(options["minutes"], "minutes")
    campaign = read_plan(plan)
    try:
        done = run_campaign(
            campaign,
            options["out"],
            corpus=options["corpus"],
            devices=options["devices"] or ("cpu",),
            processes=processes,
            minutes=minutes,
            only=options["only"],
            progress=make_progress(options["quiet"], "training", "runs"),
        )
    except KeyboardInterrupt:
        fail("interrupted")
        click.echo("what is finished is kept: the same command goes on, from the last checkpoints", err=True)
        return EXIT_INTERRUPTED
    for folder, why in done.failed.items():
        click.echo(visible(f"failed: {folder}: {why}"), err=True)
    click.echo(f"{done.finished} of {done.finished + done.remaining} runs are finished")
    return 1 if done.failed else 3 if done.remaining else 0


@command.command("gather")
@click.argument("plan")
@click.option("--out", required=True, metavar="DIR", help="Folder of results.")
@click.option("--into", default="results", show_default=True, metavar="DIR",
              help="Measured numbers go to DIR/<paper>/measured; theory-lab reproduce draws them.")  # fmt: skip
def gather_command(plan: str, out: str, into: str) -> int:
    """Write the numbers behind the figures and tables that a campaign fills."""
    from theory_lab.campaigns import gather, read_plan

    for path in gather(read_plan(plan), out, into):
        click.echo(visible(path))
    return 0
