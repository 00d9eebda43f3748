package replay

import (
	"encoding/xml"
	"fmt"
	"strings"

	"github.com/txlimit/txlimit/internal/calendar"
)

// The picture's measures, in pixels.
const (
	pictureWidth = 960
	margin       = 56
	panelHeight  = 190
	chartTop     = 62 // within its panel
	chartHeight  = 96
	chartWidth   = pictureWidth - 2*margin
)

// style has the colours of light and dark. Granted and denied also differ in lightness.
const style = `<style>
svg { font: 13px system-ui, sans-serif; --back: #ffffff; --text: #1f2328; --dim: #59636e; --grid: #d1d9e0; --granted: #8cb4e8; --denied: #b42318 }
@media (prefers-color-scheme: dark) { svg { --back: #0d1117; --text: #f0f6fc; --dim: #9198a1; --grid: #3d444d; --granted: #33547f; --denied: #ff7b72 } }
.back { fill: var(--back) } text { fill: var(--text) } .dim { fill: var(--dim); font-size: 12px } .grid { stroke: var(--grid) }
.granted { fill: var(--granted) } .denied { fill: var(--denied) } .name { font-weight: 600 }
</style>
`

// SVG is a picture of the demand over time, with a chart for each candidate: what it would have granted, and what denied. It
// needs nothing else, and is readable in light and dark.
func (r *Report) SVG() string {
	var b strings.Builder
	height := 48 + panelHeight*len(r.Candidates)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%[1]d" height="%[2]d" role="img">`+"\n", pictureWidth, height)
	title := "no events"
	if r.Events > 0 {
		title = fmt.Sprintf("%d events of %d keys, from %s to %s", r.Events, r.Keys, instant(r.From), instant(r.To))
	}
	fmt.Fprintf(&b, "<title>%s</title>\n%s", title, style)
	fmt.Fprintf(&b, `<rect class="back" width="%d" height="%d"/>`+"\n", pictureWidth, height)
	fmt.Fprintf(&b, `<text x="%d" y="28">%s</text>`+"\n", margin, title)
	legend := pictureWidth - margin - 130
	fmt.Fprintf(&b, `<rect class="granted" x="%d" y="18" width="11" height="11"/><text x="%d" y="28">granted</text>`, legend, legend+16)
	fmt.Fprintf(&b, `<rect class="denied" x="%d" y="18" width="11" height="11"/><text x="%d" y="28">denied</text>`+"\n", legend+72, legend+88)
	for i := range r.Candidates {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n", margin, 48+panelHeight*i)
		r.panel(&b, i)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// panel draws one candidate's chart.
func (r *Report) panel(b *strings.Builder, candidate int) {
	c := r.Candidates[candidate]
	fmt.Fprintf(b, `<text class="name" y="18">%s</text>`+"\n", escaped(c.Limit.String(), 110))
	summary := fmt.Sprintf("denied: %d events (%s), %d keys", c.Denied, percent(c.Denied, r.Events), c.KeysDenied)
	if len(c.MostDenied) > 0 {
		summary += fmt.Sprintf("; most denied: %s, %d times", printable(c.MostDenied[0].Key, 40), c.MostDenied[0].Denied)
	}
	fmt.Fprintf(b, `<text class="dim" y="38">%s</text>`+"\n", escaped(summary, 130))
	bottom := chartTop + chartHeight
	if len(r.spans) > 0 {
		most := r.Busiest[0].Events
		first, last := r.spans[0].From, r.spans[len(r.spans)-1].From
		n := int(last.Sub(first)/r.width) + 1
		fmt.Fprintf(b, `<path class="grid" d="M0 %dH%d"/><text class="dim" x="-8" y="%d" text-anchor="end">%d</text>`+"\n", chartTop, chartWidth, chartTop+4, most)
		fmt.Fprintf(b, `<text class="dim" x="-8" y="%d" text-anchor="end">0</text>`+"\n", bottom+4)
		for _, span := range r.spans {
			r.bar(b, span, candidate, n, most)
		}
		fmt.Fprintf(b, `<text class="dim" y="%d">%s</text>`+"\n", bottom+18, instant(first))
		fmt.Fprintf(b, `<text class="dim" x="%d" y="%d" text-anchor="middle">events per %s</text>`+"\n", chartWidth/2, bottom+18, calendar.PeriodText(r.width))
		fmt.Fprintf(b, `<text class="dim" x="%d" y="%d" text-anchor="end">%s</text>`+"\n", chartWidth, bottom+18, instant(last.Add(r.width)))
	}
	fmt.Fprintf(b, `<path class="grid" d="M0 %dH%d"/>`+"\n", bottom, chartWidth)
}

// bar draws a span of the n that there is room for: what was granted, and what was denied on top of it.
func (r *Report) bar(b *strings.Builder, span Span, candidate, n, most int) {
	denied := span.Denied[candidate]
	width := float64(chartWidth) / float64(n)
	x := width * float64(span.From.Sub(r.spans[0].From)/r.width)
	tall := func(events int) float64 { return chartHeight * float64(events) / float64(most) }
	top := chartTop + chartHeight - tall(span.Events)
	fmt.Fprintf(b, "<g><title>%s: %d events, %d denied</title>", instant(span.From), span.Events, denied)
	for _, part := range []struct {
		class  string
		y      float64
		events int
	}{{"denied", top, denied}, {"granted", top + tall(denied), span.Events - denied}} {
		if part.events > 0 {
			fmt.Fprintf(b, `<rect class="%s" x="%.2f" y="%.2f" width="%.2f" height="%.2f"/>`, part.class, x, part.y, max(min(width*0.9, 40), 1), tall(part.events))
		}
	}
	b.WriteString("</g>\n")
}

// escaped is a text for XML, of at most so many characters.
func escaped(s string, most int) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(printable(s, most))) // a Builder has no errors
	return b.String()
}
