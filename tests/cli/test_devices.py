import json

import pytest

from kvplan.cli import main
from kvplan.errors import ExitStatus
from kvplan.measure.device import CpuDevice


def test_the_processor_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == ExitStatus.DONE

    out = capsys.readouterr().out
    assert "cpu" in out
    assert CpuDevice().info.name[:12] in out


def test_the_json_has_what_a_profile_says_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == ExitStatus.DONE

    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["devices"][0]["info"]["uuid"] == CpuDevice().info.uuid


def test_other_systems_are_unsupported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")

    assert main(["devices"]) == ExitStatus.UNSUPPORTED
    assert "profile on Linux" in capsys.readouterr().err
