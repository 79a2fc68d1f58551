"""Campaigns: many trainings of one plan, measured alike, in slices of time, on one GPU or several.

A plan is a TOML file under ``experiments/*/campaigns``: what all runs share, what each differs in, what is measured on
each finished model, and which figures and tables the numbers fill. See docs/campaigns.md.
"""

from theory_lab.campaigns.gather import gather
from theory_lab.campaigns.plan import Campaign, Run, list_plans, read_plan
from theory_lab.campaigns.work import run_campaign

__all__ = ["Campaign", "Run", "gather", "list_plans", "read_plan", "run_campaign"]
