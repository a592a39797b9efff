# Hosts for a job: network namespaces node1 to nodeN on a bridge, with the addresses 10.77.0.1 and fd00:77::1 and so on, each with a host name of its own.
# usage: unshare --net --uts --pid --fork --mount-proc --kill-child bash mpi_hosts.sh N SCRIPT
# SCRIPT runs in node1 by `bash -euc`. It has HOSTS (the addresses with commas), DIR (an empty folder), AGENT (in place of ssh: AGENT [OPTION...] ADDRESS WORD...)
# and the command `on NUMBER WORD...`. Status 77: there are no such namespaces here.
set -u
count=$1
DIR=$(mktemp -d) || exit 77
trap 'rm -rf "$DIR"' EXIT
ip link set lo up && ip link add hub type bridge && ip link set hub up || exit 77
HOSTS=
for ((i = 1; i <= count; i++)); do
  unshare --net --uts --mount sh -c "hostname node$i; echo up; exec sleep 600" >"$DIR/up" &
  keeper=$!
  until [[ -s $DIR/up ]]; do
    kill -0 $keeper 2>/dev/null || exit 77
    sleep 0.02
  done
  rm "$DIR/up"
  echo $keeper >"$DIR/10.77.0.$i"
  ip link add "v$i" type veth peer name eth0 netns $keeper && ip link set "v$i" master hub up || exit 77
  nsenter -t $keeper -n sh -c "ip link set lo up && ip addr add 10.77.0.$i/24 dev eth0 && ip addr add fd00:77::$i/64 dev eth0 nodad && ip link set eth0 up" || exit 77
  HOSTS+=${HOSTS:+,}10.77.0.$i
done
cat >"$DIR/agent" <<'AGENT'
#!/bin/bash
# As ssh does it: a shell there, and an environment of a few variables.
dir=$(dirname "$0")
while [[ $1 == -* ]]; do shift; done
[[ -s $dir/$1 ]] || { echo "no host $1" >&2; exit 255; }
keeper=$(<"$dir/$1")
shift
exec env -i HOME="$HOME" PATH=/usr/bin:/bin nsenter -t "$keeper" -n -u -m sh -c "$*"
AGENT
chmod +x "$DIR/agent"
on() { nsenter -t "$(<"$DIR/10.77.0.$1")" -n -u -m "${@:2}"; }
export -f on
export DIR HOSTS AGENT=$DIR/agent
export OMPI_MCA_plm_rsh_agent=$AGENT HYDRA_LAUNCHER_EXEC=$AGENT
on 1 bash -euc "$2"
