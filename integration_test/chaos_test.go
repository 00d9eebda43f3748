package integration_test

import (
	"flag"
	"time"
)

// chaos is for how long the chaos tests cancel, time out and kill connections at random.
var chaos = flag.Duration("chaos", 3*time.Second, "how long each chaos test lasts")
