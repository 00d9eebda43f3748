package integration_test

import (
	"flag"
	"time"
)

// chaos is how long each of the tests goes on that cancel, time out, close and kill connections at random.
var chaos = flag.Duration("chaos", 3*time.Second, "how long each test that breaks things at random goes on")
