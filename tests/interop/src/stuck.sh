# In the guest: what every thread of what a process has started waits for, and then their end.
#   stuck.sh PID
started() {
  local pid
  for pid in $(cat /proc/"$1"/task/*/children); do
    echo "$pid"
    started "$pid"
  done
}
all=$(started "$1")
for pid in $all; do
  echo "$pid: $(tr '\0' ' ' </proc/"$pid"/cmdline)"
  for task in /proc/"$pid"/task/*; do
    # The number of the system call, its arguments, the stack pointer and the program counter.
    echo "  ${task##*/} $(cat "$task/comm"), $(sed -n 's/^State:.//p' "$task/status"), $(cat "$task/syscall")"
    sed 's/^/    /' "$task/stack"
  done
done
# shellcheck disable=SC2086 # one argument for each
[ -z "$all" ] || kill -9 $all
