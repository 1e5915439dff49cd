#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# bench/gpu_check.sh [--fresh]
# What only a GPU can tell, in under ten minutes: the device's tests, plain and under compute-sanitizer, and how fast
# kernels and whole blends are. Prints one JSON, which is left in build/gpu_check/results/gpu_check.json too.
#
# Each step leaves its result in build/gpu_check/results and is not run again where that is there: after a run that was
# cut, call it again; on another machine, with that folder. Results of other sources or another GPU are thrown away,
# with --fresh all of them. Steps go in the order of their value; a failed one stops no other, and is tried again next time.
#
# Needs nvcc with cuBLAS and compute-sanitizer, g++ 12 or newer, python3, the headers of doctest and Eigen. No network.
# Where FlashInfer's headers are at hand (0.2.5, in KVBLEND_INCLUDE or in build/deps, where the tests' build fetches
# them), its attention is checked against the engine's own and timed too.
#   KVBLEND_INCLUDE             folders of headers, separated by ":", where those are not the system's
#   KVBLEND_GPU_CHECK_SECONDS   time for all of it (570)
#   OUT                         a folder for the results too, if it is set
#
# Exit status: 0 all passed, 1 something failed, 3 not everything has run yet, 77 there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

readonly work=$PWD/build/gpu_check
readonly results=$work/results
readonly programs=$work/programs

left() { echo $((${KVBLEND_GPU_CHECK_SECONDS:-570} - SECONDS)); }
say() { echo "gpu_check: $*" >&2; }
stop() {
  say "$2"
  exit "$1"
}

# --- the machine ---

PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
[[ $gpu =~ ^(.*),\ *([0-9]+)\.([0-9]+)$ ]] ||
  stop 77 "there is no GPU here (nvidia-smi names none); nothing was checked."
readonly arch=sm_${BASH_REMATCH[2]}${BASH_REMATCH[3]}
for tool in nvcc g++ python3; do
  command -v "$tool" >/dev/null || stop 1 "$tool is needed, and was not found."
done
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
PATH=$PATH:$cuda/compute-sanitizer
say "$gpu: $arch"

# Results are of these sources on this GPU.
key=$({
  echo "$gpu"
  find include tests examples/cuda_engine examples/eigen_engine bench -type f \
    \( -name '*.hpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' -o -name gpu_check.sh \) -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum
} | sha256sum)
if [[ ${1:-} == --fresh || $key != $(cat "$results/key" 2>/dev/null) ]]; then
  rm -rf "$results"
fi
[[ $key == $(cat "$programs/key" 2>/dev/null) ]] || rm -rf "$programs"
mkdir -p "$results" "$programs"
echo "$key" | tee "$results/key" >"$programs/key"

# --- builds: all at once, while steps run ---

includes=(-Iinclude -Iexamples -Itests -I/usr/include/eigen3)
IFS=: read -ra folders <<<"${KVBLEND_INCLUDE:-}"
for folder in ${folders[@]+"${folders[@]}"}; do includes+=("-I$folder"); done

