# What one can do here; CI calls the same targets. Nothing needs a prepared database: whatever needs a Postgres finds or
# starts one (see internal/postgres) and leaves nothing behind.

# The modules are those of go.work, `go test work` covers them all.
MODULES := $(shell sed -n 's/^[[:space:]]\(\.[^[:space:]]*\).*/\1/p' go.work)

GOLANGCI_LINT := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
# sqlc looks at the functions in a migrated database.
WITH_SCHEMA := CGO_ENABLED=0 go run ./internal/postgres/cmd/withpostgres -migrated --
SQLC := $(WITH_SCHEMA) go run github.com/sqlc-dev/sqlc/cmd/sqlc@v1.31.1

FUZZTIME ?= 10s

.PHONY: long-sized long-others help docs oldest release prerelease demo examples orms console test long slowest race check lint generated tidied bench container conformance matrix partitioned pgbouncer faults soak mutate world fuzz generate tidy

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: ## play the quickstart, ten seconds of rate limits on a real Postgres (CONSOLE=1: then the page for operators, until Ctrl-C)
	go run ./examples/quickstart $(if $(CONSOLE),-console)

examples: ## build and run every example on a real Postgres, and compare what each prints with its output.txt
	go test -count=1 -v -timeout 5h ./examples/...

# No machine is too slow for the timeout. make check vets.
TEST = go test -vet=off -count=1 -parallel 4 -timeout 5h
# The areas of the integration tests, the longest first, and all other packages.
AREAS_BY_TIME = $(addprefix ./integration_test/,ops verbs holds sql tx model world coalescer attack console http rpc)
OTHERS = $$(go list work | grep -vxF "$$(go list $(AREAS_BY_TIME))")

# What takes minutes by nature, outside the integration tests.
LONG = ^Test(EveryFigureRuns|ExactContendersGrantWithinTheBound|Growth|Soak|APlainServerConforms|TheStatementsForADistributedTableConform|AnApplicationsRoleSuffices|OneBadRowBlindsNoCommand|APoolOfOneConnection|BackendsAreTerminated|ConnectionsAreCut|TimeoutsOfTheServer|TheDiskIsFull|Failover|TheServerIsKilled|WhatHoldsBackCleanup|WhatAnOldSnapshotCosts)$$|^TestEveryExampleTellsItsStory$$/^(concurrency|llm-budget|river-dispatch)$$

# Two packages at a time, since tests wait almost as much as they compute. The longest is the first.
test: ## run the tests of every module, each rule once (ARGS=-v)
	$(TEST) -p 2 -short -skip '$(LONG)' $(ARGS) $(AREAS_BY_TIME) $(OTHERS)

long: long-sized long-others ## run what make test leaves out, and at its usual size what it plays small (EXCEPT="tx http": but not these areas)

long-sized:
	tests=$$(integration_test/scripts/tests.sh -sized) && $(TEST) -p 2 $(ARGS) $(if $(EXCEPT),-skip "$$(integration_test/scripts/tests.sh $(EXCEPT) | cut -d ' ' -f 1)") -run $$tests

long-others:
	$(TEST) $(ARGS) -p 1 -run '$(LONG)' ./bench ./cmd/txlimit ./examples ./integration_test/faults ./integration_test/soak ./integration_test/conformance

slowest: ## print which tests of make test took longest, in seconds (TARGET=long)
	@$(MAKE) --no-print-directory $(or $(TARGET),test) ARGS=-v | sed -nE 's/^(FAIL.*)/\1/p; s/^--- ([A-Z]*: [^ ]*) \((.*)s\)$$/\2 \1/p' | sort -rn | head -n 40

race: ## run the tests of every module with the race detector, and the random ones at twice the size (AREAS="tx coalescer" ARGS=-short: less)
	tests=$$(integration_test/scripts/tests.sh $(AREAS)) && $(TEST) -p 2 -race $(ARGS) -run $$tests $(if $(AREAS),,-whole)
	$(TEST) -race $(ARGS) -p 1 $(if $(AREAS),./internal/... ./internal/postgres/... ./ratelimit ./ratelimit/console ./ratelimit/httplimit ./ratelimit/ratelimittest ./ratelimit/usage ./ratelimit/observe/... ./ratelimit/rpclimit/...,$(OTHERS))

orms: ## run the limiter in the transactions of GORM, sqlx, bun and ent
	cd integration_test/orms && go test -count=1 -v -run . .

PICTURES ?= $(CURDIR)/integration_test/browser/pictures
console: ## use the console in Chromium, and leave pictures of its pages, which git ignores (DOCS=1: some in docs/img, too)
	cd integration_test/browser && TXLIMIT_BROWSER=1 TXLIMIT_PICTURES=$(abspath $(PICTURES)) go test -count=1 -v -timeout 5h .
	$(if $(DOCS),for name in limits limit key-override limit-day-dark; do cp $(PICTURES)/$$name.png docs/img/console-$$name.png; done)

container: ## run the integration tests on a Postgres in a Docker container (AREAS="verbs_wait tx": those of some folders or files)
	integration_test/scripts/container.sh

