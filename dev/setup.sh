# Install uv, Rust, a C++ compiler and the Python packages; also sourced by dev/profile.sh and
# tests/run.sh. System packages are installed on Debian and Ubuntu only, as root or with a sudo that asks
# for no password; if something is missing otherwise, an error says how to install it.
# SYNC_FLAGS goes to uv sync: "--group interop" adds an optional group of packages.
set -euo pipefail

UV_VERSION=0.13.9
RUST_MINIMUM=1.85 # rust-version of rustbpe/Cargo.toml
export PATH="$PWD/.uv/bin:$HOME/.local/bin:$HOME/.cargo/bin:$PATH"

fail() { # fail <error> <fix>
    echo "error: $1
  fix:  $2" >&2
    exit 2
}

has() { command -v "$1" >/dev/null; }

missing=()
has uv || python3 -c "import ensurepip" 2>/dev/null || missing+=(python3-venv)
has cargo || missing+=(rustup)
has c++ || missing+=(g++)
if [ ${#missing[@]} -gt 0 ] && has apt-get; then
    root=$([ "$(id -u)" -eq 0 ] || echo "sudo -n")
    $root apt-get update -qq || true
    apt-cache show rustup >/dev/null 2>&1 || missing=("${missing[@]/rustup/cargo-web}") # Debian 12
    echo "setup: installing ${missing[*]}"
    $root apt-get install -qq -y "${missing[@]}" >/dev/null || true
fi

if ! has uv; then
    echo "setup: installing uv $UV_VERSION into .uv/"
    { python3 -m venv .uv && .uv/bin/python -m pip install --quiet "uv==$UV_VERSION"; } ||
        fail "uv is not installed, and installing it failed" \
            "apt-get install python3-venv (Debian, Ubuntu) or python3 -m pip install uv==$UV_VERSION, then rerun"
fi
cargo --version >/dev/null 2>&1 || { has rustup && rustup default stable; } || true
rust=$(cargo --version 2>/dev/null | cut -d " " -f 2 || true)
if [ "$(printf '%s\n' "$RUST_MINIMUM" "${rust:-0}" | sort -V | head -n 1)" != "$RUST_MINIMUM" ]; then
    fail "Rust $RUST_MINIMUM or newer is needed to build the tokenizer; found: ${rust:-none}" \
        "install it from https://rustup.rs, then rerun this command"
fi
has c++ || # links the tokenizer; torch.compile needs it, too
    fail "no C++ compiler (c++) was found" "install g++ or clang with your system's package manager"

# torch.compile needs Python's headers; if the system's Python has none, uv downloads one
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true)
[ -e "$headers/Python.h" ] || export UV_PYTHON_PREFERENCE=only-managed
echo "setup: installing packages (PyTorch with CUDA: about 6 GB on disk; once, takes minutes)"
uv sync --quiet --inexact ${SYNC_FLAGS-} # --inexact keeps other installed packages
unset PYTHONDONTWRITEBYTECODE # set in some containers: each start would compile what it imports again
[ -e .venv/bin/uv ] || ln -sf "$(command -v uv)" .venv/bin/uv # found wherever the environment is active
source .venv/bin/activate
# Scripts can also be started by their path, and from other folders
pwd >"$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nanochat.pth"
