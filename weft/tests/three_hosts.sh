# A server, a writer and a reader, and a worker of `weft cc`, in network namespaces of their own, with keys. Run in a namespace that may make
# these; WEFT is the program, WEFT_FS_LIB the preload library, DIR a folder that is empty.
set -eu
cd "$DIR"
ip link set lo up
ip link add hub type bridge
ip link set hub up
keepers=()
for host in 1 2 3; do
  unshare --net sleep 300 &
  keepers+=($!)
  # The namespace is there when it is no longer ours.
  until [[ $(readlink /proc/$!/ns/net) != "$(readlink /proc/self/ns/net)" ]]; do sleep 0.05; done
  ip link add v$host type veth peer name cable netns $!
  ip link set v$host master hub up
  nsenter -t $! -n bash -c "ip link set lo up; ip addr add 10.99.0.$host/24 dev cable; ip link set cable up"
done
on() { nsenter -t "${keepers[$1 - 1]}" -n env XDG_CONFIG_HOME="$DIR/host$1" "${@:2}"; }
wait_for() { until [[ -s $1 ]]; do sleep 0.05; done; }
for host in 1 2 3; do on $host "$WEFT" key >key$host 2>&1; done
on 2 "$WEFT" key --show | grep -o 'weft-[^ ]* [^ ]*\|SHA256:[^ ]*' | head -1 >host1/weft/authorized_keys
on 3 "$WEFT" key --show | grep -o 'weft-[^ ]* [^ ]*\|SHA256:[^ ]*' | head -1 >>host1/weft/authorized_keys
chmod 600 host1/weft/authorized_keys
on 1 "$WEFT" fs serve --bind 10.99.0.1:7474 >served &
until grep -q '^the key' served; do sleep 0.05; done
peer=$(sed -n 's/^the key of this server is \([^;]*\);.*/\1/p' served)
export DIR
on 2 "$WEFT" fs run --peer "$peer" -- bash -ec '
  exec 5>/rdma/10.99.0.1:7474/shared; echo 1 >"$DIR/made"
  until [[ -s $DIR/opened ]]; do sleep 0.05; done
  seq 200000 >&5; exec 5>&-; echo 1 >"$DIR/written"' &
wait_for made
on 3 "$WEFT" fs run --peer "$peer" -- bash -ec '
  exec 6</rdma/10.99.0.1:7474/shared; echo 1 >"$DIR/opened"
  until [[ -s $DIR/written ]]; do sleep 0.05; done
  cat <&6 >"$DIR/read"'
seq 200000 | cmp - read
# Nobody has it open any more.
until [[ -z $(on 3 "$WEFT" fs ls --peer "$peer" /rdma/10.99.0.1:7474) ]]; do sleep 0.1; done
# A key that the server does not know.
code=0
XDG_CONFIG_HOME=$DIR/nobody nsenter -t "${keepers[2]}" -n "$WEFT" fs ls --peer "$peer" /rdma/10.99.0.1:7474 2>said || code=$?
cat said
[[ $code == 4 ]] && grep -q authorized_keys said
# The same of a compiler's worker.
on 1 "$WEFT" cc worker --bind 10.99.0.1:7477 >worker 2>&1 &
until on 2 "$WEFT" cc check --peer "$peer" --hosts 10.99.0.1:7477 >checked 2>&1; do sleep 0.1; done
grep -q 'over TCP by TLS' checked
code=0
XDG_CONFIG_HOME=$DIR/nobody nsenter -t "${keepers[2]}" -n "$WEFT" cc check --peer "$peer" --hosts 10.99.0.1:7477 2>said || code=$?
cat said
[[ $code == 3 ]] && grep -q authorized_keys said
echo all is well
