"""Generated pages in docs/ are current: --help of four scripts."""

import pytest

from dev.help_pages import FOLDER, SCRIPTS, help_page


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_page_in_docs_is_current(script):
    assert (FOLDER / f"{script}.txt").read_text() == help_page(script), "python -m dev.help_pages"
