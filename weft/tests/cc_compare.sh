#!/bin/bash
# cc_compare.sh WEFT BUILD CLEAN [FILE...]: builds a project with the compiler here, then with two workers of this machine, in the same folder, and compares the objects,
# and these files.
#
# WEFT is the program's file; BUILD and CLEAN are shell commands, run in this folder, in which $CC is the compiler and $JOBS what runs at once. WEFT_CC_PULL and
# the other variables of `weft cc` count. For example, in an unpacked curl:
#   ./configure --without-ssl --disable-shared && .../cc_compare.sh target/release/weft 'make -s -j$JOBS CC="$CC"' 'make -s clean'
# and in an unpacked kernel (which else has the time and who built it in it):
#   export KBUILD_BUILD_TIMESTAMP=@0 KBUILD_BUILD_USER=u KBUILD_BUILD_HOST=h KBUILD_BUILD_VERSION=1
#   make tinyconfig && .../cc_compare.sh target/release/weft 'make -s -j$JOBS CC="$CC"' 'make -s clean' vmlinux arch/x86/boot/bzImage
set -eu
weft=$(readlink -f "$1") build=$2 clean=$3
shift 3
work=$(mktemp -d) tree=$PWD
export XDG_CONFIG_HOME=$work/config WEFT_CC_SOCKET=$work/socket WEFT_LOCAL=off JOBS=${JOBS:-4}
workers=()
finish() {
  "$weft" cc stop >/dev/null 2>&1 || true
  for pid in "${workers[@]}"; do kill "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT
also=("$@")
objects() { find . -name '*.o' -type f | sort; ((!${#also[@]})) || printf '%s\n' "${also[@]}"; }

export CC=gcc
bash -c "$clean" >/dev/null
bash -c "$build" >"$work/local.log" 2>&1 || { tail -20 "$work/local.log"; echo "the build with $CC failed"; exit 1; }
objects >"$work/list"
tar -C "$tree" -cf "$work/local.tar" -T "$work/list"
bash -c "$clean" >/dev/null

# One key pair for all: its owner is authorised.
mkdir -p "$XDG_CONFIG_HOME"
hosts=
for n in 1 2; do
  "$weft" cc worker --bind 127.0.0.1:0 --slots 2 >"$work/worker$n" &
  workers+=($!)
  for _ in $(seq 100); do at=$(sed -n 's/^compiling on \([^ ]*\) .*/\1/p' "$work/worker$n" 2>/dev/null || true); [[ -n $at ]] && break; sleep 0.1; done
  hosts+=${hosts:+,}$at
done
mkdir "$work/bin" && ln -s "$weft" "$work/bin/weft"
export WEFT_CC_HOSTS=$hosts CC="$("$weft" cc launcher "$work/bin") gcc"
bash -c "$build" >"$work/remote.log" 2>&1 || { tail -20 "$work/remote.log"; echo "the build with $CC failed"; exit 1; }
objects | cmp -s - "$work/list" || { echo "other objects than in the build here:"; objects | diff - "$work/list" | head; exit 1; }
mkdir "$work/local" && tar -C "$work/local" -xf "$work/local.tar"
same=0 other=()
while read -r object; do
  if cmp -s "$object" "$work/local/$object"; then same=$((same + 1)); else other+=("$object"); fi
done <"$work/list"
echo "objects: $same the same byte for byte, ${#other[@]} not"
((${#other[@]} == 0)) || printf '  differs: %s\n' "${other[@]:0:20}"
"$weft" cc status
((${#other[@]} == 0))
