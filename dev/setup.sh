# Sourced by speedrun.sh and tests/run.sh: install uv, Rust, a C++ compiler and the Python packages.
# uv is installed with pip, Rust and compiler with the system's package manager; if that fails, an
# error explains how to do it manually. GROUPS_WANTED="--group interop" adds an optional dependency group.
# TORCH_BACKEND=cu126 (or cu128, auto, ...) replaces a PyTorch build that cannot use the GPUs.

UV_VERSION=0.13.9
RUST_MINIMUM=1.85 # rust-version of rustbpe/Cargo.toml
INSTALL_GB=8
export PATH="$PWD/.uv/bin:$HOME/.local/bin:$HOME/.cargo/bin:$PATH"

need() { # need <command> <manual installation>
    command -v "$1" >/dev/null && return
    echo "error: $1 is not installed, and installing it automatically failed
  fix:  $2" >&2
    exit 2
}

root=$([ "$(id -u)" -eq 0 ] || echo "sudo -n")
install_uv() {
    python3 -m venv .uv && .uv/bin/python -m pip install "uv==$UV_VERSION" && return
    rm -rf .uv # without pip
    python3 -m pip install --user "uv==$UV_VERSION" && return
    $root apt-get update -qq && $root apt-get install -qq -y python3-venv # not part of Debian's python3
    python3 -m venv .uv && .uv/bin/python -m pip install "uv==$UV_VERSION"
}
if ! command -v uv >/dev/null; then
    echo "setup: installing uv $UV_VERSION into .uv/"
    install_uv >/dev/null 2>&1 || true
fi
need uv "apt-get install python3-venv (Debian, Ubuntu) or python3 -m pip install uv==$UV_VERSION, then rerun"

rust_is_new_enough() {
    command -v cargo >/dev/null &&
        cargo --version | awk -v need="$RUST_MINIMUM" \
            '{ split($2, have, "."); split(need, least, "."); exit !(have[1] > least[1] || have[2] >= least[2]) }'
}
with_apt() { # rustup if the distribution has it, else Debian's current Rust for browser builds (cargo-web)
    $root apt-get update -qq
    $root apt-get install -qq -y rustup && rustup default stable && return
    $root apt-get install -qq -y cargo-web || $root apt-get install -qq -y cargo
}
if ! command -v cargo >/dev/null; then
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
manual="install Rust $RUST_MINIMUM or newer from https://rustup.rs, then rerun this command"
need cargo "$manual"
if ! rust_is_new_enough; then
    echo "error: $(cargo --version) is older than Rust $RUST_MINIMUM
  fix:  $manual" >&2
    exit 2
fi
if ! command -v c++ >/dev/null && command -v apt-get >/dev/null; then
    echo "setup: installing a C++ compiler"
    { $root apt-get update -qq && $root apt-get install -qq -y g++; } >/dev/null 2>&1 || true
fi
need cc "install a C++ compiler, to link the tokenizer and for torch.compile: apt-get install g++"

if [ ! -d .venv ]; then
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1000000) }')
    if [ "$free" -lt "$INSTALL_GB" ]; then
        echo "error: the installation needs about $INSTALL_GB GB, but $PWD has $free GB free
  fix:  free some space, or move the repository to a larger disk" >&2
        exit 2
    fi
fi
# On a GPU, torch.compile needs Python's headers. If the system's Python has none, uv downloads one.
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true)
if command -v nvidia-smi >/dev/null && [ ! -e "$headers/Python.h" ]; then
    export UV_PYTHON_PREFERENCE=only-managed
fi
echo "setup: installing packages (PyTorch with CUDA: about 6 GB on disk; once, takes minutes)"
keep_torch=${TORCH_BACKEND:+--no-install-package torch --no-install-package triton}
# compile bytecode once, not at the start of every stage; --inexact keeps other installed packages
uv sync --quiet --inexact --compile-bytecode $keep_torch ${GROUPS_WANTED-}
[ -e .venv/bin/uv ] || ln -sf "$(command -v uv)" .venv/bin/uv # found wherever the environment is active
source .venv/bin/activate
# Scripts can also be started by their path, and from other folders
pwd >"$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nanochat.pth"
torch_works() { # torch_works <auto, cpu or cuNNN>: whether this build is installed and, except cpu, finds a GPU
    python -c '
import sys, torch
kind, found = sys.argv[1], "cu" + (torch.version.cuda or "").replace(".", "")
sys.exit(kind not in ("auto", found) or not torch.cuda.is_available() if kind != "cpu" else found != "cu")
' "$1" 2>/dev/null
}
if [ -n "${TORCH_BACKEND:-}" ] && ! torch_works "$TORCH_BACKEND"; then
    echo "setup: installing PyTorch for $TORCH_BACKEND"
    # --no-config: not every file of PyTorch's package index has the date that exclude-newer needs
    uv pip install --quiet --no-config --reinstall-package torch "torch>=2.11,<3" --torch-backend="$TORCH_BACKEND"
fi

# Without this check, a PyTorch build that cannot use the GPUs would silently train on CPU.
if [ "${gpus:-0}" -gt 0 ]; then # see dev/profile.sh
    seen=$(python -W ignore -c 'import torch; print(torch.cuda.device_count(), torch.version.cuda)')
    if [ "${seen% *}" -lt "$processes" ]; then
        driver=$( (nvidia-smi --query-gpu=driver_version --format=csv,noheader || true) | head -n 1)
        echo "error: nvidia-smi lists $gpus GPUs and profile $PROFILE needs $processes, but PyTorch finds ${seen% *} \
(driver $driver, PyTorch built for CUDA ${seen#* })
  fix:  update the driver; or set TORCH_BACKEND=auto (or cu126, cu128, ...), which installs another build with
        \`uv pip install torch --torch-backend=auto\`; or use PROFILE=cpu" >&2
        exit 2
    fi
fi
