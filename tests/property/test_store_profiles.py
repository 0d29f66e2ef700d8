from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.core.figures import FIGURES
from kvplan.core.records import CellStatus, Conditions, DocumentScore, Figure, Load
from kvplan.core.specs import Evidence
from kvplan.core.workloads import Bucket
from kvplan.errors import InputError
from kvplan.store.journal import Journal, read_journal
from kvplan.store.profiles import load_profile, save_profile

SETTINGS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(lambda name: name not in FIGURES)  # those have units of their own
numbers = st.floats(allow_nan=False, allow_infinity=False)
samples = st.lists(st.lists(numbers, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
figures = st.builds(
    Figure, unit=st.just("s"), evidence=st.sampled_from(Evidence), value=numbers, repeats=samples, reason=texts
) | st.builds(Figure, unit=st.just("s"), evidence=st.sampled_from(Evidence), reason=texts.filter(bool))
buckets = st.builds(
    Bucket, name=texts, prompt_tokens=st.integers(0, 2**40), generate_tokens=st.integers(0, 2**40), share=numbers
)
loads = st.lists(st.builds(Load, bucket=buckets, sequences=st.integers(1, 2**30)), min_size=1, max_size=3).map(tuple)
conditions = st.builds(
    Conditions, load_average=numbers, steal_share=numbers, foreign_cpu_share=numbers, clock_hz=st.just((1e9, 2e9))
)
scores = st.builds(
    DocumentScore, positions=st.integers(0, 99), quantized_positions=st.integers(0, 99), nll_16bit=numbers,
    nll=numbers, kl=numbers, flips=st.integers(0, 99), kl_values=st.lists(numbers, max_size=4).map(tuple),
)  # fmt: skip


@st.composite
def profiles(draw, made):
    def cell(old):
        return replace(
            old, key=replace(old.key, loads=draw(loads), device_uuid=draw(texts), threads=draw(st.integers(0, 99))),
            status=draw(st.sampled_from(CellStatus)), reason=draw(texts), figures=draw(st.dictionaries(names, figures)),
            conditions=(draw(conditions),),
        )  # fmt: skip

    return replace(
        made, created=draw(texts), versions=draw(st.dictionaries(texts, texts, max_size=3)),
        cells=tuple(cell(old) for old in made.cells[: draw(st.integers(0, 3))]),
        quality=tuple(replace(old, documents=(draw(scores),)) for old in made.quality[: draw(st.integers(0, 2))]),
    )  # fmt: skip


@SETTINGS
@given(data=st.data())
def test_any_profile_survives_the_file(tmp_path, make, data):
    profile = data.draw(profiles(make.profile()))
    save_profile(profile, tmp_path / "P.json")
    assert load_profile(tmp_path / "P.json") == profile


@pytest.fixture
def small(make, tmp_path):
    """The bytes of a profile with two cells and one quality result."""
    made = make.profile()
    few = {name: made.cells[0].figures[name] for name in ("cache_bytes", "tpot_s")}
    cells = tuple(replace(cell, figures=few) for cell in made.cells[:2])
    score = replace(made.quality[0].documents[0], kl_values=(0.5,))
    quality = replace(made.quality[0], documents=(score,))
    return replace(made, cells=cells, quality=(quality,))


@st.composite
def damage(draw, data):
    """The bytes cut short, with bits flipped, or with a piece put in."""
    kind = draw(st.sampled_from(("cut", "flip", "put")))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data) - 2))]
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found) - 1))
        if kind == "flip":
            found[at] ^= 1 << draw(st.integers(0, 7))
        else:
            pieces = [b"null", b"[", b"{", b'"', b"-", b"1e400", b"\xff", b"9" * 400, b"NaN", b",", b"0"]
            found[at:at] = draw(st.sampled_from(pieces))
    return bytes(found)


def complaint(path):
    """The complaint about a profile, or nothing; any other exception ends the test."""
    try:
        load_profile(path)
    except InputError as error:
        return str(error)
    return ""


@settings(SETTINGS, max_examples=200)
@given(data=st.data())
def test_no_damage_to_a_profile_gives_anything_but_a_profile_or_one_line(tmp_path, small, data):
    path = tmp_path / "P.json"
    save_profile(small, path)
    whole = path.read_bytes()
    hurt = data.draw(damage(whole))
    path.write_bytes(hurt)
    line = complaint(path)
    assert "\n" not in line
    if line:
        assert line.startswith(str(path))
    else:
        assert len(hurt) >= len(whole) - 1  # a cut never passes for a profile


@SETTINGS
@given(data=st.data())
def test_a_journal_cut_anywhere_gives_its_whole_lines_and_goes_on(tmp_path, small, data):
    path = tmp_path / "P.jsonl"
    path.unlink(missing_ok=True)
    records = [replace(small, cells=(), quality=()), *small.cells, *small.quality]
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    with Journal(path) as journal:
        assert len(journal.contents.problems) == (0 if whole[:cut].endswith(b"\n") or cut == 0 else 1)
        for record in records[kept:]:
            journal.append(record)
    assert path.read_bytes() == whole
    assert read_journal(path).profile() == small


@SETTINGS
@given(data=st.data())
def test_no_flipped_bit_of_a_journal_passes_for_a_record(tmp_path, small, data):
    path = tmp_path / "P.jsonl"
    path.unlink(missing_ok=True)
    with Journal(path) as journal:
        journal.append(small.cells[0])
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 2))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(whole))
    contents = read_journal(path)
    assert list(contents.cells.values()) in ([], [small.cells[0]])
    assert contents.cells or contents.problems
