#!/bin/sh
# Runs a program on an emulated CPU that has AVX-512: `tests/bochs.sh PROGRAM [ARGUMENTS]`. What it writes
# and its status are the program's. All that this needs lies in BOCHS_ROOT, which tests/avx512.sh makes.
#
# The emulator is Bochs, which runs a Linux whose only process is the program. It gets the variables named
# below and the libraries it is linked with; of files there is nothing else.
set -eu

PASSED='PAGED_KV_ISA PROPTEST_CASES RUST_BACKTRACE RUST_TEST_THREADS'
MEGABYTES=2048
USR=$BOCHS_ROOT/usr
LIBRARIES=$USR/lib/x86_64-linux-gnu:$BOCHS_ROOT/lib/x86_64-linux-gnu

run=$(mktemp -d "$PWD/target/bochs.XXXXXX")
bochs=
trap '[ -z "$bochs" ] || kill "$bochs" 2>/dev/null; rm -rf "$run"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$run/root/bin" "$run/disk"

unpacked() { # runs a command of BOCHS_ROOT
    command=$1
    shift
    LD_LIBRARY_PATH=$LIBRARIES "$(find "$BOCHS_ROOT/bin" "$USR/bin" -name "$command" 2>/dev/null | head -n 1)" "$@"
}

quoted() { # words as a shell reads them
    for word; do
        printf "'%s' " "$(printf %s "$word" | sed "s/'/'\\\\''/g")"
    done
}

# ---- the files: what is loaded with the kernel ----

cp "$(find "$BOCHS_ROOT" -path '*bin/busybox')" "$run/root/bin"
for file in "$1" $(ldd "$1" | grep -o '/[^ ]*'); do
    mkdir -p "$run/root/$(dirname "$file")"
    cp --dereference "$file" "$run/root/$file"
done
# Loading takes as long as it is large.
strip "$run/root/$1"
cat >"$run/root/init" <<END
#!/bin/busybox sh
busybox=/bin/busybox
\$busybox mkdir -p /proc /sys /dev /tmp
\$busybox mount -t proc proc /proc
\$busybox mount -t sysfs sys /sys
\$busybox mount -t devtmpfs dev /dev
$(for name in $PASSED; do eval "[ -z \"\${$name:-}\" ] || echo \"export $name=\$$name\""; done)
echo emulated: \$(\$busybox grep -o -m 1 'avx512[a-z]*' /proc/cpuinfo)
$(quoted "$@")
echo "status \$?"
\$busybox sleep 1
\$busybox poweroff -f
END
chmod +x "$run/root/init"

# ---- the disk: a boot loader, the kernel, the files ----

cp "$USR/lib/ISOLINUX/isolinux.bin" "$USR/lib/syslinux/modules/bios/ldlinux.c32" "$run/disk"
cp "$BOCHS_ROOT"/boot/vmlinuz-* "$run/disk/kernel"
(cd "$run/root" && find . | unpacked cpio --quiet --create --format newc) >"$run/disk/files"
# Bochs 2.7 gives the wrong size for the compact form of saved registers, and the kernel no AVX then.
cat >"$run/disk/isolinux.cfg" <<END
default linux
label linux
 kernel /kernel
 initrd /files
 append console=ttyS0 quiet loglevel=1 panic=-1 reboot=triple mitigations=off nokaslr clearcpuid=xsavec,xsaves
END
unpacked xorriso -as mkisofs -quiet -o "$run/boot.iso" -b isolinux.bin -c boot.cat \
    -no-emul-boot -boot-load-size 4 -boot-info-table "$run/disk" 2>"$run/xorriso.log" ||
    { cat "$run/xorriso.log" >&2; exit 1; }

# ---- the machine ----

# Time goes by the instructions executed, as if so many were a second: the fewer, the sooner what waits
# for a clock goes on, and the oftener the clock interrupts.
cat >"$run/bochsrc" <<END
cpu: model=corei7_skylake_x, count=1, ips=10000000, reset_on_triple_fault=0, ignore_bad_msrs=1
megs: $MEGABYTES
romimage: file=$USR/share/bochs/BIOS-bochs-latest
vgaromimage: file=$USR/share/bochs/VGABIOS-lgpl-latest
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=$run/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$run/serial
config_interface: textconfig
display_library: term
sound: driver=dummy
log: $run/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
END
# Debian's has a debugger, which waits to be told to continue.
echo c >"$run/commands"
touch "$run/serial"
export TERM=vt100 LD_LIBRARY_PATH="$LIBRARIES" LTDL_LIBRARY_PATH="$USR/lib/x86_64-linux-gnu/bochs/plugins"
script --quiet --command "'$USR/bin/bochs-bin' -q -f '$run/bochsrc' -rc '$run/commands'" /dev/null \
    </dev/null >"$run/terminal" 2>&1 &
bochs=$!
tail --follow --lines +1 --pid $bochs "$run/serial" 2>/dev/null | sed --unbuffered 's|\r$||'
wait $bochs || true
bochs=

status=$(tr -d '\r' <"$run/serial" | sed -n 's/^status \([0-9]*\)$/\1/p' | tail -n 1)
if [ -z "$status" ]; then
    echo "The emulated machine stopped before the program ended:" >&2
    tail "$run/terminal" "$run/bochs.log" >&2
    exit 1
fi
exit "$status"
