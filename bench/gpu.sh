#!/usr/bin/env bash
# A quarter of an hour on a machine with one NVIDIA GPU, from a clone: what only a GPU can show, most important first. Results, a log of
# each part and its status are in $OUT (default: build/gpu). A part that fails or takes too long does not end the others.
#   OUT=/tmp/gpu bench/gpu.sh            everything
#   bench/gpu.sh kernels steps           these parts
# PYTHON: an interpreter with torch for CUDA and Triton; default: .venv, which `make install TORCH=cuda` would make.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${OUT:-$PWD/build/gpu}
models=${MODELS:-/tmp/ryzanstein-gpu}
mkdir -p "$out" "$models"
export PYTHONPATH=$PWD:$PWD/generated:$PWD/clients/python HF_HUB_OFFLINE=1
python=${PYTHON:-.venv/bin/python}
failed=()

# part NAME SECONDS COMMAND...: runs within a time limit; what it prints goes to the log of that name.
part() {
  local name=$1 limit=$2 began=$SECONDS status=0
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$?
  echo "$name: status $status after $((SECONDS - began)) s" | tee -a "$out/summary.txt"
  if [ "$status" != 0 ]; then
    failed+=("$name")
    tail -n 15 "$out/$name.txt"
  fi
}

set_up() {
  if ! nvidia-smi -L >"$out/gpus.txt" 2>&1; then
    echo "no NVIDIA GPU is seen: nvidia-smi says $(head -n 1 "$out/gpus.txt")" >&2
    exit 1
  fi
  if ! "$python" -c 'import torch, triton, ryzanstein' 2>/dev/null; then
    echo "installing into .venv"
    if ! make install TORCH=cuda >"$out/install.txt" 2>&1; then
      tail -n 20 "$out/install.txt"
      exit 1
    fi
  fi
  "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())' |
    tee "$out/versions.txt" || exit 1
  [ -f "$models/1b/config.json" ] || "$python" -m bench.make_checkpoint 1b "$models/1b" >"$out/checkpoints.txt" 2>&1
  { [ -f "$models/8b/config.json" ] || "$python" -m bench.make_checkpoint 8b "$models/8b" >>"$out/checkpoints.txt" 2>&1; } &
  making=$!
}

kernels() {
  part kernels 120 "$python" -m pytest -q -p no:cacheprovider tests/triton tests/unit/compute/backends
}

families() {
  part families 150 "$python" -m pytest -q -p no:cacheprovider -n 8 tests/unit/compute/model -k "cuda or half"
}

steps() {
  local keys graphs
  for keys in 128 1900; do
    part "steps-1b-$keys" 60 "$python" -m bench.engine "$models/1b" --device cuda --batches 1,16,64 --prompt-tokens "$keys" \
      --output-tokens 96 --rounds 1 --json "$out/steps-1b-$keys.json"
  done
  part steps-1b-128-in-turn 60 "$python" -m bench.engine "$models/1b" --device cuda --batches 1,16,64 --prompt-tokens 128 \
    --output-tokens 96 --rounds 1 --overlap off --json "$out/steps-1b-128-in-turn.json"
  part steps-1b-128-top-p 60 "$python" -m bench.engine "$models/1b" --device cuda --batches 1,8,16,64 --prompt-tokens 128 \
    --output-tokens 96 --rounds 1 --temperature 1 --top-p 0.9 --json "$out/steps-1b-128-top-p.json"
  part steps-1b-128-int4 60 "$python" -m bench.engine "$models/1b" --device cuda --batches 1,16,64 --prompt-tokens 128 \
    --output-tokens 96 --rounds 1 --quantization int4 --json "$out/steps-1b-128-int4.json"
  for graphs in gpu-graphs no-gpu-graphs; do
    [ "$(wc -l <"$out/gpus.txt")" -lt 2 ] || part "steps-1b-128-2-ranks-$graphs" 90 "$python" -m bench.engine "$models/1b" \
      --device cuda --ranks 2 --batches 1,16,64 --prompt-tokens 128 --output-tokens 96 --rounds 1 "--$graphs"
  done
  part steps-1b-128-torch 60 "$python" -m bench.engine "$models/1b" --device cuda --batches 1,16,64 --prompt-tokens 128 \
    --output-tokens 96 --rounds 1 --gpu-kernels torch --json "$out/steps-1b-128-torch.json"
  wait "$making"
  for keys in 128 1900; do
    part "steps-8b-$keys" 80 "$python" -m bench.engine "$models/8b" --device cuda --batches 1,16,64 --prompt-tokens "$keys" \
      --output-tokens 48 --rounds 1 --json "$out/steps-8b-$keys.json"
  done
}

