"""A comparison as JUnit XML: a suite a cell, a test case a figure."""

import re
from typing import Final
from xml.etree import ElementTree as ET

from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.report.verdict_text import change_text

_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAGS: Final = {Standing.REGRESSED: "failure", Standing.UNDECIDED: "skipped", Standing.NOT_COMPARABLE: "skipped"}


def comparison_junit(comparison: Comparison) -> str:
    """Return the comparison; regressed figures are failures, undecided and not comparable ones skipped."""
    root = ET.Element("testsuites", {"name": "kvplan check", **_counts(comparison.verdicts)})
    suites: dict[str, list[FigureVerdict]] = {}
    for verdict in comparison.verdicts:
        suites.setdefault(verdict.cell, []).append(verdict)
    for cell, verdicts in suites.items():
        suite = ET.SubElement(root, "testsuite", {"name": _xml_text(cell), **_counts(tuple(verdicts))})
        for verdict in verdicts:
            _add_case(suite, verdict)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _add_case(suite: ET.Element, verdict: FigureVerdict) -> None:
    names = {"classname": _xml_text(verdict.cell), "name": _xml_text(verdict.figure)}
    case = ET.SubElement(suite, "testcase", names)
    if tag := _TAGS.get(verdict.standing):
        message = _xml_text(f"{verdict.standing}: {change_text(verdict)}")
        ET.SubElement(case, tag, message=message)


def _counts(verdicts: tuple[FigureVerdict, ...]) -> dict[str, str]:
    tags = [_TAGS.get(verdict.standing) for verdict in verdicts]
    return {"tests": str(len(tags)), "failures": str(tags.count("failure")), "skipped": str(tags.count("skipped"))}


def _xml_text(text: str) -> str:
    """Return *text* without the characters that no XML document may hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
