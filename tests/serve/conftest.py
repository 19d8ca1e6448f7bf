"""One server for all tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.web_server import Site, serving, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base directory shared by all tests of a module."""
    folder = tmp_path_factory.mktemp("site") / "base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def site(base: Path) -> Iterator[Site]:
    """A server with two models, sft:tiny (the default) and base:tiny."""
    write_model(context=1024)
    write_model("base:tiny", context=1024)
    with serving() as found:
        yield found
