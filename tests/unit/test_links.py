"""Links between the documents lead somewhere; those of docs/ among themselves are checked where the site is built."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "deployments/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*\.md|)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_there_are_documents() -> None:
    assert len(DOCUMENTS) > 10


def anchors_of(document: Path) -> set[str]:
    """Returns the names that GitHub and mkdocs give to a document's headings."""
    headings = HEADING.findall(CODE.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_to_a_heading_leads_to_one(document: Path) -> None:
    links = ANCHOR.findall(CODE.sub("", document.read_text()))
    named = [(document.parent / other if other else document, anchor) for other, anchor in links]
    assert [anchor for other, anchor in named if anchor not in anchors_of(other)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_to_a_file_leads_to_one(document: Path) -> None:
    links = LINK.findall(CODE.sub("", document.read_text()))
    assert [link for link in links if not (document.parent / link).exists()] == []
