# Sourced by the scripts that run stages one after the other. Needs: processes, how many there are.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$([ "$processes" -gt 1 ] && echo 1 || nproc 2>/dev/null || echo 4)}"

stage() { # stage <name> <command...>
    local name=$1 status=0
    shift
    echo
    echo "=== $name"
    "$@" || status=$?
    [ "$status" -eq 0 ] && return
    echo "stage '$name' failed with status $status; run this script again to continue" >&2
    exit "$status"
}
train() { # one process, or one per GPU
    if [ "$processes" -gt 1 ]; then
        torchrun --standalone --nproc_per_node="$processes" -m "$@"
    else
        python -m "$@"
    fi
}
