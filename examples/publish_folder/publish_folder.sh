#!/usr/bin/env bash
# A folder of safetensors spreads to three workers of this machine, then a changed one does.
#
#     examples/publish_folder/publish_folder.sh MODEL_DIR [ANOTHER_MODEL_DIR] [RUN_DIR]
#
# On several machines the workers run elsewhere, each with a key (docs/security.md) and the
# relay of fleet.toml; the commands are the same.
set -euo pipefail

config="$(dirname "$0")/fleet.toml"
model="${1:?give a folder of safetensors}"
next="${2:-$model}"
run="${3:-runs/fleet}"
workers=3
mkdir -p "$run"

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
start() {
    log="$run/$1.log"
    shift
    echo2 "$@" --run-dir "$run" >"$log" 2>&1 &
    pids+=("$!")
}

rm -f "$run/coordinator.json" "$run/origin.json"
start coordinator coordinator "$config"
start origin origin "$config"            # stays, so that a worker that comes late is served too
until [ -s "$run/coordinator.json" ] && [ -s "$run/origin.json" ]; do
    kill -0 "${pids[@]}" || { tail -n 5 "$run"/*.log; exit 1; }
    sleep 0.2
done
for number in $(seq "$workers"); do
    start "w-$number" worker "$config" --name "w-$number"
done

for folder in "$model" "$next"; do
    echo2 publish "$folder" --run-dir "$run" --workers "$workers"
    for number in $(seq "$workers"); do
        sha256sum "$run/workers/w-$number/model/model.safetensors"
    done
done
