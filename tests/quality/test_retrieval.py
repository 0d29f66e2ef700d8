"""Trials hide what they ask for, once, at depths spread over the context."""

from pathlib import Path

import pytest

from kvplan.errors import InputError
from kvplan.quality.passages import tokenize
from kvplan.quality.retrieval import TEXT_FORM, TrialForm, make_trials, read_form
from kvplan.runtime.loading import LoadedModel
from kvplan_profiles import demo_retrieval_path, held_out_text


@pytest.fixture(scope="module", params=["text", "own"])
def form(request: pytest.FixtureRequest) -> TrialForm:
    return TEXT_FORM if request.param == "text" else read_form(demo_retrieval_path())


def test_every_trial_has_the_length_asked_for_and_the_pair_in_it(demo: LoadedModel, form: TrialForm) -> None:
    stream = tokenize(demo.tokenizer, held_out_text())
    trials = make_trials(demo.tokenizer, stream, [3], form, context_tokens=600, trials=12, seed=1)
    depths = []
    for trial in trials:
        asked = demo.tokenizer.decode(list(trial.fed + trial.targets[-1:]))
        question, answer = asked[: -trial.scored], list(trial.targets[-trial.scored :])
        shown = demo.tokenizer.decode(list(trial.prompt))
        key = next(key for key in form.keys if asked.rstrip().endswith(form.answer.format(key=key, value=_last(asked)))
                   and form.question.format(key=key).strip() in question + asked)  # fmt: skip
        pair = form.pair.format(key=key, value=_last(asked)).strip()
        assert shown.count(pair) == 1
        assert answer == tokenize(demo.tokenizer, form.answer.format(key=key, value=_last(asked)))
        depths.append(shown.index(pair) / len(shown))

    assert {trial.tokens for trial in trials} == {600}
    assert {trial.prompt[0] for trial in trials} == {3}
    assert len({len(trial.prompt) for trial in trials}) == 1
    assert max(abs(depth - (i + 0.5) / 12) for i, depth in enumerate(depths)) < 0.15


def _last(asked: str) -> str:
    """Returns the value that a trial ends in."""
    return asked[asked.rindex("<") :] if asked.endswith(">") else asked.split()[-1]


def test_several_pairs_are_hidden_and_one_is_asked_for(demo: LoadedModel) -> None:
    form = read_form(demo_retrieval_path())
    stream = tokenize(demo.tokenizer, held_out_text())
    (trial,) = make_trials(demo.tokenizer, stream, [], form, context_tokens=600, trials=1, seed=1)
    shown = demo.tokenizer.decode(list(trial.prompt))

    assert shown.count("<key:") == shown.count("<value:") == form.pairs == 16


def test_a_context_without_room_is_refused(demo: LoadedModel) -> None:
    stream = tokenize(demo.tokenizer, held_out_text())
    with pytest.raises(InputError, match="retrieval in 20 tokens"):
        make_trials(demo.tokenizer, stream, [], TEXT_FORM, context_tokens=20, trials=1, seed=1)


@pytest.mark.parametrize("text", ["", "{", '{"pair": 1}', "[]"])
def test_a_form_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "retrieval.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="no form of retrieval trials"):
        read_form(path)
