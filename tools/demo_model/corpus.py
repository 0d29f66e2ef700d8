"""Text for the demo model, read from the CPython installation that runs the recipe.

Nothing is downloaded. The reference topics of `pydoc_data` are split by topic into text that trains the model,
text that is scored and text for calibration; docstrings and comments of the standard library only train it.
"""

import ast
import io
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SCORED_TOPICS = (
    "comparisons",
    "debugger",
    "execmodel",
    "formatstrings",
    "import",
    "string-methods",
    "typesmapping",
)
CALIBRATION_TOPICS = ("assignment", "calls", "strings")
RUN_OF_WORDS = 8
SHORTEST_COMMENT = 120
# Folders of the standard library that hold tests, third-party packages or data rather than documented code.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data", "ensurepip"}
)


@dataclass(frozen=True)
class Corpus:
    """Documents that train the model, and the two held-out texts that never do."""

    training: tuple[str, ...]
    scored: str
    calibration: str


def read_corpus() -> Corpus:
    """Split the topics, then drop every paragraph that repeats scored text, or calibration text in training.

    Topics quote each other (`compound` holds `try`, `pdb`'s docstring holds part of `debugger`), so a split by
    topic alone would leak: a paragraph is dropped when it shares a run of eight words with a held-out topic.
    """
    scored = "\n".join(topics[name].strip("\n") + "\n" for name in SCORED_TOPICS)
    calibration = "\n".join(without_repeats([topics[name] for name in CALIBRATION_TOPICS], word_runs(scored)))
    held_out = word_runs(scored) | word_runs(calibration)
    kept = [name for name in sorted(topics) if name not in SCORED_TOPICS + CALIBRATION_TOPICS]
    documents = [topics[name] for name in kept] + list(_library_documents())
    training = without_repeats(documents, held_out)
    return Corpus(tuple(training), scored, calibration)


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Every run of eight words in a text, line breaks and case ignored."""
    words = text.lower().split()
    return {tuple(words[i : i + RUN_OF_WORDS]) for i in range(len(words) - RUN_OF_WORDS + 1)}


def without_repeats(documents: list[str], held_out: set[tuple[str, ...]]) -> Iterator[str]:
    """Yield the documents with each paragraph once, leaving out those that share words with held-out text."""
    seen: set[str] = set()
    for document in documents:
        paragraphs = []
        for paragraph in document.strip().split("\n\n"):
            known = len(paragraph) > SHORTEST_COMMENT and paragraph in seen
            if not known and not word_runs(paragraph) & held_out:
                paragraphs.append(paragraph)
                seen.add(paragraph)
        if paragraphs:
            yield "\n\n".join(paragraphs) + "\n"


def _library_documents() -> Iterator[str]:
    """One document a module of the standard library: its docstrings, then its longer comments."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            try:
                source = path.read_text(encoding="utf-8")
                parts = [*_docstrings(source), *_comments(source)]
            except (UnicodeDecodeError, SyntaxError):  # lib2to3 keeps files in other dialects on purpose
                continue
            if parts:
                yield "\n\n".join(parts)


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def _comments(source: str) -> Iterator[str]:
    """Yield comments that fill several lines, without their hash signs."""
    block: list[str] = []
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last_line + 1:
            yield from _long_enough(block)
            block = []
        block.append(token.string.lstrip("#").removeprefix(" "))
        last_line = token.start[0]
    yield from _long_enough(block)


def _long_enough(block: list[str]) -> Iterator[str]:
    text = "\n".join(block)
    if len(text) >= SHORTEST_COMMENT:
        yield text
