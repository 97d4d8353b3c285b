#!/bin/sh
# cargo test with AVX-512 alone, then with its BF16: `tests/avx512.sh [arguments of cargo test]`, from the
# project's folder.
#
# On a CPU that has it: cargo test as it is. BF16 is tested only where the CPU has it: it is not emulated.
# Where the CPU lacks AVX-512, tests/bochs.sh runs each test program on an emulated
# CPU, a hundred times slower; `make avx512` takes a quarter of an hour. For that, Debian's packages of Bochs,
# a kernel and what puts them together are unpacked below target/, 160 MB; nothing is installed. It takes
# - Debian on amd64, with lists of packages that are up to date (being root, they are updated here).
set -eu

PACKAGES='bochs bochs-term bochsbios vgabios busybox-static cpio isolinux syslinux-common xorriso linux-image-cloud-amd64'
ROOT=$PWD/target/debian-bochs

has_avx512() {
    for feature in avx512f avx512bw avx512dq avx512vl; do
        grep -qw $feature /proc/cpuinfo || return 1
    done
}

make_root() {
    [ "$(id -u)" != 0 ] || apt-get --quiet update
    rm -rf "$ROOT.new"
    mkdir -p "$ROOT.new/archives/partial"
    # Installed or not, so that there is one place where they lie; what they depend on may be the system's.
    apt-get --quiet --yes --no-install-recommends --download-only --reinstall \
        -o Debug::NoLocking=true -o Dir::Cache::archives="$ROOT.new/archives" install $PACKAGES
    for package in "$ROOT.new/archives/"*.deb; do
        dpkg --extract "$package" "$ROOT.new"
    done
    rm -r "$ROOT.new/archives"
    mv "$ROOT.new" "$ROOT"
}

# No test passes over an instruction set that PAGED_KV_ISA names, and the CPU lacks.
if has_avx512; then
    PAGED_KV_ISA=avx512 cargo test "$@"
    if grep -qw avx512_bf16 /proc/cpuinfo && grep -qw avx512_vbmi /proc/cpuinfo; then
        PAGED_KV_ISA=avx512_bf16 cargo test "$@"
    else
        echo "SKIPPED: this CPU lacks avx512_bf16" >&2
    fi
    exit
fi

if [ ! -d "$ROOT" ]; then
    if [ "$(dpkg --print-architecture 2>/dev/null)" != amd64 ] || ! grep -qx ID=debian /etc/os-release; then
        echo "This CPU lacks AVX-512. To emulate one that has it, this machine lacks Debian on amd64." >&2
        exit 1
    fi
    make_root
fi

# One test after the other, since the emulated machine has one CPU, and few random cases.
export PAGED_KV_ISA=avx512 BOCHS_ROOT="$ROOT" RUST_TEST_THREADS=1 PROPTEST_CASES="${PROPTEST_CASES:-8}"
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$PWD/tests/bochs.sh"
exec cargo test "$@"
