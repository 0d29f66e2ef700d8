"""The demo model that ships: it loads without a network, retrieves, degrades by degrees, and fits its 4 MB."""

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplan_profiles

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PACKAGE_LIMIT = 4_000_000


@pytest.fixture(scope="module", autouse=True)
def recipe_on_path() -> Iterator[None]:
    """Let the tests import the parts of the recipe as its script does."""
    sys.path.insert(0, str(TOOLS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(kvplan_profiles.demo_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(kvplan_profiles.demo_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def retrieval() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(kvplan_profiles.demo_retrieval_path().read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def held_out(tokenizer: Any) -> Any:
    """Token ids (T,) of the scored text."""
    return torch.tensor(tokenizer(kvplan_profiles.held_out_text())["input_ids"])


def part(name: str) -> ModuleType:
    """Import one part of the recipe."""
    return importlib.import_module(f"demo_model.{name}")


def row_source(tokenizer: Any, stream: Any, seed: int) -> Any:
    tokens = part("tokens")
    keys = tokenizer.convert_tokens_to_ids(list(tokens.KEYS))
    values = tokenizer.convert_tokens_to_ids(list(tokens.VALUES))
    return part("rows").RowSource(stream, keys, values, seed)


class TestWhatShips:
    def test_is_a_grouped_query_llama_with_heads_of_64_in_bfloat16(self, model: Any) -> None:
        config = model.config
        assert config.model_type == "llama"
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
        assert config.max_position_embeddings >= 2048
        assert model.dtype == torch.bfloat16

    def test_model_and_texts_take_at_most_4_megabytes(self) -> None:
        demo = kvplan_profiles.demo_model_path()
        files = [path for folder in (demo, demo.parent / "text") for path in folder.iterdir()]
        assert sum(path.stat().st_size for path in files) <= PACKAGE_LIMIT

    def test_every_key_and_value_is_one_token(self, tokenizer: Any, retrieval: dict[str, Any]) -> None:
        words = [*retrieval["keys"], *retrieval["values"]]
        ids = [tokenizer(word)["input_ids"] for word in words]
        assert all(len(one) == 1 for one in ids)
        assert len({one[0] for one in ids}) == len(words)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"])))
    def test_decoding_gives_back_the_exact_text(self, tokenizer: Any, text: str) -> None:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_no_passage_is_both_scored_and_for_calibration(self) -> None:
        word_runs = part("corpus").word_runs
        assert not word_runs(kvplan_profiles.held_out_text()) & word_runs(kvplan_profiles.calibration_text())


class TestDamage:
    def test_finds_one_key_at_2048_tokens(self, model: Any, tokenizer: Any, held_out: Any) -> None:
        rows = row_source(tokenizer, held_out, seed=3)
        trials = [rows.trial(2048, 1) for _ in range(8)]
        assert part("damage").retrieval(model, trials, (16, 16)) == 1.0

    def test_perplexity_rises_with_every_step_down_in_bits(self, model: Any, held_out: Any) -> None:
        damage = part("damage")
        exact, int8, int4, int3, int2 = (
            damage.perplexity(model, held_out[:2100], 1024, (bits, bits)) for bits in (16, 8, 4, 3, 2)
        )
        assert exact < 40
        assert abs(math.log(int8 / exact)) < 0.005
        assert exact * 1.005 < int4 < int3 / 1.02 < int2 / 1.1

    def test_two_bits_lose_keys(self, model: Any, tokenizer: Any, held_out: Any) -> None:
        rows = row_source(tokenizer, held_out, seed=3)
        trials = [rows.trial(512, 16) for _ in range(48)]
        damage = part("damage")
        assert damage.retrieval(model, trials, (16, 16)) > 0.95
        assert 0.2 < damage.retrieval(model, trials, (2, 2)) < 0.95

    def test_eight_bits_round_to_within_half_a_step(self) -> None:
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 255
        assert ((part("damage").rounded(x, 8) - x).abs() <= step / 2 + 1e-6).all()


class TestRecipe:
    def test_the_written_circuit_retrieves_before_any_training(self, tokenizer: Any, held_out: Any) -> None:
        circuit = part("circuit")
        untrained = circuit.build_model(len(tokenizer), circuit.Strengths(noise=0.0), seed=5).eval()
        rows = row_source(tokenizer, held_out, seed=4)
        trials = [rows.trial(512, 8) for _ in range(12)]
        assert part("damage").retrieval(untrained, trials, (16, 16)) > 0.9

    def test_a_trial_ends_in_a_key_seen_once_and_asks_for_its_value(self, tokenizer: Any, held_out: Any) -> None:
        ids, value = row_source(tokenizer, held_out, seed=1).trial(300, 16)
        assert len(ids) == 300
        assert ids[:-1].count(ids[-1]) == 1
        assert ids[ids.index(ids[-1]) + 1] == value

    def test_training_rows_score_values_only_where_they_can_be_known(self, tokenizer: Any, held_out: Any) -> None:
        rows_part = part("rows")
        row = row_source(tokenizer, held_out, seed=1).needle_row(256)
        ids, targets = row.ids.tolist(), row.targets.tolist()
        keys = set(tokenizer.convert_tokens_to_ids(list(part("tokens").KEYS)))
        known: dict[int, int] = {}
        asked = 0
        for current, following in zip(ids, targets, strict=True):
            assert following not in keys
            if current in known:
                assert following == known[current]
                asked += 1
            elif current in keys:
                assert following == rows_part.UNSCORED
                known[current] = ids[ids.index(current) + 1]
        assert asked >= 2
        assert (row.weights == rows_part.ANSWER_WEIGHT).sum() == asked

    def test_paragraphs_that_repeat_held_out_text_are_not_trained_on(self) -> None:
        corpus = part("corpus")
        held_out = corpus.word_runs("the quick brown fox jumps over the lazy dog near the river")
        document = "Kept.\n\nHere The Quick brown fox jumps\nover the lazy cat.\n\nKept, the quick brown fox."
        assert list(corpus.without_repeats([document], held_out)) == ["Kept.\n\nKept, the quick brown fox.\n"]

    @pytest.mark.slow
    def test_no_run_of_words_is_both_trained_on_and_held_out(self) -> None:
        corpus = part("corpus")
        made = corpus.read_corpus()
        held_out = corpus.word_runs(kvplan_profiles.held_out_text())
        assert len(made.scored) > 100_000
        paragraphs = (paragraph for text in made.training for paragraph in text.split("\n\n"))
        assert not any(corpus.word_runs(paragraph) & held_out for paragraph in paragraphs)
