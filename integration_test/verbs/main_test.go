package verbs_test

import (
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }
