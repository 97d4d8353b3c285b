#!/bin/sh
# cargo test for 64-bit Arm: `tests/aarch64.sh [arguments of cargo test]`, from the project's folder.
#
# On such a machine: cargo test as it is. Elsewhere compiled across and run under qemu-user, for which
# this machine needs
# - Rust's standard library for aarch64-unknown-linux-gnu (`rustup target add`), and
# - aarch64-linux-gnu-gcc with its C library, and qemu-aarch64;
# or, on Debian (amd64), to be root with debootstrap and debootstrap's archive keys: then all that is
# installed into a Debian sid below target/, which takes 2.1 GB and some minutes once.
set -eu

TARGET=aarch64-unknown-linux-gnu
SUITE=sid
MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
ROOT=$PWD/target/debian-$SUITE
CRATES=${CARGO_HOME:-$HOME/.cargo}/registry

lacking() { # names of what compiling and running here needs and isn't there
    for command in cargo aarch64-linux-gnu-gcc qemu-aarch64; do
        command -v $command >/dev/null || echo "$command"
    done
    [ -d "$(rustc --print target-libdir --target $TARGET)" ] || echo "the standard library for $TARGET"
}

unable() { # what making a Debian below target/ needs and isn't there
    [ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || echo "Debian on amd64"
    [ "$(id -u)" = 0 ] || echo "root"
    command -v debootstrap >/dev/null || echo "debootstrap"
    unshare --mount true 2>/dev/null || echo "the right to mount"
}

listed() {
    paste -sd, - | sed 's/,/, /g'
}

make_root() {
    debootstrap --variant=minbase $SUITE "$ROOT.new" "$MIRROR"
    chroot "$ROOT.new" sh -euc '
        export DEBIAN_FRONTEND=noninteractive
        apt="apt-get --quiet --yes --no-install-recommends -o Acquire::Check-Valid-Until=false"
        dpkg --add-architecture arm64
        $apt update
        $apt install cargo rustc libstd-rust-dev:arm64 gcc libc6-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
        apt-get clean'
    mv "$ROOT.new" "$ROOT"
}

if [ "$(uname -m)" = aarch64 ]; then
    exec cargo test "$@"
fi

missing=$(lacking)
if [ -z "$missing" ]; then
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
    exec cargo test --target $TARGET --target-dir target/aarch64 "$@"
fi

if [ ! -d "$ROOT" ]; then
    refused=$(unable)
    if [ -n "$refused" ]; then
        echo "To compile and run for 64-bit Arm, this machine lacks: $(echo "$missing" | listed)." >&2
        echo "To install that into $ROOT, it lacks: $(echo "$refused" | listed)." >&2
        exit 1
    fi
    rm -rf "$ROOT.new"
    make_root
fi

# Crates come with this machine's cargo; in there, nothing is fetched.
cargo fetch --locked --quiet
export ROOT CRATES
exec unshare --mount sh -euc '
    mkdir -p "$ROOT/project" "$ROOT/root/.cargo/registry"
    mount --bind "$PWD" "$ROOT/project"
    mount --bind "$CRATES" "$ROOT/root/.cargo/registry"
    mount --rbind /proc "$ROOT/proc"
    mount --rbind /dev "$ROOT/dev"
    exec chroot "$ROOT" env -i HOME=/root PATH=/usr/bin:/bin CARGO_NET_OFFLINE=true \
        sh -euc "cd /project && exec tests/aarch64.sh \"\$@\"" sh "$@"' sh "$@"
