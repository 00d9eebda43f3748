package observe_test

import (
	"log/slog"
	"os"
	"time"

	"go.opentelemetry.io/otel"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/observe"
)

func Example() {
	metrics, err := observe.NewMetrics(otel.GetMeterProvider())
	if err != nil {
		panic(err)
	}
	log := &observe.Log{
		Logger: slog.New(slog.NewJSONHandler(os.Stderr, nil)),
		Every:  time.Minute,
		Key:    observe.HashKey([]byte(os.Getenv("LOG_KEY_SECRET"))),
	}
	limits := ratelimit.Limiter{
		Observer: observe.Join(metrics.Observe, log.Observe),
		OnRetry:  metrics.Retry,
	}
	_ = &limits // the application's one limiter
}
