#!/usr/bin/env bash
# All checks: format, lint, types, the Rust crate, the ordinary test suite.
#
#   bash tests/run.sh              # all but the slow and net tests
#   bash tests/run.sh -m slow      # arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
# some tests load our models and call our server through other projects' packages
SYNC_FLAGS="${SYNC_FLAGS-} --group interop --group browser"
source dev/setup.sh

ruff check .
ruff format --check .
pyright
cd rustbpe
! cargo fmt --version >/dev/null 2>&1 || cargo fmt --check # not every Rust package has both
! cargo clippy --version >/dev/null 2>&1 || cargo clippy --quiet --all-targets --no-default-features -- -D warnings
cargo test --quiet --release --no-default-features
cd ..
if [ $# -eq 0 ]; then # two files at a time, in the order of tests/conftest.py
    set -- -m "not slow and not net" -n 2 --dist loadfile --no-loadscope-reorder
fi
python -m pytest "$@"
