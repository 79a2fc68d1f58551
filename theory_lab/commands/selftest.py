"""``theory-lab selftest``: the calibration suite, and a certificate of what it found."""

from __future__ import annotations

from typing import Any

import click

from theory_lab.commands.parsing import EXIT_HOLDS, EXIT_INTERRUPTED, EXIT_VIOLATED, fail, one_whole
from theory_lab.errors import InputError


@click.command("selftest")
@click.option("--size", default="quick", show_default=True, type=click.Choice(["quick", "standard", "nightly"]),
              help="How much is drawn: seconds, minutes or an hour.")  # fmt: skip
@click.option("--seed", default="0", show_default=True, metavar="INTEGER", help="Same seed, same outcome.")
@click.option("--only", multiple=True, metavar="GROUP",
              help="known answers, random streams, noise, intervals, agreement or verdicts. Repeatable. "
              "Default: all.")  # fmt: skip
@click.option(
    "--processes",
    default="1",
    show_default=True,
    metavar="INTEGER",
    help="Worker processes that draw side by side. The outcome is the same.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the certificate, every finding included, here.")
@click.option("--full", is_flag=True, help="Print every finding.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(**options: Any) -> int:
    """Test what is installed: is it as correct and as calibrated as it says?

    Compares with constants derived to 40 digits, with distributions summed exactly, and with the laws that draws,
    intervals and verdicts must follow; prints a certificate. It needs neither torch nor a network.

    Exit code: 0 passed, 1 failed, 2 bad usage.

    \b
    theory-lab selftest
    theory-lab selftest --size standard --json certificate.json
    """
    from pathlib import Path

    seed, out = one_whole(options["seed"], "seed"), options["json_file"]
    processes = one_whole(options["processes"], "processes")
    if out is not None:
        if not out or Path(out).is_dir():
            raise InputError("json", out, "a file is allowed, and this is a folder")
        if not Path(out).absolute().parent.is_dir():
            raise InputError("json", out, "its folder has to exist")
    from theory_lab.progress import make_progress
    from theory_lab.selftest import run_selftest
    from theory_lab.store import write_whole

    try:
        found = run_selftest(
            options["size"], seed, groups=options["only"] or None, processes=processes,
            progress=make_progress(options["quiet"], "testing", "checks"),
        )  # fmt: skip
    except KeyboardInterrupt:
        fail("interrupted; nothing was written")
        return EXIT_INTERRUPTED
    click.echo(found.to_text(options["full"]))
    if out is not None:
        write_whole(out, found.to_json().encode())
    return EXIT_HOLDS if found.passed else EXIT_VIOLATED
