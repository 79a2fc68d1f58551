"""Figures and tables of the papers, and our own, from data: ``experiments/<paper>/<name>.toml``."""

from __future__ import annotations

from theory_lab.reproduce.spec import Experiment, experiments, load, select

__all__ = ["Experiment", "experiments", "load", "select"]
