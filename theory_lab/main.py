"""Entry point of the ``theory-lab`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its packages, say in one line how to get them."""
    try:
        import click  # noqa: F401  # only whether it is there
    except ImportError:
        sys.stderr.write("theory-lab: the command line needs more packages: pip install 'theory-lab[cli]'\n")
        raise SystemExit(2) from None
    try:
        from theory_lab.cli import run
    except KeyboardInterrupt:
        sys.stderr.write("theory-lab: error: interrupted\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
