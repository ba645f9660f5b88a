# What the comparisons on a machine with a GPU share; sourced. They set out, limit_s and DISK (a folder on the disk to measure).
# PYTHON, EXPERT_PACK_STOCK_LIB, MODEL_OPTIONS and COMPARE_OPTIONS may be set; the last two, to try things out with less, are
# passed on.
cd "$(dirname "$0")/../.."
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

# model FOLDER PRESET LAYERS SPREAD: writes model and pack
model() {
    "$python" -m lab.make_model "$1/$2.gguf" --preset "$2" --layers "$3" --router-spread "$4" ${MODEL_OPTIONS:-} || return 1
    note "$2 written"
    "$python" -m llama_expert_pack.pypack.command.cli convert "$1/$2.gguf" --jobs 6 > /dev/null 2> "$log" || { tail -n 3 "$log"; return 1; }
    note "$2 packed"
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
