# A program in a root of its own, without root's rights: unshare -Urm sh chroot.sh ROOT PROGRAM ARGS... In ROOT there are its files and libraries, and no shell.
# 77: this machine does not allow it.
root=$1
shift
for dir in proc dev sys; do
    mkdir -p "$root/$dir" && mount --rbind "/$dir" "$root/$dir" || exit 77
done
# What an image has, and nothing of the host's.
exec chroot "$root" "$@"
