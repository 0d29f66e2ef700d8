import json

import pytest

from kvplan.cli import main
from kvplan.errors import ExitStatus, MissingPartError
from kvplan.measure import checks
from kvplan_kernels import native


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WATCHED_S", 0.05)


@pytest.mark.skipif(native.missing() is not None, reason="the fused kernels are not built")
def test_a_machine_that_has_all_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == ExitStatus.DONE

    out = capsys.readouterr().out
    assert "MISSING" not in out
    for name in ("processor", "memory", "torch", "fused kernels", "OpenMP", "demo model", "quiet"):
        assert name in out


def test_a_missing_kernel_is_named_with_the_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> object:
        raise MissingPartError("it was not built", hint="reinstall")

    monkeypatch.setattr("kvplan.runtime.ops.load_ops", missing)

    assert main(["doctor"]) == ExitStatus.UNSUPPORTED
    assert "MISSING fused kernels  it was not built; reinstall" in capsys.readouterr().out


def test_packages_that_are_not_installed_come_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", ("no_such_package",))

    assert main(["doctor", "--json"]) == ExitStatus.UNSUPPORTED

    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert not found["no_such_package"]["good"]
    assert "pip install 'kvplan[profile]'" in found["no_such_package"]["found"]


def test_other_systems_cannot_measure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")

    assert main(["doctor"]) == ExitStatus.UNSUPPORTED
    assert "Windows" in capsys.readouterr().out
