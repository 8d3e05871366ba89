"""Links of the documentation lead somewhere, and every page is in the site."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def test_links_lead_to_files_of_the_repository() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("recipes/*.md"),
        *ROOT.glob("lab/**/*.md"),
    ]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not dead, "\n".join(dead)


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages == named
