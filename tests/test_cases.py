"""Every reliability case has a test with its ID in the name and a row in tests/README.md."""

import re

from nanochat.common import REPOSITORY
from tests.cases import CASES, NOT_HERE

TESTS = REPOSITORY / "tests"


def tested_ids() -> set[str]:
    """IDs in the names of all tests."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    names = re.findall(r"def (test_\w+)", text)
    return {case for name in names for case in re.findall(r"(?<=_)([BRPSV]\d+)(?=_)", name)}


def test_every_case_has_a_test_and_every_ID_is_a_case():
    assert tested_ids() == set(CASES) and NOT_HERE.keys() <= CASES.keys()


def test_readme_table_has_every_case_and_no_failure():
    lines = (TESTS / "README.md").read_text().splitlines()
    rows = {cells[1]: cells for line in lines if len(cells := re.split(r" *\| *", line)) == 7}
    for case, promise in CASES.items():
        assert rows[case][2] == promise
        assert "passed" in rows[case][5] or "not here: needs" in rows[case][5], rows[case]
        assert "failure" not in rows[case][5] and "error" not in rows[case][5]