matrix: ## run the integration tests on PostgreSQL 14 to 18 (MATRIX="14 18" AREAS="sql ops")
	integration_test/scripts/matrix.sh

conformance: ## say what works on a migrated server (URL=postgres://...), or on servers of all kinds (TABLES="plain" MATRIX="14 18")
	@integration_test/scripts/conformance.sh

partitioned: ## run the integration tests on a table that is partitioned by key (AREAS="verbs sql")
	tests=$$(integration_test/scripts/tests.sh $(AREAS)) && TXLIMIT_TEST_TABLE=partitioned $(TEST) -p 2 -run $$tests

pgbouncer: ## run the integration tests through PgBouncer, with prepared statements and without
	integration_test/scripts/pgbouncer.sh

faults: ## break what can break under load, for as long as it takes to be sure, and compare what is left with what was said
	cd integration_test && go test -count=1 -v -timeout 5h ./faults -long

TIME ?= 20m
soak: ## mixed traffic from four processes, with faults, checked afterwards against the exact model (TIME=20m)
	cd integration_test && go test -count=1 -v -timeout 3h ./soak -time $(TIME)

world: TIME = 1h
world: ## play random worlds in which everything happens, and try every number that is shown (TIME=1h SEED=4711)
	cd integration_test && go test -count=1 -v -timeout 24h -run '^TestWorld$$' ./world -worldtime $(TIME) $(if $(SEED),-seed $(SEED))

mutate: ## break the engine on purpose, one edit at a time, and print which test notices (ONLY=regular expression WORLD=5m: does TestWorld? SAMPLE=20 SEED=1: edits that operators make, with a score; MATRIX=1: all tests that notice)
	go run ./integration_test/mutate $(if $(ONLY),-only '$(ONLY)') $(if $(WORLD),-world $(WORLD)) $(if $(SAMPLE),-sample $(SAMPLE)) $(if $(SEED),-seed $(SEED)) $(if $(MATRIX),-matrix)

check: lint generated tidied docs oldest ## formatting, linters, vet, generated code up to date, go.mod files tidy, no dead link

lint:
	@unformatted=$$(gofmt -l .) && test -z "$$unformatted" || { echo "not formatted, run gofmt -w:" $$unformatted; exit 1; }
	go vet work
	$(GOLANGCI_LINT) run --allow-parallel-runners $(MODULES:=/...)

generated:
	@echo "the migrations as they are generated from migrations/engine"
	@cd migrations && go run generate.go -check
	$(WITH_SCHEMA) go run -C migrations generate.go -hash -check
	$(SQLC) diff

docs:
	go run ./internal/doccheck

# What users import, with the oldest Go that is supported, which every go.mod names.
OLDEST := go$(shell sed -n 's/^go //p' go.mod)
oldest:
	@for m in $(MODULES); do \
		[ "go$$(sed -n 's/^go //p' $$m/go.mod)" = "$(OLDEST)" ] || { echo "$$m/go.mod does not name $(OLDEST)"; exit 1; }; \
	done
	GOTOOLCHAIN=$(OLDEST) go test -count=1 ./... ./ratelimit/observe/... ./ratelimit/rpclimit/...

tidied:
	@for m in $(MODULES); do \
		echo "go mod tidy -diff in $$m"; \
		(cd $$m && GOWORK=off go mod tidy -diff) || { echo "run make tidy"; exit 1; }; \
	done

generate: ## write the migrations and their version from migrations/engine, and internal/dbsqlc from the queries
	cd migrations && go run generate.go
	$(WITH_SCHEMA) go run -C migrations generate.go -hash
	$(SQLC) generate

prerelease: check test long race container conformance matrix partitioned pgbouncer faults soak fuzz mutate bench ## everything, which takes a night: before a release
	$(MAKE) mutate SAMPLE=200
	$(MAKE) world TIME=8h
	.ci/release -try v0.0.0-prerelease

release: ## tag all modules for VERSION=v0.1.0, and build a program with each, from a proxy (TRY=-try: tag nothing)
	.ci/release $(TRY) $(VERSION)

bench: ## measure everything side by side, into bench/RESULTS.md (about 40 minutes; wants redis-server, and a quiet machine)
	go run ./bench all

fuzz: ## run each fuzz target for a while (FUZZTIME=10s)
	@listed=$$(go test -list '^Fuzz' work) || { echo "$$listed"; exit 1; }; \
	targets=$$(echo "$$listed" | awk '/^Fuzz/ { f[n++] = $$1 } /^ok/ { for (i = 0; i < n; i++) print $$2 ":" f[i]; n = 0 }'); \
	test -n "$$targets" || { echo "there are no fuzz targets"; exit 1; }; \
	for t in $$targets; do \
		echo "$$t"; \
		go test -run '^$$' -fuzz "^$${t##*:}\$$" -fuzztime $(FUZZTIME) "$${t%:*}" || exit 1; \
	done

tidy: ## go mod tidy in every module
	@for m in $(MODULES); do (cd $$m && GOWORK=off go mod tidy) || exit 1; done
