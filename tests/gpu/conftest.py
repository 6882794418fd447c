"""Fixtures of the GPU tests; each also runs on the CPU where it can, so that the test itself is tested."""

from __future__ import annotations

import os
import sys

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints each failure as it happens: a machine lent for minutes may be gone before the summary."""
    if report.failed and torch.cuda.is_available() and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-2500:]}", file=sys.stderr, flush=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
