"""Generated pages in docs/ are current: --help of four scripts."""

import pytest

from dev.help_pages import FOLDER, SCRIPTS, help_page
from nanochat.config import GROUPS, iter_settings
from scripts.base_train import BaseTrain


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_page_in_docs_is_current(script):
    assert (FOLDER / f"{script}.txt").read_text() == help_page(script), "python -m dev.help_pages"


def test_help_of_base_train_fits_three_screens():
    page = help_page("base_train")
    assert len(page.splitlines()) <= 150
    titles = [line for line in page.splitlines() if line.startswith("╭")]
    assert [title.split()[1] for title in titles] == [
        "options", "Model", "Data", "Optimization", "Evaluation", "Checkpoints", "Runtime"
    ]  # fmt: skip


def test_each_base_train_flag_has_one_group_and_a_help_text():
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert len(grouped) == len(set(grouped))
    page = help_page("base_train")
    for _, f, _, _ in iter_settings(BaseTrain()):
        assert f.name in grouped
        after = page.split(f"--{f.name.replace('_', '-')} ")[1].splitlines()[:3]
        assert len(" ".join(after).replace("│", "").split()) > 4, f"{f.name} has no help"
