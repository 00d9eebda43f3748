package main

import (
	"errors"
	"image/color"
	"os"
	"path/filepath"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// palette is the palette of Okabe and Ito, which colour-blind people can tell apart.
var palette = []color.Color{
	color.RGBA{R: 213, G: 94, A: 255}, color.RGBA{R: 230, G: 159, A: 255}, color.RGBA{G: 158, B: 115, A: 255},
	color.RGBA{G: 114, B: 178, A: 255}, color.RGBA{R: 86, G: 180, B: 233, A: 255}, color.RGBA{R: 204, G: 121, B: 167, A: 255},
	color.RGBA{R: 120, G: 94, B: 60, A: 255}, color.RGBA{R: 110, G: 110, B: 110, A: 255}, color.RGBA{R: 90, G: 60, B: 160, A: 255},
}

// drawCharts draws the throughput over the number of goroutines, one file for each mode.
func drawCharts(dir string, measured []measurement) error {
	for i, m := range modes {
		plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
		p := plot.New()
		p.Title.Text = "Decisions per second, " + m.title
		p.X.Label.Text = "goroutines"
		p.Y.Label.Text = "decisions per second"
		p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
		p.X.Tick.Marker, p.Y.Tick.Marker = goroutineTicks{}, decadeTicks{}
		p.Title.TextStyle.Font.Size, p.X.Label.TextStyle.Font.Size, p.Y.Label.TextStyle.Font.Size = 16, 14, 14
		for _, label := range []*font.Length{&p.X.Tick.Label.Font.Size, &p.Y.Tick.Label.Font.Size, &p.Legend.TextStyle.Font.Size} {
			*label = 12
		}
		p.Title.Padding, p.Legend.Padding, p.Legend.ThumbnailWidth = 10, 3, 30
		grid := plotter.NewGrid()
		grid.Vertical.Color, grid.Horizontal.Color = color.Gray{Y: 225}, color.Gray{Y: 225}
		p.Add(grid)

		drawn := 0
		for _, c := range measured {
			if !c.chart {
				continue
			}
			var points plotter.XYs
			for _, goroutines := range goroutineSteps {
				points = append(points, plotter.XY{X: float64(goroutines), Y: max(c.modes[i].at[goroutines].perSecond(), 1)})
			}
			line, marks, err := plotter.NewLinePoints(points)
			if err != nil {
				return err
			}
			line.Color = palette[drawn%len(palette)]
			line.Width = 1.5
			if c.ours() {
				line.Width = 3
			}
			if c.redis {
				line.Dashes = []vg.Length{6, 3}
			}
			if c.floor {
				line.Color, line.Dashes = color.Black, []vg.Length{2, 2}
			} else {
				drawn++
			}
			marks.Color, marks.Shape, marks.Radius = line.Color, draw.CircleGlyph{}, 3
			p.Add(line, marks)
			p.Legend.Add(c.name, line, marks)
		}
		if err := save(p, filepath.Join(dir, m.file)); err != nil {
			return err
		}
	}
	return nil
}

// save writes the plot to a file, with the legend to its right, where it hides nothing.
func save(p *plot.Plot, file string) error {
	const width, height, legend = 900, 480, 235
	canvas, err := draw.NewFormattedCanvas(width, height, "svg")
	if err != nil {
		return err
	}
	p.Legend.Top, p.Legend.Left = true, true
	whole := draw.New(canvas)
	whole.SetColor(color.White) // the page around it may be dark
	whole.Fill(whole.Path())
	right := p.Legend
	p.Legend = plot.NewLegend()
	p.Draw(draw.Crop(whole, 10, -legend, 10, -10))
	right.Draw(draw.Crop(whole, width-legend+10, 0, 0, -40))
	return write(canvas, file)
}

// goroutineTicks labels the steps.
type goroutineTicks struct{}

func (goroutineTicks) Ticks(_, _ float64) []plot.Tick {
	var ticks []plot.Tick
	for _, n := range goroutineSteps {
		ticks = append(ticks, plot.Tick{Value: float64(n), Label: strconv.Itoa(n)})
	}
	return ticks
}

// decadeTicks labels 1, 3, 10, 30, 100, ...
type decadeTicks struct{}

func (decadeTicks) Ticks(lowest, highest float64) []plot.Tick {
	var ticks []plot.Tick
	for decade := 1.0; decade <= highest; decade *= 10 {
		for _, v := range []float64{decade, 3 * decade} {
			if v >= lowest && v <= highest {
				ticks = append(ticks, plot.Tick{Value: v, Label: thousands(v) + " "})
			}
		}
	}
	return ticks
}

func write(canvas vg.CanvasWriterTo, file string) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = canvas.WriteTo(f)
	return err
}
