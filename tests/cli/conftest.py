from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli import main
from kvplan.store.profiles import save_profile

WORKLOAD = """schema: 1
model: made-up
memory: 150MiB
target: {concurrency: 32, tpot_ms: {p95: 50}}
quality: {max_perplexity_increase: 1%}
buckets:
  - {name: chat, prompt: 1024, generate: 128, share: 70%}
  - {name: long, prompt: 1800, generate: 128, share: 30%}
search: {formats: [bf16, int8, k8v4, int4, int2], block_size: [64]}
"""


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*argv: object) -> Answer:
        status = main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        return Answer(int(status), out, err)

    return call


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD, encoding="utf-8")
    return path


@pytest.fixture
def profile(tmp_path: Path, make: Any) -> Path:
    path = tmp_path / "p.json"
    save_profile(make.profile(), path)
    return path