# cuBLAS is the toolkit's, or comes with Python's packages.
cublas=()
packages=$(python3 -c 'import glob, site
for folder in site.getsitepackages(): print(*glob.glob(folder + "/nvidia/cu*"))')
for root in "$cuda" $packages; do
  for library in "$root"/lib64/libcublas.so* "$root"/lib/libcublas.so*; do
    [[ -e $library && ${#cublas[@]} -eq 0 ]] || continue
    cublas=("-I$root/include" -Xlinker "$library" -Xlinker -rpath -Xlinker "${library%/*}")
  done
done

device=(nvcc -std=c++20 "-arch=$arch" "${includes[@]}")
nvcc --help | grep -q -e --split-compile && device+=(--split-compile 0)

set -m # a build is a process group of its own
declare -A building=()
trap 'for pid in $(jobs -pr); do kill -- "-$pid"; done' EXIT

# build PROGRAM COMMAND…: the command makes $programs/PROGRAM.new.
build() {
  local program=$programs/$1
  [[ -x $program ]] && return
  ("${@:2}" >"$program.log" 2>&1 && mv "$program.new" "$program") &
  building[$1]=$!
}
built() {
  while [[ ! -x $programs/$1 ]] && kill -0 "${building[$1]:-}" 2>/dev/null && (($(left) > 5)); do sleep 0.2; done
  [[ -x $programs/$1 ]]
}

# The sources that tests/cuda/CMakeLists.txt has, with its flags.
# shellcheck disable=SC2317 # build calls it
build_tests() {
  local source pid sources objects=() pids=()
  sources=$(tr '\n' ' ' <tests/cuda/CMakeLists.txt | sed -n 's/.*set(sources \([^)]*\)).*/\1/p')
  for source in $sources; do
    local object=$programs/${source##*/}.o options=(-DKVBLEND_TEST_CUDA=1)
    [[ $source == */device_main ]] || options+=(-x cu -lineinfo -fmad=false)
    "${device[@]}" "${options[@]}" -c "tests/$source.cpp" -o "$object" &
    pids+=($!)
    objects+=("$object")
  done
  for pid in "${pids[@]}"; do wait "$pid" || return 1; done
  "${device[@]}" "${objects[@]}" -o "$programs/device_tests.new"
}

# build_bench PROGRAM FLAG…
# shellcheck disable=SC2317
build_bench() {
  local products=$programs/$1.cpu_gemm.o
  g++ -std=c++20 -O3 "${includes[@]}" -isystem "$cuda/include/cccl" -isystem "$cuda/include" \
    -DTHRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP -DEIGEN_DONT_PARALLELIZE \
    -c examples/cuda_engine/cpu_gemm.cpp -o "$products" &&
    "${device[@]}" -O3 "${@:2}" examples/cuda_engine/bench.cu "$products" "${cublas[@]}" -o "$programs/$1.new"
}

flashinfer=
for folder in ${folders[@]+"${folders[@]}"} build/deps/flashinfer_python-0.2.5/include; do
  [[ -z $flashinfer && -e $folder/flashinfer/attention/prefill.cuh ]] && flashinfer=$folder
done

readonly codecs=(Bf16Codec Q8_0Codec Fp8E4M3Codec F16Codec F32Codec)
build device_tests build_tests
build cuda_bench build_bench cuda_bench
if [[ -n $flashinfer ]]; then
  build flashinfer_bench build_bench flashinfer_bench -DKVBLEND_WITH_FLASHINFER=1 -isystem "$flashinfer"
else
  say "FlashInfer's headers are not at hand: its attention is left out"
fi
build predict g++ -std=c++20 -O1 bench/predict.cpp -o "$programs/predict.new"
for codec in "${codecs[@]}"; do
  build "shift_$codec" "${device[@]}" -O3 "-DKVBLEND_BENCH_CODEC=$codec" bench/gpu_shift.cu \
    -o "$programs/shift_$codec.new"
done

# --- steps ---

declare -a steps=()
failed=0
missing=0

# The one JSON, of the results that there are.
report() {
  python3 - "$results" "$gpu" "${flashinfer:+at hand}" "${steps[@]}" >"$results/gpu_check.part" <<'PYTHON'
import json, os, sys
folder, gpu, flashinfer, steps = sys.argv[1], sys.argv[2], sys.argv[3] or "not at hand", sys.argv[4:]
def read(name, ending):
    path = os.path.join(folder, name + ending)
    return open(path, errors="replace").read() if os.path.exists(path) else None
def entry(name):
    for ending, state in ((".out", "passed"), (".failed", "failed")):
        text = read(name, ending)
        if text is None:
            continue
        try:
            result = json.loads(text)
        except ValueError:
            result = [line for line in text.splitlines() if line.strip()][-12 if state == "failed" else -4:]
        return {"state": state, "seconds": int(read(name, ".seconds") or 0), "result": result}
    return {"state": "not run"}
all_steps = {name: entry(name) for name in steps}
done = {name: step["result"] for name, step in all_steps.items() if step["state"] == "passed"}
# Times to the first token beside what was predicted; how much of the loading they hide.
predicted = {(p["tokens"], p["work"]): p["resident_ms"] for p in done.get("predicted", [])}
loads = [k["gbps"] for k in done.get("shift_Bf16Codec", {}).get("kernels", []) if k["kernel"].startswith("load")]
summary = []
for name in (n for n in done if n.startswith("ttft_")):
    run = done[name]
    full = run["full_prefill"]["median_ms"]
    tokens, blends = run["tokens"], {}
    for blend in run["blends"]:
        blends.setdefault(blend["ratio"], {})[blend["kv"]] = blend["median_ms"]
    attention = run["attention"]
    summary.append({"tokens": tokens, "attention": attention, "work": "full prefill", "ms": full,
                    "predicted_ms": predicted.get((tokens, "full prefill"))})
    for ratio, ms in blends.items():
        work = "blend %d %%" % round(100 * ratio) if ratio else "full reuse"
        line = {"tokens": tokens, "attention": attention, "work": work, "ms": ms["device"],
                "predicted_ms": predicted.get((tokens, work)), "speed_up": round(full / ms["device"], 2),
                "others_ms": {kv: t for kv, t in ms.items() if kv != "device"}}
        if "pinned" in ms and loads:
            load = (tokens - run["question"]) * 131072 / loads[0] / 1e6
            line["load_ms"] = round(load, 3)
            line["load_hidden"] = round(1 - (ms["pinned"] - ms["device"]) / load, 3)
        summary.append(line)
complete = all(step["state"] == "passed" for step in all_steps.values())
print(json.dumps({"gpu": gpu, "complete": complete, "flashinfer_headers": flashinfer, "summary": summary,
                  "steps": all_steps}, indent=1))
PYTHON
  mv "$results/gpu_check.part" "$results/gpu_check.json"
  if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT" && cp "$results/gpu_check.json" "$OUT" && tar -C "$work" -czf "$OUT/results.tar.gz" results
  fi
}

# step NAME SECONDS PROGRAM WANTED COMMAND…: passes if the command does, and prints what WANTED (a regular expression)
# matches.
step() {
  local name=$1 limit=$2 program=$3 wanted=$4 started=$SECONDS state result=$results/$1
  shift 4
  steps+=("$name")
  if [[ -e $result.out ]]; then
    say "$name: passed before"
    return
  fi
  if (($(left) < 10)); then
    say "$name: no time left"
    missing=1
    return
  fi
  if ! built "$program"; then
    if kill -0 "${building[$program]:-}" 2>/dev/null; then
      say "$name: no time left to build $program"
      missing=1
      return
    fi
    { echo "$program was not built:" && cat "$programs/$program.log"; } >"$result.failed"
    state=failed
  else
    (($(left) < limit)) && limit=$(left)
    if timeout -k 5 "$limit" "$@" >"$result.part" 2>"$result.log" && grep -Eq -e "$wanted" "$result.part"; then
      rm -f "$result.failed"
      mv "$result.part" "$result.out"
      state=passed
    else
      { cat "$result.part" "$result.log" && echo "(not passed within $limit s)"; } >"$result.failed"
      rm -f "$result.part"
      state=failed
    fi
  fi
  [[ $state == failed ]] && failed=1
  echo $((SECONDS - started)) >"$result.seconds"
  say "$name: $state, $((SECONDS - started)) s"
  report
}

some='*merging writes*,*the best come out*,*pairs turn*,*deviations are*,*a blend on the device*'
some+=',*blend through the loader*'
readonly ran='test cases: +[1-9]'
readonly bench=("$programs/cuda_bench" --ratios "0,0.05,0.15,0.3")
sanitizer() { printf '%s\n' compute-sanitizer --error-exitcode 9 --tool "$1"; }
readarray -t memcheck < <(sanitizer memcheck)
readarray -t racecheck < <(sanitizer racecheck)

# shellcheck disable=SC2016 # the inner shell expands it
step predicted 20 predict '' bash -c '"$0" --json /dev/fd/3 3>&1 >&2' "$programs/predict"
step tests 120 device_tests "$ran" "$programs/device_tests"
step engine_check 60 cuda_bench '' "$programs/cuda_bench" --check
step ttft_4k 90 cuda_bench '' "${bench[@]}" --tokens 4096
step shift_Bf16Codec 30 shift_Bf16Codec '' "$programs/shift_Bf16Codec"
step ttft_16k 120 cuda_bench '' "${bench[@]}" --tokens 16384
step memcheck_tests 120 device_tests "$ran" "${memcheck[@]}" "$programs/device_tests" "--test-case=$some"
step memcheck_engine 60 cuda_bench '' "${memcheck[@]}" "$programs/cuda_bench" --check
step racecheck_tests 120 device_tests "$ran" "${racecheck[@]}" "$programs/device_tests" "--test-case=$some"
step racecheck_engine 60 cuda_bench '' "${racecheck[@]}" "$programs/cuda_bench" --check
if [[ -n $flashinfer ]]; then
  readonly peer=$programs/flashinfer_bench
  step flashinfer_check 60 flashinfer_bench '"compared_with": "own"' "$peer" --check
  for tokens in 4 16; do
    step "ttft_${tokens}k_flashinfer" 90 flashinfer_bench '' "$peer" "${bench[@]:1}" --attention flashinfer \
      --no-pinned --tokens $((1024 * tokens))
  done
  step memcheck_flashinfer 60 flashinfer_bench '' "${memcheck[@]}" "$peer" --check
fi
for codec in "${codecs[@]:1}"; do
  step "shift_$codec" 30 "shift_$codec" '' "$programs/shift_$codec"
done

report
cat "$results/gpu_check.json"
((failed)) && exit 1
((missing)) && exit 3
exit 0
