#!/bin/bash
# Experts in VRAM and in host memory against stock with as much of either: reduced depth, the shapes of published models.
# Needs root (cap on memory, read-ahead, page cache, zram) and about 110 GB of RAM.
#   bench/gpu/tier_compare.sh OUTDIR disk|memory|overflow|prompt|k3 [SECONDS]
#   disk      DeepSeek-V4-Flash from the disk: 15 % of the experts in VRAM, 15 or 50 % in host memory, both sides under the same cap
#   memory    the same shape, all experts fit into host memory; once with 4 threads, which see as little of its rate as a desktop's
#   overflow  Qwen3-30B-A3B: 60 % in VRAM, the rest in host memory
#   prompt    DeepSeek's shape, 15 % + 15 %, prompts of 8192 tokens from both drives, ours with the batches that it chooses
#   k3        Kimi-K3 from both drives
# OUTDIR/compare.jsonl grows as results come. DSV4_LAYERS, K3_LAYERS, DSV4_SPREAD, K3_SPREAD, QWEN_SPREAD, N_GEN, WARM, ROUNDS
# and FAST_SIZE may be set, and what compare_functions.sh names.
set -uo pipefail
out=${1:?a folder for the results}
what=${2:?disk, memory, overflow, prompt or k3}
limit_s=${3:-560}
. "$(dirname "$0")/compare_functions.sh"

options=(--n-prompt 64 --n-gen "${N_GEN:-24}" --warm "${WARM:-1}" --rounds "${ROUNDS:-2}")

disk() {
    model "$disk" dsv4 "${DSV4_LAYERS:-8}" "${DSV4_SPREAD:-0.9}" || return 1
    local vram=(--cache 15% "${options[@]}")
    compare "$disk" dsv4 15+15 330 "${vram[@]}" --ram 15% --ram-cap 15% --sides stock-mmap,ours,ours-no-ram
    compare "$disk" dsv4 15+50 330 "${vram[@]}" --ram 50% --ram-cap 50% --sides stock-mmap,ours
    rm -f "$disk"/dsv4.*
}

# the page cache stays warm: tmpfs
memory() {
    local here=/dev/shm/expert-pack-compare
    mkdir -p "$here"
    model "$here" dsv4 "${DSV4_LAYERS:-8}" "${DSV4_SPREAD:-0.9}" || return 1
    local both=(--cache 15% --ram 100% --cold off "${options[@]}" --warm "${WARM:-4}")
    compare "$here" dsv4 15+100 250 "${both[@]}" --sides stock-mmap,stock-direct-io,ours,ours-all
    compare "$here" dsv4 "15+100 4 threads" 150 "${both[@]}" --sides stock-direct-io,ours --threads 4
    rm -rf "$here"
}

overflow() {
    local here=/dev/shm/expert-pack-compare
    mkdir -p "$here"
    model "$here" qwen3moe-30b 48 "${QWEN_SPREAD:-0.6}" || return 1
    local both=(--cache 60% --ram 40% --cold off --offload "${options[@]}" --n-gen "${N_GEN:-64}" --warm "${WARM:-6}")
    local sides=stock-mmap,stock-direct-io,stock-n-cpu-moe,stock-ngl,ours
    compare "$here" qwen3moe-30b 60+40 250 "${both[@]}" --sides $sides,ours-all
    compare "$here" qwen3moe-30b "60+40 4 threads" 150 "${both[@]}" --sides $sides --threads 4
    rm -rf "$here"
}

prompt() {
    local both=(--cache 15% --ram 15% --ram-cap 15% --ctx 9216 --ubatch 4096 --own-ubatch "${options[@]}" --n-prompt 8192 --n-gen 64)
    bench/drive/fast_drive.sh up "$fast" "${FAST_SIZE:-66G}" || return 1
    if model "$fast" dsv4 "${DSV4_LAYERS:-8}" "${DSV4_SPREAD:-0.9}"; then
        compare "$fast" dsv4 "8k fast" 250 "${both[@]}" --sides stock-mmap,ours,ours-all
        [ "${PROMPT_DRIVES:-both}" = both ] && to_disk dsv4 && compare "$disk" dsv4 "8k disk" 330 "${both[@]}" --sides stock-mmap,ours,ours-all
    fi
    rm -f "$disk"/dsv4.*
    bench/drive/fast_drive.sh down "$fast"
}

# 1.2 % of the experts in VRAM, 3.2 % in host memory: a card of 12 GB and 32 GB of RAM, of 986
k3() {
    local layers=${K3_LAYERS:-4} # the first has no experts; the fourth is the first with full attention, which it needs one of
    local both=(--cache 1.2% --ram 3.2% --ram-cap 3.2% --stage-slots 16 "${options[@]}" --sides stock-mmap,ours)
    bench/drive/fast_drive.sh up "$fast" "${FAST_SIZE:-72G}" || return 1
    if model "$fast" k3 "$layers" "${K3_SPREAD:-1.0}"; then
        compare "$fast" k3 "k3 fast" 200 "${both[@]}"
        to_disk k3 && compare "$disk" k3 "k3 disk" 330 "${both[@]}"
    fi
    rm -f "$disk"/k3.*
    bench/drive/fast_drive.sh down "$fast"
}

case $what in
disk | memory | overflow | prompt | k3) "$what" ;;
*) echo "$what: expected disk, memory, overflow, prompt or k3" >&2; exit 1 ;;
esac
[ -e "$results" ] && "$python" -m bench.compare.report "$results" > "$out/report.md"
note "end"
