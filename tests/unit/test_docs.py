"""Links of the documentation lead somewhere, and every page is in the site."""

import re
from pathlib import Path

from ostinato.env.arithmetic import PHRASINGS

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


def test_what_a_page_lets_a_user_ask_is_what_seed_moe_was_trained_on() -> None:
    """`generate RUN -p "12+7="` of the quickstart and "Compute: 12 + 30" of serve.md were answered wrongly by
    a policy with a held-out score of 0.82: no training prompt has such words."""
    asked = [
        text
        for page, form in (("guide/quickstart.md", r'-p "([^"]+)"'), ("serve.md", r'"content": "([^"]+)"'))
        for text in re.findall(form, (ROOT / "docs" / page).read_text())
    ]
    forms = "|".join(re.escape(phrasing).replace(r"\{\}", r"\d{2,3} [+-] \d{2,3}") for phrasing in PHRASINGS)
    assert len(asked) >= 2 and all(re.fullmatch(forms, text) for text in asked), asked


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages == named
