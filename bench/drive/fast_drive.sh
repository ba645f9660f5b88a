#!/bin/sh
# A fast stand-in for a drive, made of RAM, that mmap and O_DIRECT both work on. Needs root.
#   bench/drive/fast_drive.sh up PATH [SIZE] [zram|loop]     SIZE such as 40G
#   bench/drive/fast_drive.sh down PATH
# zram: a compressed block device (lz4; random bytes do not compress) with ext4, the faster one.
# loop: ext4 in a file on /dev/shm, like one PCIe 3 or 4 drive.
set -eu
action=${1:?up or down}
place=${2:?the folder to mount at}
size=${3:-40G}
kind=${4:-zram}

free_zram() {
    for device in /sys/block/zram*; do
        if [ -e "$device/disksize" ] && [ "$(cat "$device/disksize")" = 0 ]; then
            basename "$device"
            return
        fi
    done
    echo "zram$(cat /sys/class/zram-control/hot_add)"
}

case $action in
up)
    mkdir -p "$place"
    if [ "$kind" = zram ]; then
        [ -e /sys/block/zram0 ] || modprobe zram
        name=$(free_zram)
        echo lz4 > "/sys/block/$name/comp_algorithm" || echo "lz4 is not there: zram's own default is used" >&2
        echo "$size" > "/sys/block/$name/disksize"
        device=/dev/$name
    else
        image=$(mktemp /dev/shm/fast-drive.XXXXXX)
        truncate -s "$size" "$image"
        device=$(losetup --find --show "$image")
    fi
    mkfs.ext4 -q -F -m 0 -E lazy_itable_init=1,nodiscard "$device"
    mount -o noatime "$device" "$place"
    echo "$device at $place"
    ;;
down)
    device=$(findmnt -n -o SOURCE "$place")
    umount "$place"
    case $device in
    /dev/zram*) echo 1 > "/sys/block/$(basename "$device")/reset" ;;
    /dev/loop*)
        image=$(cat "/sys/block/$(basename "$device")/loop/backing_file")
        losetup -d "$device"
        rm -f "$image"
        ;;
    esac
    ;;
*)
    echo "up or down, not $action" >&2
    exit 2
    ;;
esac
