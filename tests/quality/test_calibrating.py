"""What formats learn of a model: from text that is not scored, to be used with that model alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from kvplan.errors import InputError, UnsupportedFormatError
from kvplan.quality.calibrating import calibrate, calibration_documents, check_unseen, text_windows
from kvplan.quality.passages import Passage
from kvplan.quality.scoring import QualityOptions, prepare, score
from kvplan.runtime.learned import layer_parameters
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.observing import observe
from kvplan.runtime.session import Runtime
from kvplan.store.calibrations import (
    Calibration,
    calibration_path,
    find_calibration,
    load_calibration,
    load_earlier,
    save_calibration,
)
from kvplan_kernels.format import parse
from kvplan_kernels.learning import learn
from kvplan_kernels.seen import Seen

NAMES = (
    "unbias-int4",
    "unbias-smooth-order-had-k4v4-g32",
    "scaled-had-fp8_e4m3",
    "scaled-channel-static-int8",
    "had-nuq3/nuq2-r20",
)
FORMS = [parse(name) for name in NAMES]
VERSIONS = {"kvplan": "0"}


@pytest.fixture(scope="module")
def documents(demo: LoadedModel) -> list[Passage]:
    return calibration_documents(demo, context_tokens=128, documents=2)


@pytest.fixture(scope="module")
def calibration(demo: LoadedModel, documents: list[Passage]) -> Calibration:
    return calibrate(demo, FORMS, documents, versions=VERSIONS)


@pytest.fixture
def stored(calibration: Calibration, tmp_path: Path) -> Path:
    path = tmp_path / "c.safetensors"
    save_calibration(calibration, path)
    return path


def test_what_is_learned_over_documents_is_what_all_tokens_at_once_teach(
    demo: LoadedModel, documents: list[Passage], calibration: Calibration
) -> None:
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def hear(layer: int, heard: Seen) -> None:
        seen.setdefault(layer, []).append((heard.key, heard.value))

    with torch.inference_mode():
        for document in documents:
            observe(demo, [*document.prompt, *document.fed], hear)
        for form in FORMS[:3]:
            for layer, parameters in enumerate(layer_parameters(demo, form, calibration)):
                key, value = (torch.cat(tensors) for tensors in zip(*seen[layer], strict=True))
                assert key.shape == (256, 2, 64)
                for name, tensor in learn(form, key, value).tensors.items():
                    torch.testing.assert_close(parameters[name], tensor, atol=1e-4, rtol=1e-4)


def test_formats_that_begin_alike_share_what_they_learn(calibration: Calibration) -> None:
    transforms = {"unbias", "unbias-smooth", "unbias-smooth-order", "scaled-had", "scaled-channel"}
    assert set(calibration.recipes) == transforms | {"had-nuq3/nuq2"}
    assert calibration.digest(FORMS[0]) != calibration.digest(FORMS[1])


def test_text_that_comes_with_kvplan_is_learned_from_or_scored_and_never_both(demo: LoadedModel) -> None:
    learned = set(text_windows(calibration_documents(demo)).tolist())
    data = prepare(demo, QualityOptions(context_tokens=1024))
    scored = [ids for passage in (*data.documents, *data.trials) for ids in [(*passage.prompt, *passage.fed)]]
    assert len(learned) > 200
    assert sum(map(len, scored)) > 15_000
    whole = replace(empty(demo), windows=np.asarray(sorted(learned)))
    check_unseen(whole, (*data.documents, *data.trials))


def empty(demo: LoadedModel) -> Calibration:
    return Calibration(
        model="demo", model_digest=demo.spec.digest, data_digest="", created="", versions={},
        windows=np.zeros(0, np.int64), recipes={},
    )  # fmt: skip


def test_text_that_formats_learned_from_is_not_scored(demo: LoadedModel, calibration: Calibration) -> None:
    from kvplan_profiles import calibration_text

    options = QualityOptions(context_tokens=128, documents=1, trials=0)
    with pytest.raises(InputError, match="text that the formats were calibrated on"):
        score(demo, ["unbias-int4"], options, text=calibration_text()[150:], calibration=calibration)
    (found,) = score(demo, ["unbias-int4"], options, calibration=calibration)
    assert found.key.calibration == calibration.digest(FORMS[0])


def test_a_format_without_what_it_learns_is_refused_with_the_command(
    demo: LoadedModel, calibration: Calibration
) -> None:
    with pytest.raises(InputError, match=r"smooth-int4 learns .* without smooth; run `kvplan calibrate demo -f smooth"):
        Runtime(demo, parse("smooth-int4"), block_tokens=64, blocks=1, slots=1, calibration=calibration)
    with pytest.raises(InputError, match=r"no calibration; run `kvplan calibrate demo -f unbias-int4`"):
        Runtime(demo, FORMS[0], block_tokens=64, blocks=1, slots=1)
    with pytest.raises(InputError, match="int4 learns nothing"):
        calibrate(demo, [parse("int4")], [], versions={})


def test_a_constant_is_not_learned_where_attention_would_see_it(demo: LoadedModel, documents: list[Passage]) -> None:
    layer = demo.layers[0]
    capped = replace(demo, layers=(replace(layer, options=replace(layer.options, softcap=30.0)), *demo.layers[1:]))
    with pytest.raises(UnsupportedFormatError, match="attention that has a softcap, as that of layer 0"):
        calibrate(capped, FORMS[:1], documents, versions={})


def test_a_file_gives_back_what_was_written(demo: LoadedModel, calibration: Calibration, stored: Path) -> None:
    found = load_calibration(stored, demo.spec)
    assert (found.data_digest, found.versions) == (calibration.data_digest, calibration.versions)
    assert np.array_equal(found.windows, calibration.windows)
    for form in FORMS:
        assert found.digest(form) == calibration.digest(form)
    assert find_calibration(demo.spec, [parse("int4")], None) is None
    with pytest.raises(InputError, match="no format that is asked for learns"):
        find_calibration(demo.spec, [parse("int4")], stored)
    assert find_calibration(demo.spec, FORMS, stored) is not None


def test_a_file_keeps_what_it_has_of_the_same_text_alone(
    demo: LoadedModel, calibration: Calibration, stored: Path
) -> None:
    before = load_earlier(stored, demo.spec, data_digest=calibration.data_digest, versions=VERSIONS)
    assert before is not None
    assert set(replace(calibration, recipes={"smooth": []}).kept(before).recipes) == {*calibration.recipes, "smooth"}
    for changes in ({"data_digest": "0"}, {"versions": {"kvplan": "1"}}):
        given = {"data_digest": calibration.data_digest, "versions": VERSIONS} | changes
        with pytest.raises(InputError, match="give --force"):
            load_earlier(stored, demo.spec, **given)  # type: ignore[arg-type]
    assert load_earlier(stored.with_name("none"), demo.spec, data_digest="", versions={}) is None


def test_another_model_s_file_is_refused(demo: LoadedModel, stored: Path) -> None:
    other = replace(demo.spec, digest="0" * 64, name="other")
    with pytest.raises(InputError, match=r"learned from another model than other: demo, .*kvplan calibrate other"):
        load_calibration(stored, other)


def test_a_file_that_is_missing_or_damaged_is_refused_in_one_line(
    demo: LoadedModel, stored: Path, tmp_path: Path
) -> None:
    whole = stored.read_bytes()
    bad = tmp_path / "bad"
    for data in (b"", b"text", whole[:100], whole[:-10], whole + b"0", whole[:20] + b"}" + whole[21:]):
        bad.write_bytes(data)
        with pytest.raises(InputError) as caught:
            load_calibration(bad, demo.spec)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        load_calibration(tmp_path / "none", demo.spec)


def test_a_file_of_other_tensors_is_refused(demo: LoadedModel, stored: Path, calibration: Calibration) -> None:
    tensors = load_file(stored)
    save_file(tensors, stored)
    with pytest.raises(InputError, match="is no calibration"):
        load_calibration(stored, demo.spec)
    shorter = [{name: array[..., :32] for name, array in layer.items()} for layer in calibration.recipes["unbias"]]
    wrong = replace(calibration, recipes={**calibration.recipes, "unbias": shorter})
    with pytest.raises(InputError, match=r"layer 0: k_offset: float32 \[2, 64\] is needed"):
        layer_parameters(demo, FORMS[0], wrong)


def test_the_default_file_lies_in_the_current_folder() -> None:
    assert calibration_path("/models/some-model/") == Path("some-model.calibration.safetensors")
