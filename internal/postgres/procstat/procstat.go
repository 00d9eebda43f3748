// Package procstat reads the processor time of processes from /proc, which only Linux has.
package procstat

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Process is a line of /proc/PID/stat.
type Process struct {
	Name   string
	Parent int
	CPU    time.Duration // by itself
	Reaped time.Duration // by its children that have ended
}

// Read reads a process.
func Read(pid int) (Process, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, err
	}
	return parse(string(text))
}

func parse(stat string) (p Process, err error) {
	// The name may have spaces and parentheses in it. After the last one come state, ppid and others; see proc(5).
	end := strings.LastIndexByte(stat, ')')
	begin := strings.IndexByte(stat, '(')
	if begin < 0 || end < begin {
		return p, fmt.Errorf("not a line of /proc/PID/stat: %q", stat)
	}
	p.Name = stat[begin+1 : end]
	const ppid, utime, tick = 1, 11, time.Second / 100 // USER_HZ is 100 on all of Go's platforms
	fields := strings.Fields(stat[end+1:])
	if len(fields) < utime+4 {
		return p, fmt.Errorf("not a line of /proc/PID/stat: %q", stat)
	}
	var ticks [4]int64 // utime stime cutime cstime
	for i := range ticks {
		if ticks[i], err = strconv.ParseInt(fields[utime+i], 10, 64); err != nil {
			return p, err
		}
	}
	p.CPU, p.Reaped = time.Duration(ticks[0]+ticks[1])*tick, time.Duration(ticks[2]+ticks[3])*tick
	p.Parent, err = strconv.Atoi(fields[ppid])
	return p, err
}

// Children returns the processes that a process has started and that run now.
func Children(pid int) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat") // fails only for a malformed pattern
	for _, path := range stats {
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			continue
		}
		if p, err := Read(child); err == nil && p.Parent == pid { // others end meanwhile
			pids = append(pids, child)
		}
	}
	return pids
}

// Family is the processor time of a process, its children, and those that have ended. A Postgres server is a family.
func Family(pid int) (sum time.Duration, err error) {
	parent, err := Read(pid)
	if err != nil {
		return 0, err
	}
	sum = parent.CPU + parent.Reaped
	for _, child := range Children(pid) {
		if p, err := Read(child); err == nil { // it may have ended meanwhile
			sum += p.CPU
		}
	}
	return sum, nil
}
