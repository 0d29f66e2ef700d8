import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf, nan
from time import process_time

import pytest

from kvplan.core.records import Cell, CellStatus, DocumentScore, Figure, Quality
from kvplan.core.specs import Evidence
from kvplan.errors import InputError
from kvplan.store.profiles import load_profile, save_profile


@pytest.fixture
def profile(make):
    absent = Cell(
        key=replace(make.profile().cells[0].key, threads=1),
        status=CellStatus.OUT_OF_MEMORY,
        reason='needs 3 GiB, "2" are free\n</script>',
        figures={"tpot_s": Figure.absent("s", Evidence.MEASURED, "out of memory")},
    )
    made = make.profile()
    return replace(made, cells=(*made.cells, absent))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "P.json"


def test_a_saved_profile_loads_as_the_same(profile, path):
    save_profile(profile, path)
    assert load_profile(path) == profile


def test_an_empty_profile_loads_as_the_same(profile, path):
    empty = replace(profile, cells=(), quality=())
    save_profile(empty, path)
    assert load_profile(path) == empty


def test_each_cell_has_a_line(profile, path):
    save_profile(profile, path)
    assert sum(line.startswith('{"key":{') for line in path.read_text().splitlines()) == len(
        profile.cells + profile.quality
    )


def test_saving_leaves_nothing_beside_the_profile_and_replaces_it(profile, path):
    path.write_text("old")
    path.chmod(0o640)
    save_profile(profile, path)
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_profile_is_overwritten_unless_forbidden(profile, path):
    save_profile(profile, path)
    with pytest.raises(InputError, match="would be overwritten"):
        save_profile(replace(profile, cells=()), path, overwrite=False)
    assert load_profile(path) == profile


def test_a_link_to_a_profile_stays_one(profile, path, tmp_path):
    target = tmp_path / "runs" / "1.json"
    target.parent.mkdir()
    path.symlink_to(target)
    save_profile(profile, path)
    assert path.is_symlink()
    assert load_profile(target) == profile


def test_a_folder_is_neither_replaced_nor_read(profile, tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        save_profile(profile, tmp_path)
    with pytest.raises(InputError, match="is a folder"):
        load_profile(tmp_path)


def test_a_pipe_is_written_to_and_left_in_place(profile, path):
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as reader:
        received = reader.submit(path.read_bytes)
        save_profile(profile, path)
        data = received.result(timeout=10)
    assert path.is_fifo()
    with pytest.raises(InputError, match="is a device or pipe"):
        load_profile(path)
    path.unlink()
    path.write_bytes(data)
    assert load_profile(path) == profile


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_profile_whole(profile, path, monkeypatch, call):
    save_profile(profile, path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(InputError, match="cannot write: No space left on device"):
        save_profile(replace(profile, cells=()), path)
    monkeypatch.undo()
    assert load_profile(path) == profile
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(profile, tmp_path):
    with pytest.raises(InputError, match=r"missing/P\.json: lies in a folder that does not exist"):
        save_profile(profile, tmp_path / "missing" / "P.json")


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_a_number_that_is_not_finite_is_never_written(profile, path, number):
    figure = Figure(unit="s", evidence=Evidence.MEASURED, value=1.0, repeats=((1.0, number),))
    cell = replace(profile.cells[0], figures={"tpot_s": figure})
    with pytest.raises(ValueError, match=r"Cell\.figures\['tpot_s'\]\.repeats\[0\]\[1\] is "):
        save_profile(replace(profile, cells=(cell,)), path)
    score = DocumentScore(positions=1, quantized_positions=1, nll_16bit=1.0, nll=number, kl=0.0, flips=0)
    quality = Quality(key=profile.quality[0].key, documents=(score,))
    with pytest.raises(ValueError, match=r"documents\[0\]\.nll is "):
        save_profile(replace(profile, quality=(quality,)), path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"schema":1', '"schema":2', "schema 2; this kvplan reads 1; upgrade kvplan"),
        ('"schema":1', '"schema":0', "schema 0; this kvplan reads 1; measure again"),
        ('"schema":1', '"schema":"1"', "is no schema"),
        (',\n"schema":1', "", "no schema"),
        ('"versions":{', '"version":{', "unknown key 'version'"),
        ('"status":"ok"', '"status":"fine"', "$.cells[0].status"),
        ('"threads":2', '"threads":2.5', "Expected `int`"),
        ('"format":"bf16"', '"format":"bf17"', "cells[0]: unknown format 'bf17'"),
        ('"block_tokens":64', '"block_tokens":-64', "cells[0]: block size -64"),
        ('"sequences":23', '"sequences":0', "cells[0]: bucket 'chat'"),
        ('"prompt_tokens":1024', '"prompt_tokens":-1', "cells[0]: bucket 'chat'"),
        ('"chunk_tokens":32', '"chunk_tokens":0', "quality[0]: chunks of 0"),
        ('"unit":"s"', '"unit":"ms"', "cells[0]: decode_fused_s is in 'ms'"),
        ('"reason":"out of memory"', '"reason":""', "tpot_s has neither value nor reason"),
        ('"repeats":[[', '"repeats":[[],[', "has a repeat without samples"),
        ('"value":', '"value":1e999,"x":', "Number out of range"),
        ('"value":', '"value":NaN,"x":', "malformed"),
    ],
)
def test_a_profile_that_no_run_writes_is_refused(profile, path, old, new, says):
    save_profile(profile, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_profile(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_truncated_profile_is_named_with_the_line_it_ends_on(profile, path):
    save_profile(profile, path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:12])[:-3])
    with pytest.raises(InputError, match=r"P\.json:12: ends in the middle of its JSON"):
        load_profile(path)


def test_a_corrupt_byte_is_named_with_its_line(profile, path):
    save_profile(profile, path)
    lines = path.read_bytes().split(b"\n")
    lines[14] = b"\x01" + lines[14]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=r"P\.json:15: JSON is malformed"):
        load_profile(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "is empty"), (b"[]", "is no profile"), (b"\x00" * 64, "malformed"), (b'{"a":' * 10**6, "nested too deep")],
)
def test_what_is_no_profile_is_refused(path, data, says):
    path.write_bytes(data)
    with pytest.raises(InputError, match=says):
        load_profile(path)


def test_a_hundred_thousand_cells_open_within_three_seconds(profile, path):
    figures = {name: profile.cells[0].figures[name] for name in ("cache_bytes", "tpot_s")}
    save_profile(replace(profile, cells=(replace(profile.cells[0], figures=figures),), quality=()), path)
    head, start_of_cell, rest = path.read_bytes().partition(b'{"key":')
    line, tail = rest.split(b"\n", 1)
    block = b'"block_tokens":64'
    lines = [start_of_cell + line.replace(block, block[:-2] + b"%d" % rank) for rank in range(1, 100_001)]
    path.write_bytes(head + b",\n".join(lines) + b"\n" + tail)
    del lines
    start = process_time()
    loaded = load_profile(path)
    assert process_time() - start < 3
    assert len({cell.key for cell in loaded.cells}) == 100_000
