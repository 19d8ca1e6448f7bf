# Sourced by speedrun.sh and tests/run.sh: make sure that uv and Rust are there, and install.
# uv comes from its Python package, Rust from the system's package manager; where neither works, says
# what to do by hand. GROUPS_WANTED="--group interop" adds an optional group of packages.
# TORCH_BACKEND=cu126 (or cu128, auto, ...) replaces a PyTorch that cannot use the GPUs by another build.

UV_VERSION=0.13.9
RUST_MINIMUM=1.85 # rust-version of rustbpe/Cargo.toml
INSTALL_GB=8
export PATH="$PWD/.uv/bin:$HOME/.local/bin:$HOME/.cargo/bin:$PATH"

need() { # need <command> <how to install it by hand>
    command -v "$1" >/dev/null && return
    echo "error: $1 is not installed, and no package manager here could install it
  fix:  $2" >&2
    exit 2
}

if ! command -v uv >/dev/null; then
    echo "setup: installing uv $UV_VERSION into .uv/"
    { python3 -m venv .uv && .uv/bin/python -m pip install "uv==$UV_VERSION"; } >/dev/null 2>&1 ||
        python3 -m pip install --user "uv==$UV_VERSION" >/dev/null 2>&1 || true
fi
need uv "python3 -m pip install uv==$UV_VERSION, or see https://docs.astral.sh/uv/"

rust_is_new_enough() {
    command -v cargo >/dev/null &&
        cargo --version | awk -v need="$RUST_MINIMUM" \
            '{ split($2, have, "."); split(need, least, "."); exit !(have[1] > least[1] || have[2] >= least[2]) }'
}
with_apt() { # rustup where the distribution has it, else the Rust that Debian 12 keeps current for browsers
    $root apt-get update -qq
    $root apt-get install -qq -y rustup && rustup default stable && return
    $root apt-get install -qq -y cargo-web || $root apt-get install -qq -y cargo
}
if ! command -v cargo >/dev/null; then
    root=$([ "$(id -u)" -eq 0 ] || echo "sudo -n")
    echo "setup: installing Rust with the system's package manager"
    if command -v apt-get >/dev/null; then
        with_apt
    elif command -v dnf >/dev/null; then
        $root dnf install -q -y cargo clippy rustfmt
    elif command -v pacman >/dev/null; then
        $root pacman -Sy --noconfirm rust
    elif command -v brew >/dev/null; then
        brew install rust
    fi >/dev/null 2>&1 || true
fi
by_hand="install Rust $RUST_MINIMUM or newer as https://rustup.rs says, then run this again"
need cargo "$by_hand"
if ! rust_is_new_enough; then
    echo "error: $(cargo --version) is older than Rust $RUST_MINIMUM
  fix:  $by_hand" >&2
    exit 2
fi

if [ ! -d .venv ]; then
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1000000) }')
    if [ "$free" -lt "$INSTALL_GB" ]; then
        echo "error: the installation takes about $INSTALL_GB GB, but $PWD has $free GB free
  fix:  make room, or move the repository to a larger disk" >&2
        exit 2
    fi
fi
echo "setup: installing packages (PyTorch brings CUDA: about 6 GB on disk, once)"
# bytecode: once, not at the start of every stage; inexact: leaves in place what others installed
uv sync --quiet --inexact --compile-bytecode ${TORCH_BACKEND:+--no-install-package torch} ${GROUPS_WANTED-}
source .venv/bin/activate
torch_works() { python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and sys.argv[1] != "cpu")' "$1" 2>/dev/null; }
if [ -n "${TORCH_BACKEND:-}" ] && ! torch_works "$TORCH_BACKEND"; then
    echo "setup: installing PyTorch for $TORCH_BACKEND"
    uv pip install --quiet --reinstall-package torch "torch>=2.11,<3" --torch-backend="$TORCH_BACKEND"
fi
