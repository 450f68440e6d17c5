#!/usr/bin/env bash
# fuzz.sh TARGET ROOT WORK: five seconds of one libFuzzer target, from its corpus in the tree.
set -uo pipefail
name=$(basename "$1")
log=$3/$name.log
new=$3/$name.corpus
mkdir -p "$new"
corpus=$2/tests/c/corpus/${name#fuzz_}
if [ ! -d "$corpus" ]; then
    echo "$name: no seeds in $corpus"
    exit 1
fi
# A 16-byte input must not make a parser ask for gigabytes: memory is part of the check.
"$1" -max_total_time=5 -rss_limit_mb=768 -timeout=60 -print_final_stats=1 \
    -artifact_prefix="$3/$name." "$new" "$corpus" >"$log" 2>&1
status=$?
units=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
echo "$name: ${units:-0} inputs, $(find "$corpus" -type f | wc -l) seeds"
if [ "$status" -ne 0 ] || [ "${units:-0}" -lt 1000 ]; then
    tail -n 60 "$log"
    exit 1
fi
