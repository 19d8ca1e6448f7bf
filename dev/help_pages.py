"""
Write docs/help/<script>.txt: the output of --help, 80 columns wide.

    python -m dev.help_pages
"""

import io
import os
import runpy
from contextlib import redirect_stdout, suppress
from unittest import mock

from nanochat.common import REPOSITORY

FOLDER = REPOSITORY / "docs" / "help"
SCRIPTS = ("base_train", "chat_sft", "chat_rl", "chat_web")


def help_page(script: str) -> str:
    """Output of `python -m scripts.<script> --help`."""
    name, printed = f"scripts.{script}", io.TextIOWrapper(io.BytesIO(), "utf-8")
    columns = mock.patch.dict(os.environ, COLUMNS="80")
    with columns, mock.patch("sys.argv", [name, "--help"]), redirect_stdout(printed):
        with suppress(SystemExit):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    printed.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in printed)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for script in SCRIPTS:
        (FOLDER / f"{script}.txt").write_text(help_page(script))
