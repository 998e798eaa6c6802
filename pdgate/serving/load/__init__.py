"""Sustained load: an open-loop schedule played by Locust in a process of its own, every request a record."""

from pdgate.serving.load.plan import LoadPlan, LoadPrompt, Slot, Stage, schedule
from pdgate.serving.load.run import LoadFailed, LoadResult, end_early, run_load

__all__ = ["LoadFailed", "LoadPlan", "LoadPrompt", "LoadResult", "Slot", "Stage", "end_early", "run_load", "schedule"]
