#!/usr/bin/env bash
# benchmarks/on_gpu.sh PART    (from the root of the tree)
#
# What only a machine with a CUDA device can show, in parts of less than ten minutes each, the most telling first, 45 in
# all. The machine needs Python 3.12, torch with CUDA and transformers, and no network: what else is missing comes as
# wheels.
#
#   pack FOLDER  here, with a network: FOLDER/mmtrain (the tree of HEAD, wheels) and FOLDER/compiler (numba's wheels,
#                this script), 64 MiB at most each; carry them one after the other to the same machine
#   wheels       there, in FOLDER/compiler: installs its wheels
#   setup        there, in FOLDER/mmtrain: installs those wheels that are missing, and says what is still not there
#   tests        pytest -m gpu
#   attention    variable-length attention against SDPA and FlexAttention, by documents and masks: times and memory (that
#                they give the same is one of the tests)
#   blocks       blocks and a head of published shapes: times, MFU, kernels, waits, memory, eager and compiled
#   step         whole steps at one rank: kernels, waits and where they are, memory
#   ranks        two ranks on one device over gloo: streams, events, offloading, memory limits, all axes
#   one_gpu      mmtrain, a plain loop and Hugging Face's Trainer on one device
#   all          setup to one_gpu, one after the other
#
# Each part leaves its output in REPORT/PART.txt and its line in REPORT/report.md as soon as it has ended, and exits with
# 1 if it failed. A part that would take longer stops between two measurements and keeps those that it has.
#
#   REPORT=on_gpu_report    folder of the report
#   WHEELS=wheels           folder of the wheels
#   SITE=$TMPDIR/mmtrain-site  folder that they are installed into; nothing else on the machine is changed

set -u
cd "$(dirname "$0")/.." || exit 1
REPORT=${REPORT:-on_gpu_report} WHEELS=${WHEELS:-wheels} SITE=${SITE:-${TMPDIR:-/tmp}/mmtrain-site} PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1

# Small enough to carry with the tree. pyarrow (55 MB) is not, and jsonl files need none.
CARRIED="torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 torchdata==0.11.0 tyro==1.0.17
  docstring_parser==0.18.0 typeguard==4.6.0 einops==0.8.2 diffusers==0.42.1 importlib_metadata==10.2.0 zipp==4.1.2
  accelerate==1.15.0 peft==0.21.2 tqdm==4.70.1 pillow==13.0.0 safetensors==0.8.0 pytest==9.2.0 pluggy==1.7.0
  iniconfig==2.3.1 hypothesis==6.170.15 sortedcontainers==2.4.0 tensorboard==2.21.0 absl-py==2.5.1
  protobuf==7.36.2 Markdown==3.11.3 Werkzeug==3.1.9"
COMPILER="numba==0.68.1 llvmlite==0.50.0"
LARGEST_KIB=65536

download() {
  local folder=$1
  shift
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$folder/wheels" "$@" || return 1
  local kib
  kib=$(du -sk "$folder" | cut -f1)
  echo "$folder: $(du -sk "$folder/wheels" | cut -f1) KiB of wheels, $kib KiB in all"
  [ "$kib" -le "$LARGEST_KIB" ] || { echo "that is more than $LARGEST_KIB KiB; shorten its list of wheels"; return 1; }
}

pack() {
  local folder=${1:?name a folder to make}
  [ -e "$folder" ] && { echo "$folder exists already; remove it or name another folder"; return 1; }
  mkdir -p "$folder/mmtrain" "$folder/compiler/benchmarks" && git archive HEAD | tar -x -C "$folder/mmtrain" || return 1
  cp benchmarks/on_gpu.sh benchmarks/on_gpu_setup.py "$folder/compiler/benchmarks" || return 1
  # shellcheck disable=SC2086  # lists of words
  download "$folder/mmtrain" $CARRIED && download "$folder/compiler" $COMPILER
}

wheels() {
  "$PYTHON" benchmarks/on_gpu_setup.py --only-install "$WHEELS" "$SITE"
}

setup() {
  "$PYTHON" benchmarks/on_gpu_setup.py "$WHEELS" "$SITE"
}

tests() {
  # Warnings of another torch are no failures; and only these files need what they import.
  grep -rlZ --include='test_*.py' 'mark\.gpu' tests | xargs -0 "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider -W default
}

attention() {
  "$PYTHON" benchmarks/attention.py --seconds 420
}

blocks() {
  "$PYTHON" benchmarks/on_gpu_blocks.py --seconds 420
}

step() {
  "$PYTHON" benchmarks/on_gpu_step.py
}

ranks() {
  "$PYTHON" benchmarks/on_gpu_ranks.py --seconds 420
}

one_gpu() {
  "$PYTHON" benchmarks/one_gpu.py --rounds 2
}

# Seconds that a part may take, all below the ten minutes that a machine may be lent for; in the order of `all`.
PARTS="setup tests attention blocks step ranks one_gpu"
declare -A LIMIT=([wheels]=60 [setup]=60 [tests]=240 [attention]=500 [blocks]=500 [step]=300 [ranks]=560 [one_gpu]=560)

run_part() {
  local part=$1 start=$SECONDS status
  mkdir -p "$REPORT"
  export -f "$part"
  export REPORT WHEELS SITE PYTHON
  timeout --kill-after=10 "${LIMIT[$part]}" bash -c "$part" 2>&1 | tee "$REPORT/$part.txt"
  status=${PIPESTATUS[0]}
  [ "$status" = 124 ] && echo "stopped after ${LIMIT[$part]} s" | tee -a "$REPORT/$part.txt"
  [ -e "$REPORT/report.md" ] || printf '# On a GPU\n\n| part | status | seconds |\n|---|---|---|\n' >"$REPORT/report.md"
  echo "| [$part]($part.txt) | $([ "$status" = 0 ] && echo ok || echo "failed ($status)") | $((SECONDS - start)) |" \
    >>"$REPORT/report.md"
  return $((status != 0))
}

case "${1:-}" in
  pack) pack "${2:-}" ;;
  wheels | setup | tests | attention | blocks | step | ranks | one_gpu) run_part "$1" ;;
  all)
    failed=0
    for part in $PARTS; do run_part "$part" || failed=1; done
    cat "$REPORT/report.md"
    exit $failed
    ;;
  *)
    sed -n '2,/^$/{/^#/p}' "$0" | cut -c3-
    exit 2
    ;;
esac
