package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// core are tests of what every verb decides, the quick ones first.
const core = "model_inmemory model_promises verbs_charge verbs_check verbs_consume verbs_defects verbs_each verbs_limits verbs_move verbs_reason " +
	"verbs_reset verbs_retryat verbs_several verbs_shards verbs_take attack_garbage attack_hostile | verbs_balance verbs_calendar verbs_decimals " +
	"verbs_pause verbs_permission verbs_plans verbs_refund verbs_schedule verbs_wait rpc_interceptors"

// areas are the tests of the product's files, by area (see scripts/tests.sh) or package. The first row that matches counts.
// What is behind a bar runs if nothing before it has noticed.
var areas = []struct{ files, tests string }{
	{`^migrations/engine/(available|balance)`, "core model_calendar sql_byhand"},
	{`^migrations/engine/(coalesce|consume_keys)`, "coalescer_calls coalescer_sums verbs_decimals verbs_each attack_garbage | coalescer tx_plans holds sql_source"},
	{`^migrations/engine/(apply|consume|raise|lock|move|grid|wire)`, "core verbs_denial holds tx_contention tx_batch tx_plans model_overgrant sql_bounds sql_source"},
	{`^migrations/engine/holds_by_hand`, "holds_byhand holds_races holds_once"},
	{`^migrations/engine/holds`, "holds_exhaustive holds_model holds_races holds_byhand | holds"},
	{`^migrations/engine/(parts|validate|calendar)`, "verbs_keys verbs_calendar model_calendar sql_verbs sql_byhand"},
	{`^migrations/engine/(each|pause|keys|reset)`, "core sql_docs_pause holds_byhand sql_all sql_overrides console_bad_rows holds world_overrides_known ops_overrides_end"},
	{`^migrations/engine/refund`, "core tx_contention holds"},
	{`^migrations/engine/ratelimit`, "sql_all sql_verbs sql_byhand sql_overrides sql_collations verbs_plans verbs_calendar holds_definitions verbs_decimals ops_overrides_end world_overrides_known"},
	{`^migrations/engine/(overrides|definitions)`, "sql_overrides sql_all ops_overrides ops_lists verbs_plans verbs_calendar console_pages sql_citus holds_definitions"},
	{`^migrations/engine/(usage|version|grants|guard|turns)`, "ops_usage ops_version ops_confined ops_fleet tx_hot"},
	{`^migrations/engine/sweep`, "ops_sweep ops_open holds_byhand ops_definitions ops_overrides ratelimit/ratelimittest holds_definitions"},
	{`^migrations/check\.go$`, "ops_version"},
	{`^internal/dbsqlc/ratelimit\.sql\.go$`, "verbs_update verbs_refund verbs_shards holds"},
	{`^internal/(algebra|calendar)/\w+\.go$`, "internal/algebra internal/calendar ratelimit core model_calendar"},
	{`^internal/inmemory/\w+\.go$`, "internal/inmemory ratelimit/ratelimittest model_inmemory verbs_pause ops_sweep ops_overrides"},
	{`^internal/(keystate|keytext|visible|pin)/\w+\.go$`, "ratelimit cmd/txlimit console holds_definitions verbs_keys"},
	{`^internal/(outcome|handles|inflight)/\w+\.go$`, "ratelimit/httplimit ratelimit/rpclimit http rpc tx_ways verbs_plans"},
	{`^internal/(follow|shardpick)/\w+\.go$`, "ops_open verbs_shards"},
	{`^ratelimit/httplimit/\w+\.go$`, "ratelimit/httplimit http verbs_plans"},
	{`^ratelimit/rpclimit/\w+\.go$`, "ratelimit/rpclimit rpc"},
	{`^ratelimit/replay/\w+\.go$`, "ratelimit/replay model_replay"},
	{`^ratelimit/usage/\w+\.go$`, "ratelimit/usage ops_usage"},
	{`^ratelimit/(console|observe)/\w+\.go$`, "console holds_definitions ops_observe world_overrides_known verbs_plans"},
	{`^ratelimit/coalescer\w*\.go$`, "ratelimit coalescer verbs_decimals verbs_take http_settle"},
	{`^ratelimit/(during|hold)\w*\.go$`, "ratelimit holds verbs_errors"},
	{`^ratelimit/(tx|sql|db)\w*\.go$`, "ratelimit ratelimit/ratelimittest tx verbs_errors verbs_plans ops_open ops_overrides_write coalescer_embedded"},
	{`^ratelimit/errors\.go$`, "ratelimit tx verbs_errors verbs_plans verbs_reason holds"},
	{`^ratelimit/(open|overrides|publish|sweep|close|limit)\w*\.go$`, "ratelimit ratelimit/ratelimittest ops_open ops_overrides ops_lists ops_sweep sql_overrides tx_outside verbs_limits"},
	{`^ratelimit/call_(later|overrides|calendar)\.go$`, "ratelimit core holds ops_overrides"},
	{`^ratelimit/\w+\.go$`, "ratelimit ratelimit/ratelimittest core verbs_denial verbs_update verbs_errors holds ops_overrides_end ops_open tx_outside sql_citus http_settle"},
	{`^cmd/txlimit/\w+\.go$`, "cmd/txlimit verbs_keys world_overrides_known"},
}

// areasOf returns nothing for a file that no operator edits.
func areasOf(file string) string {
	for _, row := range areas {
		if regexp.MustCompile(row.files).MatchString(file) && !strings.HasSuffix(file, "_test.go") {
			return row.tests
		}
	}
	return ""
}

// testsOf returns the names of the tests of a product's file, separated by bars: those to begin with, and the others.
func testsOf(root, file string) (first, rest string, err error) {
	now, then, _ := strings.Cut(strings.Replace(areasOf(file), "core", core, 1), "|")
	first, err = testsOfAreas(root, now)
	if err == nil {
		rest, err = testsOfAreas(root, then)
	}
	return first, rest, err
}

func testsOfAreas(root, areas string) (string, error) {
	var names []string
	for of := range strings.FieldsSeq(areas) {
		pattern := "integration_test/" + strings.Replace(of+"_", "_", "/", 1) + "*test.go"
		if slices.Contains(packages, of) {
			pattern = of + "/*_test.go"
		}
		tests, err := testsIn(filepath.Join(root, pattern))
		if err != nil || tests == nil {
			return "", fmt.Errorf("there are no tests in %s: %w", pattern, err)
		}
		names = append(names, tests...)
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), "|"), nil
}

// productFiles are the files that operators edit.
func productFiles(root string) (files []string, err error) {
	for _, folder := range []string{"migrations", "internal", "ratelimit", "cmd"} {
		err = errors.Join(err, fs.WalkDir(os.DirFS(root), folder, func(file string, _ fs.DirEntry, err error) error {
			if areasOf(file) != "" {
				files = append(files, file)
			}
			return err
		}))
	}
	return files, err
}
