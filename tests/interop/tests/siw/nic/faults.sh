# In the guest: a fault during a copy between two processes on a device.
#   faults.sh DEVICE ADDRESS FAULT UNDO
# Prints how long the fault command took, and for each side its exit status and its last words.
cd /tmp || exit 1
device=$1 address=$2 fault=$3 undo=$4
now() { cut -d' ' -f1 /proc/uptime; }
[ -e huge ] || dd if=/dev/urandom of=huge bs=1M count=128 2>/dev/null
rm -rf to sender receiver; mkdir to
trap 'kill $receiver $sender 2>/dev/null' EXIT
./weft cp --timeout 10 --device "$device" --plain --open --listen to --bind "$address":7471 >receiver 2>&1 &
receiver=$!
until grep -q listening receiver; do usleep 10000; done
./weft cp --timeout 10 --device "$device" --plain huge "$address": >sender 2>&1 &
sender=$!
until [ "$(stat -c %s to/.huge*.part 2>/dev/null || echo 0)" -gt 1000000 ]; do
  kill -0 $sender || { cat sender receiver; exit 1; }
  usleep 10000
done
begun=$(now)
sh -c "$fault" || { echo "the fault failed"; exit 1; }
echo "fault: $begun to $(now)"
wait $sender; echo "sender: $? at $(now)"
# The listener goes on if its device is there.
sleep 1
kill $receiver 2>/dev/null && echo "the listener waits"
wait $receiver; echo "receiver: $? at $(now)"
sh -c "$undo"
tr '\r' '\n' <sender | tail -n 4 | sed 's/^/sender says: /'
tr '\r' '\n' <receiver | tail -n 4 | sed 's/^/receiver says: /'
