#!/bin/bash
# Stock against the pack on a machine with a GPU: the shapes of DeepSeek-V4-Flash and Kimi-K3 at reduced depth, from a
# drive made of RAM and from the disk. Needs root (cap on memory, read-ahead, page cache, zram) and about 110 GB of RAM.
#   bench/gpu/gpu_compare.sh OUTDIR [dsv4|k3|all] [SECONDS]
# OUTDIR/compare.jsonl grows as results come; OUTDIR/report.md is made at the end, also when time runs out.
# Charts come from the former: python -m bench.compare.report OUTDIR/compare.jsonl --out FOLDER
# DSV4_LAYERS, K3_LAYERS, DSV4_SPREAD, K3_SPREAD, N_GEN, ROUNDS and FAST_SIZE may be set, and what compare_functions.sh names.
set -uo pipefail
out=${1:?a folder for the results}
what=${2:-all}
limit_s=${3:-560}
. "$(dirname "$0")/compare_functions.sh"

# 21 GiB of 147 GB, hit rate about 50 %; the page cache gets as large a share
dsv4() {
    local layers=${DSV4_LAYERS:-$(fitting 8 4 7000 1500)}
    bench/drive/fast_drive.sh up "$fast" "${FAST_SIZE:-60G}" || return 1
    if model "$fast" dsv4 "$layers" "${DSV4_SPREAD:-0.9}"; then
        local options=(--cache 15% --ram-cap 15% --n-prompt 64 --n-gen "${N_GEN:-32}" --rounds "${ROUNDS:-2}")
        compare "$fast" dsv4 zram 170 "${options[@]}"
        to_disk dsv4 && compare "$disk" dsv4 disk 330 "${options[@]}" --sides stock-mmap,ours
    fi
    rm -f "$disk"/dsv4.*
    bench/drive/fast_drive.sh down "$fast"
}

# 5 GiB of 986 GB (4.9 blocks a layer) beside the 16 blocks of one working set, hit rate about 17 %; 32 GB of RAM of 986.
# The first layer has no experts, the fourth is the first with full attention, which llama.cpp needs one of.
k3() {
    local layers=${K3_LAYERS:-$(fitting 4 4 16200 1500)}
    local blocks=$((16 + (49 * (layers - 1) + 5) / 10))
    bench/drive/fast_drive.sh up "$fast" "${FAST_SIZE:-72G}" || return 1
    if model "$fast" k3 "$layers" "${K3_SPREAD:-1.0}"; then
        local options=(--cache $((blocks * 11956224)) --ram-cap 3.2% --n-prompt 64 --n-gen "${N_GEN:-32}" --rounds "${ROUNDS:-2}")
        options+=(--stage-slots 16) # as many as a layer uses
        compare "$fast" k3 zram 170 "${options[@]}"
        to_disk k3 && compare "$disk" k3 disk 330 "${options[@]}" --sides stock-mmap,ours
    fi
    rm -f "$disk"/k3.*
    bench/drive/fast_drive.sh down "$fast"
}

case $what in
dsv4) dsv4 ;;
k3) k3 ;;
*) dsv4; k3 ;;
esac
[ -e "$results" ] && "$python" -m bench.compare.report "$results" | tee "$out/report.md"
note "end"
