package browser_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/console"
)

// newPool makes a database with the engine in it, and a pool for it.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(migrated.NewDatabase(t, server))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// page is a tab of a browser in front of a console.
type page struct {
	*testing.T
	ctx context.Context
	url string

	mu       sync.Mutex
	problems []string // what the browser complained of
}

// look is how a page is looked at.
type look struct {
	width, height int64
	dark          bool
	noScript      bool
}

var desktop = look{width: 1240, height: 900}

// open opens a browser and a console, for a person; "" is nobody.
func open(t *testing.T, pool *pgxpool.Pool, who string, l look) *page {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("/admin/limits/", http.StripPrefix("/admin/limits", &console.Handler{DB: pool, Who: func(*http.Request) string { return who }}))
	app := httptest.NewServer(mux)
	t.Cleanup(app.Close)

	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(chromium), chromedp.NoSandbox, chromedp.Flag("hide-scrollbars", true))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)

	p := &page{T: t, ctx: ctx, url: app.URL + "/admin/limits/"}
	p.must(chromedp.Listen(ctx, func(event any) {
		p.mu.Lock()
		defer p.mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			p.problems = append(p.problems, fmt.Sprint(e.ExceptionDetails.Text, " ", e.ExceptionDetails.Exception))
		case *log.EventEntryAdded: // a Content-Security-Policy that was broken is one
			if e.Entry.Level == log.EntryLevelError && !strings.HasSuffix(e.Entry.URL, "/favicon.ico") {
				p.problems = append(p.problems, e.Entry.Text)
			}
		}
	}))
	scheme := "light"
	if l.dark {
		scheme = "dark"
	}
	_, err := chromedp.Call(ctx, log.Enable, cdp.Empty{})
	p.must(err)
	_, err = chromedp.Call(ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: l.width, Height: l.height, DeviceScaleFactor: 2, Mobile: l.width < 500})
	p.must(err)
	_, err = chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	p.must(err)
	_, err = chromedp.Call(ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: l.noScript})
	p.must(err)
	return p
}

func (p *page) must(err error) {
	p.Helper()
	if err != nil {
		p.Fatal(err)
	}
}

// do runs actions, which may take as long as a page may.
func (p *page) do(actions ...chromedp.Action[chromedp.Void]) {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, 30*time.Second)
	defer cancel()
	p.must(chromedp.Do(ctx, actions...))
}

// ask is do for an action that has a result.
func ask[T any](p *page, action chromedp.Action[T]) T {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, 30*time.Second)
	defer cancel()
	result, err := chromedp.Run(ctx, action)
	p.must(err)
	return result
}

// see opens an address of the console.
func (p *page) see(path string) {
	p.Helper()
	p.do(chromedp.Navigate(p.url+path), chromedp.WaitVisible(chromedp.CSS("main")))
}

// text is what one reads of a part of the page.
func (p *page) text(selector string) string {
	p.Helper()
	return strings.Join(strings.Fields(value[string](p, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))), " ")
}

// reads wants words in a part of the page, at once or within half a minute.
func (p *page) reads(selector string, words ...string) {
	p.Helper()
	for _, word := range words {
		p.within(30*time.Second, selector+" reads "+word, func() bool { return strings.Contains(p.text(selector), word) })
	}
}

func (p *page) within(d time.Duration, what string, so func() bool) time.Duration {
	p.Helper()
	begin := time.Now()
	for !so() {
		if time.Since(begin) > d {
			p.Fatalf("not within %v: %s\nthe page reads: %s", d, what, p.text("main"))
		}
		time.Sleep(20 * time.Millisecond)
	}
	return time.Since(begin)
}

// value is what a script returns.
func value[T any](p *page, script string) T {
	p.Helper()
	return ask(p, chromedp.Evaluate[T](script))
}

// picture leaves a picture of the whole page.
func (p *page) picture(name string) {
	p.Helper()
	dir := os.Getenv("TXLIMIT_PICTURES")
	if dir == "" {
		dir = "pictures"
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		p.Fatal(err)
	}
	shot, err := png.Decode(bytes.NewReader(ask(p, chromedp.FullScreenshot(100))))
	p.must(err)
	var small bytes.Buffer
	p.must((&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&small, fewColours(shot)))
	p.must(os.WriteFile(filepath.Join(dir, name+".png"), small.Bytes(), 0o644))
}

