package ops_test

import (
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
)

func TestMain(m *testing.M) {
	harness.Main(m, map[string]func(url string) error{usageWorker: workOnUsage, openWorker: workASecond, workerURL: overridesWorker})
}
