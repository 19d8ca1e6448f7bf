"""Generated pages in docs/ are current: --help of four scripts, hyperparameters by depth."""

import re

import pytest

from dev import hyperparameters, time_model
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


def test_hyperparameters_in_docs_are_current():
    page = hyperparameters.hyperparameter_page()
    assert hyperparameters.PAGE.read_text() == page, "python -m dev.hyperparameters"


def test_hyperparameter_page_names_only_flags_of_base_train():
    own = {f.name for _, f, _, _ in iter_settings(BaseTrain())}
    others = {"init_lr_frac", "save_optimizer", "vocab_size", "d_model", "head_dim", "plan"}
    assert set(re.findall(r"--(\w+)", hyperparameters.TEXT)) <= own | others


def test_recipe_differs_from_the_published_one_only_for_listed_reasons():
    table, different = hyperparameters.compare_recipes()
    print(table)
    assert different == hyperparameters.REASONS.keys()


def test_predicted_times_in_docs_are_current():
    assert time_model.PAGE.read_text() == time_model.page(), "python -m dev.time_model"


def test_time_model_reproduces_published_throughput():
    """Fitted to one published run, it is within 10% of the others; a longer step is slower."""
    code = time_model.PUBLIC
    runs = {key: time_model.predict(*key, "fa3", code) for key in time_model.PUBLISHED}
    fitted, *others = runs
    share = time_model.reached(time_model.PUBLISHED[fitted][0], runs[fitted])
    assert 0.5 < share < 0.8  # the best matmuls reach 79% on an H100
    for key in others:
        assert runs[key].rate(share) == pytest.approx(time_model.PUBLISHED[key][0], rel=0.1)
    for kernel in time_model.ATTENTION:
        times = [
            time_model.predict(24, d, 2**20, kernel).seconds(share) for d in ("bfloat16", "fp8")
        ]
        assert times[0] > times[1] > 0.5 * times[0]
