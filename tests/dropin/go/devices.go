// Lists the devices as a Go program does, which makes its system calls itself.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	devices, err := os.ReadDir("/sys/class/infiniband")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for _, device := range devices {
		folder := filepath.Join("/sys/class/infiniband", device.Name())
		state, _ := os.ReadFile(filepath.Join(folder, "ports/1/state"))
		parent, _ := filepath.EvalSymlinks(filepath.Join(folder, "device"))
		fmt.Println(device.Name(), strings.TrimSpace(string(state)), parent)
	}
	info, err := os.Stat("/dev/infiniband/uverbs0")
	fmt.Println(err == nil && info.Mode()&os.ModeCharDevice != 0)
}
