package main

import (
	"os"
	"strconv"
	"strings"
)

// cpuTime is what the processors of this machine had to give, in ticks, and what of that the host of a virtual machine gave to
// others. Where /proc/stat does not tell, it is zero.
type cpuTime struct{ all, stolen uint64 }

// readCPUTime reads it since the machine was started.
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

// until is the time from t until now: none, if a count went backwards.
func (t cpuTime) until(now cpuTime) cpuTime {
	if now.all < t.all || now.stolen < t.stolen {
		return cpuTime{}
	}
	return cpuTime{all: now.all - t.all, stolen: now.stolen - t.stolen}
}

// share is what of it went to others.
func (t cpuTime) share() float64 {
	if t.all == 0 {
		return 0
	}
	return float64(t.stolen) / float64(t.all)
}
