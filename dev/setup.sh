# Sourced by speedrun.sh and tests/run.sh: install uv, Rust, a C++ compiler and the Python packages.
# System packages are installed on Debian and Ubuntu only, as root or with a sudo that asks for no
# password; if something is missing otherwise, an error says how to install it.
# GROUPS_WANTED="--group interop" adds an optional dependency group.
# TORCH_BACKEND=cu126 (or cu128, auto, ...) replaces a PyTorch build that cannot use the GPUs.

UV_VERSION=0.13.9
RUST_MINIMUM=1.85 # rust-version of rustbpe/Cargo.toml
INSTALL_GB=8
export PATH="$PWD/.uv/bin:$HOME/.local/bin:$HOME/.cargo/bin:$PATH"

fail() { # fail <error> <fix>
    echo "error: $1
  fix:  $2" >&2
    exit 2
}

apt_install() { # apt_install <package>
    local root
    root=$([ "$(id -u)" -eq 0 ] || echo "sudo -n")
    command -v apt-get && { $root apt-get update -qq; $root apt-get install -qq -y "$1"; }
} >/dev/null 2>&1

if ! command -v uv >/dev/null; then
    echo "setup: installing uv $UV_VERSION into .uv/"
    python3 -c "import ensurepip" 2>/dev/null || apt_install python3-venv || true
    { python3 -m venv .uv && .uv/bin/python -m pip install "uv==$UV_VERSION"; } >/dev/null 2>&1 ||
        fail "uv is not installed, and installing it failed" \
            "apt-get install python3-venv (Debian, Ubuntu) or python3 -m pip install uv==$UV_VERSION, then rerun"
fi

if ! command -v cargo >/dev/null; then # Debian's cargo-web is a current Rust, its cargo an older one
    echo "setup: installing Rust"
    { apt_install rustup && rustup default stable >/dev/null 2>&1; } ||
        apt_install cargo-web || apt_install cargo || true
fi
rust=$(cargo --version 2>/dev/null | cut -d " " -f 2 || true)
if [ "$(printf '%s\n' "$RUST_MINIMUM" "${rust:-0}" | sort -V | head -n 1)" != "$RUST_MINIMUM" ]; then
    fail "Rust $RUST_MINIMUM or newer is needed to build the tokenizer; found: ${rust:-none}" \
        "install it from https://rustup.rs, then rerun this command"
fi

if ! command -v c++ >/dev/null; then # links the tokenizer; torch.compile needs it, too
    echo "setup: installing a C++ compiler"
    apt_install g++ || fail "no C++ compiler (c++) was found" "install g++ or clang with your system's package manager"
fi

if [ ! -d .venv ]; then
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1000000) }')
    [ "$free" -ge "$INSTALL_GB" ] ||
        fail "the installation needs about $INSTALL_GB GB, but $PWD has $free GB free" \
            "free some space, or move the repository to a larger disk"
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
        fail "nvidia-smi lists $gpus GPUs and profile $PROFILE needs $processes, but PyTorch finds ${seen% *} \
(driver $driver, PyTorch built for CUDA ${seen#* })" \
            "update the driver; or set TORCH_BACKEND=auto (or cu126, cu128, ...), which installs another build with
        \`uv pip install torch --torch-backend=auto\`; or use PROFILE=cpu"
    fi
fi
