package main

import (
	"os"
	"strconv"
	"strings"
)

// cpuTime is what the processors of this machine have had to give since it was started, in ticks, and what of that the host of
// a virtual machine has given to others. Where /proc/stat does not tell, it is zero.
type cpuTime struct{ all, stolen uint64 }

func readCPUTime() cpuTime {
	text, _ := os.ReadFile("/proc/stat") // only Linux has it
	return parseCPUTime(string(text))
}

func parseCPUTime(stat string) (t cpuTime) {
	line, _, _ := strings.Cut(stat, "\n")
	const steal = 8 // of: cpu user nice system idle iowait irq softirq steal (guest guest_nice, which are in user and nice)
	fields := strings.Fields(line)
	if len(fields) <= steal || fields[0] != "cpu" {
		return cpuTime{}
	}
	for i, field := range fields[1 : steal+1] {
		ticks, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return cpuTime{}
		}
		t.all += ticks
		if i == steal-1 {
			t.stolen = ticks
		}
	}
	return t
}

// stolenUntil is the share of the time up to now that went to others.
func (t cpuTime) stolenUntil(now cpuTime) float64 {
	if now.all <= t.all {
		return 0
	}
	return float64(now.stolen-t.stolen) / float64(now.all-t.all)
}
