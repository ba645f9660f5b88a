#!/bin/bash
# Stock against the pack on a machine with a GPU: the shapes of DeepSeek-V4-Flash and Kimi-K3 at reduced depth, from a
# drive made of RAM and from the disk. Needs root (cap on memory, read-ahead, page cache, zram) and about 110 GB of RAM.
#   bench/gpu/gpu_compare.sh OUTDIR [dsv4|k3|all] [SECONDS]
# OUTDIR/compare.jsonl grows as results come; OUTDIR/report.md is made at the end, also when time runs out.
# Charts come from the former: python -m bench.compare.report OUTDIR/compare.jsonl --out FOLDER
# PYTHON, EXPERT_PACK_STOCK_LIB, DISK (a folder on the disk to measure), DSV4_LAYERS, K3_LAYERS, DSV4_SPREAD, K3_SPREAD,
# N_GEN, ROUNDS and FAST_SIZE may be set; MODEL_OPTIONS and COMPARE_OPTIONS, to try this out with less, are passed on.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?a folder for the results}
what=${2:-all}
limit_s=${3:-560}
python=${PYTHON:-python3}
disk=${DISK:-/var/tmp/expert-pack-compare}
fast=/mnt/expert-pack-fast
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out" "$disk"
results=$out/compare.jsonl
log=$(mktemp)

left() { echo $((limit_s - SECONDS)); }
note() { echo "[$SECONDS s] $*"; }

# a machine without systemd has no control groups mounted
if ! [ -e /sys/fs/cgroup/cgroup.controllers ] && ! [ -e /sys/fs/cgroup/memory/memory.limit_in_bytes ]; then
    mount -t cgroup2 none /sys/fs/cgroup
fi

# fitting LAYERS LEAST MB_PER_LAYER MB_BESIDE: layers whose model and pack fit on the disk too; LAYERS if not even LEAST do
fitting() {
    local free_mb fit
    free_mb=$(($(df -B1000000 --output=avail "$disk" | tail -n 1) - 3000 - $4))
    fit=$((free_mb / $3))
    [ "$fit" -ge "$2" ] && [ "$fit" -lt "$1" ] && echo "$fit" || echo "$1"
}

# model PRESET LAYERS SPREAD: writes model and pack to the fast drive
model() {
    "$python" -m lab.make_model "$fast/$1.gguf" --preset "$1" --layers "$2" --router-spread "$3" ${MODEL_OPTIONS:-} || return 1
    note "$1 written"
    "$python" -m llama_expert_pack.pypack.command.cli convert "$fast/$1.gguf" --jobs 6 > /dev/null 2> "$log" || { tail -n 3 "$log"; return 1; }
    note "$1 packed"
}

# compare FOLDER PRESET LABEL SECONDS_AT_MOST OPTIONS...
compare() {
    local folder=$1 preset=$2 label=$3 most=$4
    shift 4
    [ "$(left)" -gt 40 ] || { note "no time left for $preset from $label"; return; }
    [ "$most" -lt "$(left)" ] || most=$(($(left) - 15))
    timeout --signal=INT --kill-after=10 "$(left)" "$python" -m bench.compare --model "$folder/$preset.gguf" --label "$label" --time-limit "$most" \
        --side-limit 150 --out "$results" "$@" ${COMPARE_OPTIONS:-} > "$log" || note "$preset from $label ended early"
    note "$preset from $label done"
}

# to_disk PRESET: copies model and pack if they fit
to_disk() {
    local need free
    need=$(du -cB1 "$fast/$1".* | tail -n 1 | cut -f 1)
    free=$(df -B1 --output=avail "$disk" | tail -n 1)
    if [ "$need" -gt "$((free - (1 << 30)))" ]; then
        note "$1 needs $((need >> 30)) GiB on the disk, which has $((free >> 30)): left out"
        return 1
    fi
    for file in "$fast/$1".*; do
        dd if="$file" of="$disk/$(basename "$file")" bs=16M iflag=direct oflag=direct status=none &
    done
    wait
    sync "$disk"
    note "$1 copied to the disk"
}

# 21 GiB of 147 GB, hit rate about 50 %; the page cache gets as large a share
dsv4() {
    local layers=${DSV4_LAYERS:-$(fitting 8 4 7000 1500)}
    bench/drive/fast_drive.sh up "$fast" "${FAST_SIZE:-60G}" || return 1
    if model dsv4 "$layers" "${DSV4_SPREAD:-0.9}"; then
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
    if model k3 "$layers" "${K3_SPREAD:-1.0}"; then
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
