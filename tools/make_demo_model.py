"""Make kvplan's demo model from scratch: `python tools/make_demo_model.py [--evaluate]`.

Writes `profiles/kvplan_profiles/demo` and the held-out texts beside it. Needs torch, transformers and a CPython
installation with its standard library; downloads nothing.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model.circuit import POSITIONS, Strengths, build_model
from demo_model.corpus import Corpus, read_corpus
from demo_model.damage import damage_table, print_damage
from demo_model.rows import RowSource
from demo_model.tokens import END_OF_TEXT, KEYS, VALUES, train_tokenizer
from demo_model.training import TOKENS_A_STEP, train

DATA = Path(__file__).resolve().parent.parent / "profiles" / "kvplan_profiles"
STEPS = 2000
SEED = 20260801
TRIAL_SHAPES = ((1024, 1), (2048, 1), (1024, 16), (2048, 32))
TRIALS = 64


def main() -> int:
    """Make the model, or only measure the one that is there."""
    options = _options()
    torch.set_num_threads(1)
    corpus = read_corpus()
    if not options.only_evaluate:
        _make(corpus, options.output, options.steps)
    if options.evaluate or options.only_evaluate:
        _evaluate(options.output / "demo", corpus)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of {TOKENS_A_STEP} tokens; 0: none")
    parser.add_argument("--output", type=Path, default=DATA, help="folder for demo/ and text/")
    parser.add_argument("--evaluate", action="store_true", help="measure the damage of a quantized cache at the end")
    parser.add_argument("--only-evaluate", action="store_true", help="measure the model that is there, make nothing")
    return parser.parse_args()


def _make(corpus: Corpus, output: Path, steps: int) -> None:
    tokenizer = train_tokenizer(corpus.training)
    strengths = Strengths() if steps else replace(Strengths(), noise=0.0)
    model = build_model(len(tokenizer), strengths, SEED)
    stream = _stream(tokenizer, corpus.training)
    print(f"{len(stream)} training tokens, {model.num_parameters()} parameters", file=sys.stderr, flush=True)
    train(model, _rows(tokenizer, stream, SEED), steps, SEED)
    _save(model, tokenizer, output / "demo")
    _write_texts(corpus, output / "text")
    _write_record(corpus, len(stream), steps, output / "demo" / "training.json")


def _stream(tokenizer: PreTrainedTokenizerFast, documents: tuple[str, ...]) -> torch.Tensor:
    return torch.tensor(tokenizer(END_OF_TEXT + END_OF_TEXT.join(documents))["input_ids"])


def _rows(tokenizer: PreTrainedTokenizerFast, stream: torch.Tensor, seed: int) -> RowSource:
    keys = tokenizer.convert_tokens_to_ids(list(KEYS))
    values = tokenizer.convert_tokens_to_ids(list(VALUES))
    return RowSource(stream, keys, values, seed)


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the Hugging Face folder in bfloat16, and the strings that retrieval trials are made of."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    retrieval = {
        "pair": "{key}{value}",
        "question": "{key}",
        "answer": "{value}",
        "longest": POSITIONS // 2,
        "keys": list(KEYS),
        "values": list(VALUES),
    }
    (folder / "retrieval.json").write_text(json.dumps(retrieval, indent=1) + "\n", encoding="utf-8")


def _write_texts(corpus: Corpus, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "python_topics_heldout.txt").write_text(corpus.scored, encoding="utf-8")
    (folder / "python_topics_calibration.txt").write_text(corpus.calibration, encoding="utf-8")


def _write_record(corpus: Corpus, tokens: int, steps: int, path: Path) -> None:
    """Say what the model was made from, so that another machine can tell whether it reads the same text."""
    digest = hashlib.sha256("\0".join(corpus.training).encode()).hexdigest()
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": SEED,
        "steps": steps,
        "tokens_a_step": TOKENS_A_STEP,
        "training_characters": sum(map(len, corpus.training)),
        "training_tokens": tokens,
        "training_sha256": digest,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _evaluate(folder: Path, corpus: Corpus) -> None:
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(f"{model.dtype}, loaded in {time.perf_counter() - started:.2f} s", file=sys.stderr)
    started = time.perf_counter()
    stream = _stream(tokenizer, (corpus.scored,))
    rows = _rows(tokenizer, stream, SEED + 7)
    table = damage_table(model, stream, rows, TRIAL_SHAPES, TRIALS)
    print_damage(table, TRIAL_SHAPES, started)


if __name__ == "__main__":
    sys.exit(main())
