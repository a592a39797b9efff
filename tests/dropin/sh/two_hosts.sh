# Two network namespaces with a cable between them: here 10.77.0.1 and fd00:77::1, there 10.77.0.2 and fd00:77::2.
# usage: unshare -rn sh two_hosts.sh UDP_PORT THERE HERE: THERE is a program that has the UDP port soon, HERE its peer. The status is that of both.
# UDP_PORT may also be an address and port as /proc/net/udp has them.
# 77: there are no such namespaces here.
set -u
unshare -n sleep 300 &
far=$!
there() { nsenter -t $far -n "$@"; }
tries=0
until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do
    tries=$((tries + 1))
    [ $tries -lt 200 ] && kill -0 $far 2>/dev/null || exit 77
    sleep 0.05
done
trap 'kill $far 2>/dev/null' EXIT
ip link set lo up && ip link add here type veth peer name there netns $far || exit 77
ip addr add 10.77.0.1/24 dev here && ip addr add fd00:77::1/64 dev here nodad && ip link set here up || exit 77
there ip link set lo up
there ip addr add 10.77.0.2/24 dev there && there ip addr add fd00:77::2/64 dev there nodad && there ip link set there up || exit 77
# IPv6 begins a moment later.
until there ip -6 route show table all | grep -q 'ff00::/8 dev there' && ip -6 route show table all | grep -q 'ff00::/8 dev here'; do
    sleep 0.05
done
there sh -c "$2" &
server=$!
case $1 in
*:*) port="$1 " ;;
*) port=$(printf ':%04X ' "$1") ;;
esac
until there cat /proc/net/udp /proc/net/udp6 | grep -q "$port"; do
    kill -0 $server || exit 1
    sleep 0.05
done
sh -c "$3" && wait $server
