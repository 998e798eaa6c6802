"""Shared by all tests: pytester, and a skip with reason where the lab cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.requirements import missing

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking: list[str] | None = None
    for item in items:
        if item.get_closest_marker("lab"):
            lacking = missing() if lacking is None else lacking
            if lacking:
                item.add_marker(pytest.mark.skip(reason="the lab cannot be started: " + "; ".join(lacking)))


@pytest.fixture
def fixtures() -> Path:
    return ROOT / "tests" / "fixtures"
