"""`kvplan quality` end to end on the demo model, and what it refuses."""

import json
from pathlib import Path

import pytest

from kvplan.cli import main

QUICK = ["--context", "256", "--documents", "2", "--trials", "2", "--threads", "1"]


def test_the_table_has_a_row_a_format_and_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "demo", "-f", "bf16", "-f", "int4", *QUICK]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]

    assert [row[0] for row in rows[2:4]] == ["bf16", "int4"]
    assert "2 documents, 128 positions, each against bf16 on the same tokens" in out
    assert "noise floor" in out
    assert "cpu/" in out
    assert "quality:" in err


def test_transformers_own_cache_needs_no_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "demo", "-f", "transformers:fp8", "-f", "int8", *QUICK]) == 0
    out = capsys.readouterr().out

    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["transformers:fp8", "int8"]
    assert "block size 64, transformers-5." in out
    assert ", cpu/" in out


def test_json_on_standard_output_and_in_the_file_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q.json"
    command = ["quality", "demo", "-f", "int4", "-f", "int4", *QUICK, "--json", "-o", str(path)]
    assert main([*command, "--prefill", "through_cache", "--chunk", "8"]) == 0
    out = capsys.readouterr().out
    body = json.loads(out)
    (result,) = body["results"]

    assert path.read_text(encoding="utf-8") == out
    assert body["schema"] == 1
    assert result["format"] == "int4"
    assert result["key"]["prefill"] == "through_cache"
    assert result["key"]["chunk_tokens"] == 8
    assert result["bounds"]["quantized_positions"] == result["bounds"]["positions"] == 128
    assert result["bounds"]["kl"]["upper"] > result["bounds"]["kl"]["estimate"] > 0
    assert len(result["trials"]) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["no-such/model"], 2, "no-such/model"),
        (["demo", "-f", "int7"], 3, "int7"),
        (["demo", "-f", "transformers:int4"], 3, "transformers has no cache format"),
        (["demo", "-f", "vllm:nvfp4"], 3, "a format of vLLM alone: kvplan has no kernel"),
        (["demo", "-f", "kivi-k4v4-g64", "--block-size", "32"], 3, "use block size 64"),
        (["demo", "-f", "int4@4=bf16"], 3, "int4@4=bf16 on demo: no layer 4 among the 4 that cache keys and values"),
        (["demo", "-f", "int4-r512"], 2, "no scored position attends to a quantized token"),
        (["demo", "--prefill", "fast"], 2, "use exact, through_cache"),
        (["demo", "--kernel", "gpu"], 2, "use cpu, triton, reference"),
        (["demo", "--data", "/no/such/file"], 2, "/no/such/file"),
        (["demo", "-o", "/no/such/folder/q.json"], 2, "folder that does not exist"),
        (["demo", "--documents", "10000"], 2, "10000 are asked for"),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", *arguments[:1], *QUICK, *arguments[1:]]) == status
    out, err = capsys.readouterr()

    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_text_that_is_too_short_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Too short.", encoding="utf-8")
    assert main(["quality", "demo", "--data", str(path), *QUICK]) == 2

    assert "the text has" in capsys.readouterr().err
