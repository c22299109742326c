#!/bin/sh
# Installs the system's packages that a part of triax wants: system-packages.sh sandbox | browser
# Says why and ends well where it cannot: without root, without apt, without a network.
set -eu

part=${1:-}
case "$part" in
sandbox)
    packages="qemu-system-x86 qemu-utils runsc bubblewrap busybox-static e2fsprogs util-linux mount"
    packages="$packages squashfs-tools skopeo umoci gcc libc6-dev"
    ;;
browser) packages="chromium" ;;
*)
    echo "usage: $0 sandbox | browser" >&2
    exit 2
    ;;
esac

if ! command -v apt-get > /dev/null || ! command -v dpkg-query > /dev/null; then
    echo "$part: this system has no apt; install what answers to: $packages" >&2
    exit 0
fi

missing=""
for package in $packages; do
    case "$(dpkg-query -W -f '${Status}' "$package" 2> /dev/null || true)" in
    *" installed") ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ]; then
    echo "$part: without root nothing is installed; to do so: sudo apt-get install --no-install-recommends$missing" >&2
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install_missing() { apt-get install -qq -y --no-install-recommends $missing > "$log" 2>&1; }
if ! install_missing && ! { apt-get update -qq > "$log" 2>&1 && install_missing; }; then
    echo "$part: apt-get could not install$missing; it said:" >&2
    tail -n 5 "$log" >&2
    echo "$part: tests that need them are skipped, with this reason" >&2
fi
