"""Every case of the reliability list has a test that bears its ID, and a row in the README."""

import re

from nanochat.common import REPOSITORY
from tests.cases import CASES, NOT_HERE

TESTS = REPOSITORY / "tests"


def named() -> set[str]:
    """The IDs in the names of all tests."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    names = re.findall(r"def (test_\w+)", text)
    return {case for name in names for case in re.findall(r"(?<=_)([BRPSV]\d+)(?=_)", name)}


def test_every_case_has_a_test_and_every_ID_is_a_case():
    assert named() == set(CASES) and NOT_HERE.keys() <= CASES.keys()


def test_the_table_has_every_case_with_a_result():
    lines = (TESTS / "README.md").read_text().splitlines()
    rows = {cells[1]: cells for line in lines if len(cells := re.split(r" *\| *", line)) == 7}
    for case, promise in CASES.items():
        assert rows[case][2] == promise
        assert "passed" in rows[case][5] or "not here: needs" in rows[case][5], rows[case]
        assert "failure" not in rows[case][5] and "error" not in rows[case][5]
