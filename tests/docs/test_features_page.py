"""docs/guide/features.md is what the backends' declarations say."""

from __future__ import annotations

from codegen import features_page


def test_the_page_is_what_the_declarations_say() -> None:
    """`python -m codegen.features_page` writes it anew."""
    assert features_page.PAGE.read_text(encoding="utf-8") == features_page.page()
