# Sourced by speedrun.sh and tests/run.sh: make sure that uv and Rust are there, and install.
# Installs for the current user only; where the network does not allow it, says what to do by hand.
# GROUPS_WANTED="--group interop" adds an optional group of packages.

export PATH="$HOME/.local/bin:$HOME/.cargo/bin:$PATH"

need() { # need <command> <how to install it by hand>
    command -v "$1" >/dev/null && return
    echo "error: $1 is not installed and could not be fetched. $2" >&2
    exit 1
}

if ! command -v uv >/dev/null; then
    echo "setup: installing uv"
    { curl -LsSf https://astral.sh/uv/install.sh | sh; } >/dev/null 2>&1 ||
        python3 -m pip install --quiet --user uv || true
fi
need uv "See https://docs.astral.sh/uv/ or run: python3 -m pip install uv"

if ! command -v cargo >/dev/null; then
    echo "setup: installing the Rust toolchain"
    { curl -LsSf https://sh.rustup.rs | sh -s -- -y --profile minimal -c clippy -c rustfmt; } >/dev/null 2>&1 || true
fi
need cargo "See https://rustup.rs"

echo "setup: installing packages (PyTorch brings CUDA: about 5 GB on disk, once)"
# bytecode: once, not at the start of every stage; inexact: leaves in place what others installed
uv sync --quiet --inexact --compile-bytecode ${GROUPS_WANTED-}
source .venv/bin/activate