// fewColours makes a picture of 256 colours, the most frequent of it: a quarter of the bytes.
func fewColours(shot image.Image) image.Image {
	box := shot.Bounds()
	counts := make(map[color.RGBA]int)
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(shot.At(x, y)).(color.RGBA) }
	for y := box.Min.Y; y < box.Max.Y; y++ {
		for x := box.Min.X; x < box.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	frequent := slices.SortedFunc(maps.Keys(counts), func(a, b color.RGBA) int { return counts[b] - counts[a] })
	var palette color.Palette
	for _, c := range frequent[:min(len(frequent), 256)] {
		palette = append(palette, c)
	}
	index := make(map[color.RGBA]uint8)
	for c := range counts {
		index[c] = uint8(palette.Index(c))
	}
	small := image.NewPaletted(box, palette)
	for y := box.Min.Y; y < box.Max.Y; y++ {
		for x := box.Min.X; x < box.Max.X; x++ {
			small.SetColorIndex(x, y, index[at(x, y)])
		}
	}
	return small
}

// drawn counts the pixels of a chart that have a colour of the page, which is given by its name in the style sheet.
func (p *page) drawn(chart, colour string) int {
	p.Helper()
	return value[int](p, fmt.Sprintf(`(() => {
		const canvas = document.querySelector(%q + " canvas");
		if (!canvas) return 0;
		const probe = document.createElement("canvas").getContext("2d");
		probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(%q);
		probe.fillRect(0, 0, 1, 1);
		const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
		const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
		let n = 0;
		for (let i = 0; i < all.length; i += 4) if (all[i] === r && all[i + 1] === g && all[i + 2] === b && all[i + 3] === 255) n++;
		return n;
	})()`, chart, colour))
}

// unfold opens a form, of which only one is open at a time.
func (p *page) unfold(title string) {
	p.Helper()
	p.do(chromedp.Click(chromedp.Search(fmt.Sprintf(`//summary[normalize-space()=%q]`, title))))
	p.within(30*time.Second, title+" alone is open", func() bool {
		return value[string](p, `[...document.querySelectorAll("details[open] > summary")].map((s) => s.innerText.trim()).join()`) == title
	})
}

// fill fills in a field of the form that is open.
func (p *page) fill(field, text string) {
	p.Helper()
	selector := chromedp.CSS(fmt.Sprintf(`details[open] input[name=%q]`, field))
	p.do(chromedp.Clear(selector), chromedp.SendKeys(selector, text))
}

// press presses a button, in the open form or beside the forms, and waits for the page that follows.
func (p *page) press(button string) {
	p.Helper()
	value[bool](p, "window.before = true")
	p.do(chromedp.Click(chromedp.Search(fmt.Sprintf(`//button[normalize-space()=%q and not(ancestor::details[not(@open)])]`, button))))
	p.loaded(button)
}

// follow follows a link.
func (p *page) follow(link string) {
	p.Helper()
	value[bool](p, "window.before = true")
	p.do(chromedp.Click(chromedp.Search(fmt.Sprintf(`//main//a[normalize-space()=%q]`, link))))
	p.loaded(link)
}

func (p *page) loaded(after string) {
	p.Helper()
	p.within(20*time.Second, "the page after "+after, func() bool {
		return value[bool](p, `window.before === undefined && document.readyState === "complete"`)
	})
}

// denied reports whether an error is a denial.
func denied(err error) bool { return errors.Is(err, ratelimit.ErrDenied) }

// fits wants no page that is wider than the window.
func (p *page) fits() {
	p.Helper()
	if wide := value[[]string](p, `(() => {
		const all = [...document.querySelectorAll("body *")].filter((e) => !e.closest(".off, .skip, thead, svg") && e.getBoundingClientRect().right > innerWidth + 0.5);
		return document.documentElement.scrollWidth > innerWidth ? all.map((e) => e.tagName + "." + e.className + " " + Math.round(e.getBoundingClientRect().right)) : [];
	})()`); len(wide) > 0 {
		p.Errorf("wider than the window: %q", wide)
	}
}

// quiet wants the browser to have complained of nothing.
func (p *page) quiet() {
	p.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, problem := range p.problems {
		p.Errorf("the browser: %s", problem)
	}
}
