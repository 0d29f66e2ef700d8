import errno
import os
import subprocess
import sys
from dataclasses import replace
from math import nan

import pytest

from kvplan.core.records import CellStatus
from kvplan.errors import InputError
from kvplan.store.journal import Journal, journal_path, read_journal, resume_cells, resume_quality


@pytest.fixture
def profile(make):
    return make.profile()


@pytest.fixture
def header(profile):
    return replace(profile, cells=(), quality=())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "P.jsonl"


@pytest.fixture
def full(path, profile, header):
    """A journal that holds all of the profile."""
    with Journal(path) as journal:
        for record in (header, *profile.cells, *profile.quality):
            journal.append(record)
    return path


def test_the_journal_lies_beside_the_profile(tmp_path):
    assert journal_path(tmp_path / "P.json") == tmp_path / "P.jsonl"
    assert journal_path(tmp_path / "P.out") == tmp_path / "P.out.jsonl"


def test_a_journal_makes_up_the_profile(full, profile):
    contents = read_journal(full)
    assert contents.profile() == profile
    assert contents.problems == []


def test_a_record_is_on_disk_when_append_returns(path, profile):
    journal = Journal(path)
    journal.append(profile.cells[0])
    assert list(read_journal(path).cells.values()) == [profile.cells[0]]
    journal.close()


def test_a_record_is_flushed_to_the_device_whole(path, profile, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    with Journal(path) as journal:
        for cell in profile.cells[:2]:
            journal.append(cell)
            assert flushed[-1] == path.stat().st_size


def test_of_two_records_with_one_key_the_later_counts(full, profile):
    newer = replace(profile.cells[0], status=CellStatus.FAILED, reason="crashed")
    with Journal(full) as journal:
        journal.append(newer)
    assert read_journal(full).cells[newer.key] == newer


def test_a_torn_last_line_is_dropped_and_reported(full, profile):
    full.write_bytes(full.read_bytes()[:-20])
    contents = read_journal(full)
    last = 1 + len(profile.cells) + len(profile.quality)
    assert contents.problems == [f"{full}:{last}: torn, as by a killed run, so its record is dropped"]
    assert list(contents.quality.values()) == list(profile.quality[:-1])


def test_a_resumed_journal_goes_on_after_the_last_whole_line(full, profile):
    full.write_bytes(full.read_bytes()[:-20])
    with Journal(full) as journal:
        assert len(journal.contents.problems) == 1
        journal.append(profile.quality[-1])
    contents = read_journal(full)
    assert contents.profile() == profile
    assert contents.problems == []


def test_corrupt_middle_lines_are_dropped_and_reported_by_number(full, profile):
    lines = full.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"threads":2', b'"threads":3')
    lines[3] = b"\xff" + lines[3]
    lines[4] = b""
    full.write_bytes(b"\n".join(lines))
    contents = read_journal(full)
    assert [problem.removeprefix(f"{full}:").partition(":")[0] for problem in contents.problems] == ["2", "4", "5"]
    assert "its checksum differs" in contents.problems[0]
    assert list(contents.cells.values()) == [cell for rank, cell in enumerate(profile.cells) if rank not in (0, 2, 3)]


def test_a_second_writer_is_refused(path):
    with Journal(path):
        with pytest.raises(InputError, match="another kvplan is writing this journal"):
            Journal(path)
        code = "import sys; from kvplan.store.journal import Journal; Journal(sys.argv[1])"
        run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
        assert "another kvplan is writing this journal" in run.stderr
    Journal(path).close()


def test_a_journal_started_anew_forgets(full, header):
    with Journal(full, keep=False) as journal:
        journal.append(header)
    assert read_journal(full).profile() == header


def test_a_file_that_is_no_journal_is_left_alone(path):
    path.write_text("shopping list")
    for keep in (True, False):
        with pytest.raises(InputError, match="exists and is no journal"):
            Journal(path, keep=keep)
    assert path.read_text() == "shopping list"


def test_a_header_torn_by_a_kill_is_no_obstacle(full, path):
    for length in (1, 10, 40):
        path.write_bytes(full.read_bytes()[:length])
        Journal(path).close()
        assert path.read_bytes() == b""


def test_a_full_disk_leaves_whole_lines_only(full, profile, monkeypatch):
    before = full.read_bytes()
    real = os.write

    def write(descriptor, data):
        if len(data) < 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:-45])

    with Journal(full) as journal:
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(InputError, match="No space left"):
            journal.append(profile.cells[0])
        monkeypatch.undo()
        assert full.read_bytes() == before
        journal.append(profile.cells[1])
    assert read_journal(full).problems == []


def test_neither_nan_nor_cells_in_a_header_are_written(path, profile):
    cell = profile.cells[0]
    figures = {"tpot_s": replace(cell.figures["tpot_s"], value=nan)}
    with Journal(path) as journal:
        with pytest.raises(ValueError, match=r"tpot_s'\]\.value is nan"):
            journal.append(replace(cell, figures=figures))
        with pytest.raises(ValueError, match="without cells"):
            journal.append(profile)
    assert path.read_bytes() == b""


def test_records_without_a_header_are_no_profile(path, profile):
    with Journal(path) as journal:
        journal.append(profile.cells[0])
    with pytest.raises(InputError, match="no header"):
        read_journal(path).profile()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"missing/P\.jsonl: lies in a folder that does not exist"):
        Journal(tmp_path / "missing" / "P.jsonl")
    with pytest.raises(InputError, match="no such file"):
        read_journal(tmp_path / "P.jsonl")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threads": 4}, "threads 2 is now 4"),
        ({"device_uuid": "cpu-2"}, "device_uuid cpu-1 is now cpu-2"),
        ({"kernel": "cpu/avx2"}, "kernel cpu/portable is now cpu/avx2"),
        ({"kvplan_version": "9"}, "kvplan_version 0.1.0 is now 9"),
        ({"model_digest": "e" * 64}, "model_digest dddddddddddd... is now eeeeeeeeeeee..."),
        ({"threads": 4, "kernel": "x"}, "threads 2 is now 4, kernel cpu/portable is now x"),
        ({"block_tokens": 32}, "is not among what is asked for"),
    ],
)
def test_what_was_measured_otherwise_is_refused_with_the_field(profile, change, says):
    cell = profile.cells[0]
    taken, refused = resume_cells({cell.key: cell}, [replace(cell.key, **change)])
    assert taken == {}
    assert [(one.label, one.reason) for one in refused] == [(cell.key.label, says)]


def test_matching_cells_are_taken_and_the_disturbed_and_failed_are_not(profile):
    statuses = list(CellStatus)
    cells = [replace(cell, status=status) for cell, status in zip(profile.cells, statuses, strict=False)]
    taken, refused = resume_cells({cell.key: cell for cell in cells}, [cell.key for cell in profile.cells])
    assert {cell.status for cell in taken.values()} == {
        CellStatus.OK, CellStatus.OUT_OF_MEMORY, CellStatus.UNSUPPORTED,
    }  # fmt: skip
    assert [one.reason.split(",")[0] for one in refused] == ["was disturbed", "was failed"]


def test_quality_is_matched_by_its_key(profile):
    found = {result.key: result for result in profile.quality}
    first, *rest = found
    wanted = [replace(first, data_digest="u" * 64), *rest]
    taken, refused = resume_quality(found, wanted)
    assert list(taken) == rest
    assert [one.reason for one in refused] == ["data_digest tttttttttttt... is now uuuuuuuuuuuu..."]
