"""The measurement of a server's host starts a real server and finds times that it can have."""

from __future__ import annotations

from importlib import resources

import pytest
from tpshard.cli.shared import measure_server
from tpshard.diagnostics.diagnostic import Mistakes

pytestmark = pytest.mark.slow


def test_a_server_takes_time_besides_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_server, "ROUNDS", 1)
    host = measure_server.measure_server(resources.files("tpshard.devices").joinpath("cpu.yaml").read_text())
    assert 1e-4 < host.step_s < 0.2 and 0 <= host.token_s < 0.1 and 0 < host.request_s < 1


def test_a_server_that_does_not_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_server, "_recipe", lambda model: [f"serve.checkpoint={model}/gone"])
    monkeypatch.setattr(measure_server, "_price", lambda model, device: 0.0)
    with pytest.raises(Mistakes, match="did not start"):
        measure_server.measure_server("")
