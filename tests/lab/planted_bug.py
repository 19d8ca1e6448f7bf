"""
Run a training script with an injected bug: the loss covers questions instead of answers.

    python -m tests.lab.planted_bug scripts.chat_sft --source=mid

Reads and writes the script's files; rows with the bug have their own folder.
"""

import runpy
import sys

from nanochat import rows

if __name__ == "__main__":
    signed_ids = rows.signed_ids
    rows.signed_ids = lambda ids, own: signed_ids(ids, [0, *(not x for x in own[1:])])
    rows.PACKING_RULE = -1  # part of the fingerprint of the packed rows
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
