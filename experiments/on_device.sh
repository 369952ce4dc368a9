#!/usr/bin/env bash
# Are the kernels right on a real GPU, how fast are they, which tilings are best? In one go:
#
#     experiments/on_device.sh [FOLDER]
#
# Correctness, benchmark and tiling search, under five minutes together, on a machine that has JAX,
# pytest and the packages of this project but not the project itself, and no network. A part that
# fails or hangs does not take the others with it; the exit code is that of the first that failed.
# Leaves log.txt and on_device.tar.gz (rows, figures, tuned JSON, the tests' report) in FOLDER, which
# is $OUT where that is set, or else results/on_device. The archive is renewed after every part.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-results/on_device}}
python=${PYTHON:-python3}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
mkdir -p "$out"
: >"$out/log.txt"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=$made/.matplotlib
failed=0

# part SECONDS NAME COMMAND...
part() {
    local seconds=$1 name=$2 start=$SECONDS code
    shift 2
    echo "== $name (at most $seconds s)" | tee -a "$out/log.txt"
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee -a "$out/log.txt"
    code=${PIPESTATUS[0]}
    echo "== $name: exit code $code after $((SECONDS - start)) s" | tee -a "$out/log.txt"
    if ((code != 0 && failed == 0)); then failed=$code; fi
    tar -czf "$out/on_device.tar.gz" -C "$made" --exclude=.matplotlib .
}

# Workers compile side by side, and must not each take three quarters of the device's memory.
tests() {
    local seconds=$1 name=$2 workers=()
    shift 2
    if "$python" -c "import xdist" 2>/dev/null; then
        workers=(--numprocesses="${WORKERS:-8}" --dist=worksteal)
    fi
    part "$seconds" "$name" env XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m pytest -v \
        -p no:cacheprovider -W default "${workers[@]}" --junitxml="$made/$name.xml" "$@"
}

bench() {
    local seconds=$1 name=$2
    shift 2
    # A quarter of the memory stays free for PyTorch, which is timed in the same process.
    part "$seconds" "$name" env XLA_PYTHON_CLIENT_MEM_FRACTION=0.6 \
        "$python" -m experiments.kernel_bench --out="$made/$name" "$@"
}

part 15 device "$python" -c '
import jax, jaxlib, sys
print("python", sys.version.split()[0], "jax", jax.__version__, "jaxlib", jaxlib.__version__)
print(*jax.devices(), jax.devices()[0].device_kind, jax.devices()[0].platform)'
tests 80 correctness tests/pallas_kernels/test_on_device.py
tests 30 block_io tests/pallas_kernels/test_block_io.py
bench 75 bench --sets=8 ${BENCH_FLAGS:---lengths=full --batches=8,64 --contexts=1024,8192}
bench 25 bench_quantised --kernels=decode --contenders=paged --lengths=full --sets=8 \
    --dtypes=int8,float8_e4m3fn ${QUANTISED_FLAGS:---batches=64 --contexts=8192}
bench 60 search --search --search_seconds=14 --tuned="$made/tuned" --sets=4 --repeats=7 \
    --block_sizes=16 ${SEARCH_FLAGS:---batches=8,64 --contexts=8192}
# Again for a benchmark that ran out of time: what it did time is in its rows.
part 10 figures "$python" -m experiments.kernel_figures --out="$made/bench"
echo "$out/log.txt $out/on_device.tar.gz"
exit "$failed"
