#!/usr/bin/env bash
# Everything that needs a CUDA device, in steps of under 9 minutes each, for a machine with cupy and numpy and no TVM.
#
#   benchmarks/gpu_acceptance.sh STEP BUNDLE OUT
#
# STEP   all           every step below that is not done yet
#        unit          the tests marked `cuda`
#        correct       outputs of programs of each task against the task's reference
#        throughput-alone, throughput-together
#                      labels/s from source, one program at a time, and with builders and lanes side by side, whose calibration
#                      says how far labels are from those taken alone
#        operators     PyTorch's kernels of the list OPERATORS (`cdmpp finetune --device h200 --tasks 2000 --out FILE.csv`)
#        networks      networks run by PyTorch, for `benchmarks/eager.py --measured`
#        collect-1.0, collect-0.75, collect-0.5, collect-0.25
#                      data collection on the whole GPU and on shares of it; all of them, one call after another
#        tune          a small network tuned on this GPU and on a share of it, if TVM is on this machine too
# BUNDLE what `cdmpp bundle NETWORK... --device h200 --out BUNDLE` wrote on a machine with TVM and nvcc or NVRTC
# OUT    results; a folder with the results of earlier calls goes on where they stopped
#
# A step that ran out of time exits with 75: call it again. Each file in OUT stays under 16 MB.
# Environment: PYTHON (python3), STEP_SECONDS (480), SHARE_PROGRAMS (2200), THROUGHPUT_PROGRAMS (160), TUNE_TRIALS (300), OPERATORS.
set -euo pipefail
step=${1:?which step?}; bundle=${2:?which bundle?}; out=${3:?where to?}
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
STEP_SECONDS=${STEP_SECONDS:-480}
SHARE_PROGRAMS=${SHARE_PROGRAMS:-2200}
THROUGHPUT_PROGRAMS=${THROUGHPUT_PROGRAMS:-160}
TUNE_TRIALS=${TUNE_TRIALS:-300}
export PYTHONPATH=${PYTHONPATH:-.} OMP_NUM_THREADS=1
mkdir -p "$out"

is_done() { [ -e "$out/$1.done" ]; }
mark() { date -u +%FT%TZ > "$out/$1.done"; }

unit() {
  timeout "$STEP_SECONDS" "$PYTHON" -m pytest -m cuda -p no:cacheprovider tests/profiler/gpu/test_cupy.py \
    2>&1 | tee "$out/unit.txt"
  mark unit
}

correct() {
  "$PYTHON" -m cdmpp measure "$bundle" --out "$out/correct" --workers 1 --check-per-task 3 --limit "${CORRECT_PROGRAMS:-1500}" \
    --budget "$STEP_SECONDS" --resume --json "$out/correct.json"
  finish correct "${CORRECT_PROGRAMS:-1500}" correct
}

throughput() { # part, options
  "$PYTHON" -m cdmpp measure "$bundle" --from-source --limit "$THROUGHPUT_PROGRAMS" --out "$out/throughput-$1" \
    --budget "$STEP_SECONDS" --resume --json "$out/throughput-$1.json" "${@:2}"
  mark "throughput-$1"
}

operators() {
  [ -n "${OPERATORS:-}" ] || { echo "operators: skipped: no list"; return; }
  local began=$SECONDS
  "$PYTHON" -m cdmpp measure "$OPERATORS" --out "$out/operators" --resume --budget "$STEP_SECONDS"
  [ $((SECONDS - began)) -lt "$STEP_SECONDS" ] || exit 75
  mark operators
}

networks() {
  "$PYTHON" benchmarks/eager.py --device "$(device_of_bundle)" --measured "$out/networks.json"
  mark networks
}

# What it prints counts: seen on a GPU's machine, Python aborts on exit, as pyarrow's threads are still starting.
device_of_bundle() {
  "$PYTHON" -c "import sys; from cdmpp.profiler.gpu.bundle import read_bundle as r; print(r(sys.argv[1]).device)" "$bundle" || true
}

collect() { # share
  local device limit=()
  device="$(device_of_bundle)@$1"
  [ "$1" = 1.0 ] || limit=(--limit "$SHARE_PROGRAMS")
  "$PYTHON" -m cdmpp measure "$bundle" --out "$out/data-$1" --device "$device" "${limit[@]}" \
    --budget "$STEP_SECONDS" --resume --json "$out/collect-$1.json"
  finish "data-$1" "${limit[1]:-0}" "collect-$1"
}

# The whole GPU, then two workers that each have half of it.
tune() {
  if ! "$PYTHON" -c "import tvm" 2> /dev/null; then
    echo "tune: skipped: no TVM here" | tee "$out/tune.txt"
    mark tune
    return
  fi
  local device
  device="$(device_of_bundle)"
  timeout "$((STEP_SECONDS / 2))" "$PYTHON" -m cdmpp tune mlp --device "$device" --trials "$TUNE_TRIALS" --resume \
    --budget "$((STEP_SECONDS / 3))s" --out "$out/tune" --json "$out/tune.json"
  timeout "$((STEP_SECONDS / 2))" "$PYTHON" -m cdmpp tune mlp --device "$device@0.5" --shards 2 --trials "$TUNE_TRIALS" --resume \
    --budget "$((STEP_SECONDS / 3))s" --out "$out/tune-sharded" --json "$out/tune-sharded.json"
  mark tune
}

# Whether a folder has a record of each of the bundle's (first N) programs; marks the step or exits with 75.
finish() { # folder, limit, step
  if "$PYTHON" - "$bundle" "$out/$1" "$2" <<'PY'
import sys
from cdmpp.dataset import Dataset
from cdmpp.profiler.gpu.bundle import read_bundle
bundle, folder, limit = read_bundle(sys.argv[1]), sys.argv[2], int(sys.argv[3])
wanted = min(len(bundle.kernels), limit or len(bundle.kernels))
have = Dataset.open(folder).records["program"].nunique()
print(f"{have} of {wanted} programs have a record")
sys.exit(0 if have >= wanted else 1)
PY
  then mark "$3"; else exit 75; fi
}

run() {
  case "$1" in
    unit) unit ;;
    correct) correct ;;
    throughput-alone) throughput alone --workers 1 --no-overlap ;;
    throughput-together) throughput together ;;
    operators | networks | tune) "$1" ;;
    collect-*) collect "${1#collect-}" ;;
    *) echo "gpu_acceptance: unknown step $1" >&2; exit 2 ;;
  esac
}

if [ "$step" = all ]; then
  for name in unit correct operators networks throughput-alone throughput-together collect-{1.0,0.5,0.25,0.75} tune; do
    is_done "$name" || run "$name"
  done
  echo "all steps are done: $out"
else
  run "$step"
fi