# Models with a state in addition to the KV cache, random weights: our kernels and graphs, and torch's.
hybrids() {
  local model kernels
  for model in lfm2-350m granite-4-h-350m; do
    [ -f "$models/$model-bf16.gguf" ] || part "write-$model" 90 "$python" -c \
      'import sys; from pathlib import Path; from bench.hybrid import write_file; write_file(sys.argv[1], "bf16", Path(sys.argv[2]))' \
      "$model" "$models"
    for kernels in auto torch; do
      part "steps-$model-1900-$kernels" 60 "$python" -m bench.engine "$models/$model-bf16.gguf" --device cuda --batches 1,16,64 \
        --prompt-tokens 1900 --output-tokens 96 --rounds 1 --gpu-kernels "$kernels" --json "$out/steps-$model-1900-$kernels.json"
    done
  done
}

trace() {
  part trace-16 60 "$python" -m bench.gpu_trace "$models/1b" --batch 16 --keys 2000 --trace "$out/trace.json"
}

# With a switch and without it.
pairs() {
  local kernels
  for kernels in auto torch; do
    part "steps-1b-1900-kv-int8-$kernels" 60 "$python" -m bench.engine "$models/1b" --device cuda --batches 1,16,64 \
      --prompt-tokens 1900 --output-tokens 96 --rounds 1 --kv-format int8 --gpu-kernels "$kernels" \
      --json "$out/steps-1b-1900-kv-int8-$kernels.json"
  done
}

# A whole installation, and clients with short and long prompts.
http() {
  local model=1b url=http://127.0.0.1:8199 clients tokens up
  "$python" -c 'from services.cli.main import app; app()' up "$models/$model" --port 8199 --start-timeout 180 \
    >"$out/up-$model.txt" 2>&1 &
  up=$!
  for _ in $(seq 180); do
    curl -sf "$url/readyz" >/dev/null && break
    kill -0 "$up" 2>/dev/null || break
    sleep 1
  done
  for tokens in 128 1024; do
    for clients in 1 16 64 128; do
      part "http-$model-$tokens-$clients" 40 "$python" -m bench.serve --url "$url" --concurrency "$clients" \
        --requests $((clients * 2)) --prompt-tokens "$tokens" --output-tokens 128 --json "$out/http-$model-$tokens-$clients.json"
    done
  done
  kill -INT "$up" 2>/dev/null
  wait "$up"
}

# SmolLM2, from its wheel, with speculation and without: speeds, and whether texts stay the same also on a GPU.
drafts() {
  part drafts 240 "$python" -m bench.speculation --rounds 1 --candidates 30 --max-tokens 400 --at-once 1 --at-once 16 \
    --json "$out/drafts.json"
}

[ $# = 0 ] && set -- kernels families steps hybrids http drafts trace pairs
set_up
for name in "$@"; do
  case $name in
    kernels | families | steps | hybrids | http | drafts | trace | pairs) "$name" ;;
    *) echo "unknown part $name: kernels, families, steps, hybrids, http, drafts, trace or pairs" >&2 && exit 2 ;;
  esac
done
wait "$making"
if [ "${#failed[@]}" != 0 ]; then
  echo "failed: ${failed[*]}" | tee -a "$out/summary.txt"
  exit 1
fi
