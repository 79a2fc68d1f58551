"""Commands of ``theory-lab`` beyond the simulations: one module a command, imported when it is asked for.

A module's name is its command's name, and it holds a click command of the name ``command``. At its head it imports
nothing heavier than click: ``theory-lab --help`` imports every one of them.
"""

from __future__ import annotations

import importlib

import click

#: In the order of ``theory-lab --help``, after the simulations.
NAMES: tuple[str, ...] = (
    "models",
    "probe",
    "explore",
    "corpus",
    "train",
    "evaluate",
    "calibrate",
    "campaign",
    "reproduce",
    "report",
    "results",
    "selftest",
)


class Group(click.Group):
    """A click group that knows the commands of this package as well as its own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return [*self.commands, *NAMES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported if need be."""
        if cmd_name in NAMES:
            found: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
            return found
        return super().get_command(ctx, cmd_name)
