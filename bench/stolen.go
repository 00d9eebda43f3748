package main

import (
	"os"
	"strconv"
	"strings"
)

// cpuTime is the time of this machine's processors, in ticks, and the part of it that the host of a virtual machine gave to other
// machines. It is zero if /proc/stat does not have it.
type cpuTime struct{ all, stolen uint64 }

// readCPUTime reads the time since the machine was started.
func readCPUTime() cpuTime {
	text, _ := os.ReadFile("/proc/stat") // only Linux has it
	return parseCPUTime(string(text))
}

func parseCPUTime(stat string) (t cpuTime) {
	line, _, _ := strings.Cut(stat, "\n")
	const steal = 8 // fields: cpu user nice system idle iowait irq softirq steal; guest and guest_nice are in user and nice
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

// until is the time from t until now. It is zero if a count went backwards.
func (t cpuTime) until(now cpuTime) cpuTime {
	if now.all < t.all || now.stolen < t.stolen {
		return cpuTime{}
	}
	return cpuTime{all: now.all - t.all, stolen: now.stolen - t.stolen}
}

// share is the stolen part of the time.
func (t cpuTime) share() float64 {
	if t.all == 0 {
		return 0
	}
	return float64(t.stolen) / float64(t.all)
}
